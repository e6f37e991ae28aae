// Package page writes the pages in docs/results: where their figures are from, their tables and their drawings.
package page

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// OwnGoals is a note for every page with goals.
const OwnGoals = "Goals are this project's own: \"reached: yes\" means that a figure is as good as was asked for, not that it is the best."

// A Source is what a figure was measured at.
type Source struct {
	Commit string // of the checkout, and whether it had changes
	Day    string // such as 2026-01-31
}

// NewSource is the present state of the checkout: folders are those whose changes count.
func NewSource(ctx context.Context, root string, folders ...string) Source {
	return Source{Commit: toolbox.Commit(ctx, root, folders...), Day: time.Now().UTC().Format(time.DateOnly)}
}

// String is "commit C, on DAY"; the day is left out where it is not known.
func (s Source) String() string {
	if s.Day == "" {
		return "commit " + s.Commit
	}
	return fmt.Sprintf("commit %s, on %s", s.Commit, s.Day)
}

// Outdated names the sources since which the folders have changed, up to the present commit, in a sentence. It is empty where
// there are none.
func Outdated(ctx context.Context, root string, sources []Source, folders ...string) string {
	var commits []string
	for _, s := range sources {
		commit, _, _ := strings.Cut(s.Commit, ",")
		args := append([]string{"-C", root, "diff", "--quiet", commit, "HEAD", "--"}, folders...)
		if !slices.Contains(commits, commit) && exec.CommandContext(ctx, "git", args...).Run() != nil {
			commits = append(commits, commit)
		}
	}
	switch len(commits) {
	case 0:
		return ""
	case 1:
		return fmt.Sprintf("Taken at commit %s; the code it measures has changed since.", commits[0])
	}
	return fmt.Sprintf("Taken at commits %s; the code they measure has changed since.", strings.Join(commits, ", "))
}

// A Table is a table of Markdown, and of text.
type Table struct {
	Heading []string
	Rows    [][]string
}

// Add adds a row.
func (t *Table) Add(cells ...string) { t.Rows = append(t.Rows, cells) }

// Markdown writes the table.
func (t *Table) Markdown(b *bytes.Buffer) {
	for _, cells := range append([][]string{t.Heading, slices.Repeat([]string{"---"}, len(t.Heading))}, t.Rows...) {
		fmt.Fprintf(b, "| %s |\n", strings.Join(cells, " | "))
	}
}

// Text writes the table in columns, for a terminal.
func (t *Table) Text(out io.Writer) error {
	columns := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, cells := range append([][]string{t.Heading}, t.Rows...) {
		fmt.Fprintln(columns, strings.Join(cells, "\t"))
	}
	return columns.Flush()
}

// Write writes a page's files into a folder.
func Write(folder string, files map[string][]byte) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return fmt.Errorf("results: %w", err)
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(folder, name), content, 0o644); err != nil {
			return fmt.Errorf("results: %w", err)
		}
	}
	return nil
}

// Capital is text with a capital first letter.
func Capital(text string) string { return strings.ToUpper(text[:1]) + text[1:] }

// YesNo is whether a goal was reached.
func YesNo(reached bool) string {
	if reached {
		return "yes"
	}
	return "no"
}
