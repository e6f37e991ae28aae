// Package page writes the pages in docs/results: where their figures are from, their tables and their drawings.
package page

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// OneProcessor is a note for pages whose figures come from one machine.
const OneProcessor = "Another processor gives other figures; none was measured on one."

// OwnGoals is a note for every page with goals.
const OwnGoals = "Goals are this project's own: \"reached: yes\" means that a figure is as good as was asked for, not that it is the best."

// A Source is what a figure was measured at, and how.
type Source struct {
	Commit  string // of the checkout, and whether it had changes
	Day     string // such as 2026-01-31
	Command string // what measured it
}

// NewSource is the present state of the checkout, and this program's command line. Folders are those whose changes count.
func NewSource(ctx context.Context, root string, folders ...string) Source {
	return Source{Commit: toolbox.Commit(ctx, root, folders...), Day: time.Now().UTC().Format(time.DateOnly), Command: Command(os.Args[1:])}
}

// Command is how this program is run with these arguments. Files have only their names, as their folders are this machine's.
func Command(arguments []string) string {
	program := "evenkeel.dev/evenkeel"
	if info, ok := debug.ReadBuildInfo(); ok {
		program = info.Path
	}
	words := []string{"go run", strings.Replace(program, "evenkeel.dev/evenkeel", ".", 1)}
	for _, word := range arguments {
		at := strings.LastIndexByte(word, '=') + 1
		flag, value := word[:at], word[at:]
		if strings.HasPrefix(value, "/") {
			value = filepath.Base(value)
		}
		if strings.ContainsAny(value, " \t'\"`$&|;<>()*?[]{}\\#~") {
			value = "'" + value + "'"
		}
		words = append(words, flag+value)
	}
	return strings.Join(words, " ")
}

// String is "commit C, on DAY, by `COMMAND`"; what is not known is left out.
func (s Source) String() string {
	text := "commit " + s.Commit
	if s.Day != "" {
		text += ", on " + s.Day
	}
	if s.Command != "" {
		text += ", by `" + s.Command + "`"
	}
	return text
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
