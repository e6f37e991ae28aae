// Package page writes the pages in docs/results: where their figures are from, their tables and their drawings.
package page

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"text/tabwriter"
)

// OwnGoals is a note for every page with goals.
const OwnGoals = "Goals are this project's own: \"reached: yes\" means that a figure is as good as was asked for, not that it is the best."

// Command is how this program is run with these arguments. Files have only their names, as their folders are this
// machine's.
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
