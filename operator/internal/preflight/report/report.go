// Package report keeps the report of a check in ConfigMaps. One holds the fields that exist once, and in the end the
// text for people. The lists of nodes and runs are in others, which are appended to, one after the other, as none may
// have more than 1 MiB.
package report

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/operator/internal/preflight"
)

// Keys of the ConfigMaps.
const (
	// RecordFile holds the fields that exist once. It is in the first ConfigMap, as are the next two.
	RecordFile = "record.json"
	// MarkdownFile is the report for people, and PairsFile the heat map of the pairs.
	MarkdownFile = "report.md"
	PairsFile    = "pairs.svg"
	// LinesFile has nodes and runs, one a line. It is in the other ConfigMaps.
	LinesFile = "record.jsonl"
)

const (
	// maxLines is the size from which on lines go to another ConfigMap. It bounds what is written again with each result.
	maxLines = 128 << 10
	// maxParts bounds what is read: a check of 5,000 nodes, whose runs all fail, has 40.
	maxParts = 1024
)

// A Report is what was read or written of a check's report. Its methods fail if somebody else changed it meanwhile; it
// then has to be read again.
type Report struct {
	Record *preflight.Record
	// Markdown and Pairs are what people read; empty before the end.
	Markdown, Pairs string

	head, part *corev1.ConfigMap // part is the last one
	parts      int
	saved      preflight.Mark
}

// Name is the name of the report.
func (r *Report) Name() string { return r.head.Name }

// Owner is the object that the report belongs to.
func (r *Report) Owner() *metav1.OwnerReference { return metav1.GetControllerOf(r.head) }

func partName(name string, number int) string { return fmt.Sprintf("%s-%d", name, number) }

// Read reads a report. Its error is NotFound if there is none.
func Read(ctx context.Context, from client.Reader, namespace, name string) (*Report, error) {
	r := &Report{head: &corev1.ConfigMap{}}
	if err := from.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, r.head); err != nil {
		return nil, fmt.Errorf("read the report: %w", err)
	}
	var lines []string
	for number := 1; number <= maxParts; number++ {
		part := &corev1.ConfigMap{}
		err := from.Get(ctx, client.ObjectKey{Namespace: namespace, Name: partName(name, number)}, part)
		if apierrors.IsNotFound(err) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("read the report: %w", err)
		}
		if owner := metav1.GetControllerOf(part); owner == nil || r.Owner() == nil || owner.UID != r.Owner().UID {
			break // it belongs to another object
		}
		r.part, r.parts = part, number
		lines = append(lines, part.Data[LinesFile])
	}
	var err error
	if r.Record, r.saved, err = preflight.Decode(r.head.Data[RecordFile], lines...); err != nil {
		return nil, &UnreadableError{Name: name, Err: err}
	}
	r.Markdown, r.Pairs = r.head.Data[MarkdownFile], r.head.Data[PairsFile]
	return r, nil
}

// An UnreadableError says that somebody changed a report, so that it cannot be read any more.
type UnreadableError struct {
	Name string
	Err  error
}

func (e *UnreadableError) Error() string {
	return fmt.Sprintf("ConfigMap %s was changed: %v", e.Name, e.Err)
}

func (e *UnreadableError) Unwrap() error { return e.Err }

// Create writes a new report. The first ConfigMap is written last: without it there is no report, and what an earlier
// attempt left of the others is written over.
func Create(ctx context.Context, c client.Client, live client.Reader, meta metav1.ObjectMeta, record *preflight.Record) (*Report, error) {
	r := &Report{Record: record, head: &corev1.ConfigMap{ObjectMeta: meta}}
	if err := r.append(ctx, c, live); err != nil {
		return nil, err
	}
	if err := r.emptyParts(ctx, c, live); err != nil {
		return nil, err
	}
	text, err := record.EncodeHead()
	if err != nil {
		return nil, err
	}
	r.head.Data = map[string]string{RecordFile: text}
	if err := c.Create(ctx, r.head); err != nil {
		return nil, fmt.Errorf("create the report: %w", err)
	}
	return r, nil
}

// Save writes what was added to the record's lists.
func (r *Report) Save(ctx context.Context, c client.Client) error { return r.append(ctx, c, nil) }

// Finish writes the record's end and what people read.
func (r *Report) Finish(ctx context.Context, c client.Client) error {
	if err := r.Save(ctx, c); err != nil {
		return err
	}
	text, err := r.Record.EncodeHead()
	if err != nil {
		return err
	}
	r.head.Data = map[string]string{RecordFile: text, MarkdownFile: r.Markdown, PairsFile: r.Pairs}
	if err := c.Update(ctx, r.head); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}

// append writes the lines that were not written yet. With live, parts that exist are written over.
func (r *Report) append(ctx context.Context, c client.Client, live client.Reader) error {
	lines, mark, err := r.Record.EncodeLines(r.saved)
	if err != nil {
		return err
	}
	for len(lines) > 0 {
		text := ""
		if r.part != nil {
			text = r.part.Data[LinesFile]
		}
		if len(text) >= maxLines || r.part == nil {
			if err := r.addPart(ctx, c, live, &lines); err != nil {
				return err
			}
			continue
		}
		part := r.part.DeepCopy()
		part.Data = map[string]string{LinesFile: text + takeLines(&lines, maxLines-len(text))}
		if err := c.Update(ctx, part); err != nil {
			return fmt.Errorf("write the report: %w", err)
		}
		r.part = part
	}
	r.saved = mark
	return nil
}

// emptyParts empties the parts that an earlier attempt made beyond the parts of this one.
func (r *Report) emptyParts(ctx context.Context, c client.Client, live client.Reader) error {
	for {
		part := &corev1.ConfigMap{}
		err := live.Get(ctx, client.ObjectKey{Namespace: r.head.Namespace, Name: partName(r.head.Name, r.parts+1)}, part)
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the report: %w", err)
		}
		part.Data = nil
		if err := c.Update(ctx, part); err != nil {
			return fmt.Errorf("write the report: %w", err)
		}
		r.part, r.parts = part, r.parts+1
	}
}

func (r *Report) addPart(ctx context.Context, c client.Client, live client.Reader, lines *[]string) error {
	part := &corev1.ConfigMap{ObjectMeta: *r.head.ObjectMeta.DeepCopy()}
	part.ResourceVersion, part.UID, part.ManagedFields = "", "", nil
	part.Name = partName(r.head.Name, r.parts+1)
	part.Data = map[string]string{LinesFile: takeLines(lines, maxLines)}
	err := c.Create(ctx, part)
	if apierrors.IsAlreadyExists(err) && live != nil {
		had := &corev1.ConfigMap{}
		if err := live.Get(ctx, client.ObjectKeyFromObject(part), had); err != nil {
			return fmt.Errorf("read the report: %w", err)
		}
		if owner := metav1.GetControllerOf(had); owner == nil || owner.UID != r.Owner().UID {
			return fmt.Errorf("create the report: %w", err)
		}
		part.ResourceVersion = had.ResourceVersion
		err = c.Update(ctx, part)
	}
	if err != nil {
		return fmt.Errorf("create the report: %w", err)
	}
	r.part, r.parts = part, r.parts+1
	return nil
}

// takeLines removes lines from the front, as many as fit and at least one.
func takeLines(lines *[]string, size int) string {
	var b strings.Builder
	count := 0
	for count < len(*lines) && (count == 0 || b.Len()+len((*lines)[count]) <= size) {
		b.WriteString((*lines)[count])
		count++
	}
	*lines = (*lines)[count:]
	return b.String()
}
