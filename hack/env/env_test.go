package env

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
)

func TestLabelledWritesWholeLines(t *testing.T) {
	var out bytes.Buffer
	w := labelled(&out, "images")
	for _, part := range []string{"building ", "one\nbuilding two\nbuil", "ding three\n", "not complete"} {
		if n, err := io.WriteString(w, part); n != len(part) || err != nil {
			t.Fatalf("wrote %d of %d bytes: %v", n, len(part), err)
		}
	}
	want := ""
	for _, line := range []string{"one", "two", "three"} {
		want += fmt.Sprintf("%-18s building %s\n", "images", line)
	}
	if out.String() != want {
		t.Errorf("got %q, want %q", out.String(), want)
	}
}

func TestFailedStepStopsTheOthers(t *testing.T) {
	var out bytes.Buffer
	e := &Cluster{config: Config{Progress: &out}}
	broken := errors.New("no space left")
	err := e.together(t.Context(),
		step{"waits", func(ctx context.Context, _ io.Writer) error { <-ctx.Done(); return ctx.Err() }},
		step{"breaks", func(context.Context, io.Writer) error { return broken }},
	)
	if !errors.Is(err, broken) || !strings.HasPrefix(err.Error(), "breaks: ") {
		t.Errorf("error %v: not that of the step that failed, with its name", err)
	}
	if strings.Contains(out.String(), "done") {
		t.Errorf("a step that failed or was stopped is done: %q", out.String())
	}
}
