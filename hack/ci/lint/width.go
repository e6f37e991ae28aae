package lint

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"unicode/utf8"
)

// longLines lists the files that may have lines beyond the limit. It only shrinks: a file without one must leave the
// list, and no file joins it.
const longLines = "hack/ci/lint/long-lines.txt"

// maxWidth is the maximum number of characters of a line, by the end of the file's name. A tab counts as one.
var maxWidth = map[string]int{".go": 120, ".rs": 100}

// onlyText is a line of nothing but a string. It may be longer, so that grep finds a message in one piece.
var onlyText = regexp.MustCompile(`^\s*"([^"\\]|\\.)*",?$`)

// marker is a marker of controller-gen, which has to be on one line.
var marker = regexp.MustCompile(`^\s*// \+kubebuilder:`)

// isGenerated is the mark of a generated file, as Go defines it.
var isGenerated = regexp.MustCompile(`(?m)^// Code generated .* DO NOT EDIT\.$`)

// checkWidths checks the width of lines in Go and Rust, except in generated files and in those that longLines lists.
func checkWidths(ctx context.Context, root string) error {
	files, err := tracked(ctx, root, "*.go", "*.rs")
	if err != nil {
		return err
	}
	listed, err := os.ReadFile(filepath.Join(root, longLines))
	if err != nil {
		return fmt.Errorf("list of files with long lines: %w", err)
	}
	return tooWide(root, files, strings.Fields(string(listed)))
}

// tooWide returns an error for each file with lines beyond the limit that is not listed, and for each listed file without one.
// Files are relative to root.
func tooWide(root string, files, listed []string) error {
	mayBeWide := map[string]bool{}
	for _, file := range listed {
		mayBeWide[file] = true
	}
	var wrong []error
	for _, file := range files {
		text, err := os.ReadFile(filepath.Join(root, file))
		if err != nil {
			return err
		}
		limit := maxWidth[filepath.Ext(file)]
		line, width := firstLongLine(string(text), limit)
		switch {
		case isGenerated.Match(text):
		case width > 0 && !mayBeWide[file]:
			wrong = append(wrong, fmt.Errorf("%s:%d: %d characters: wrap the line at %d", file, line, width, limit))
		case width > 0:
			delete(mayBeWide, file)
		}
	}
	for _, file := range listed {
		if mayBeWide[file] {
			wrong = append(wrong, fmt.Errorf("%s: no line is too long: remove it from %s", file, longLines))
		}
	}
	return errors.Join(wrong...)
}

// firstLongLine returns the number and the width of the first line that is longer than limit, or 0 and 0.
func firstLongLine(text string, limit int) (number, width int) {
	for i, line := range strings.Split(text, "\n") {
		if width := utf8.RuneCountInString(line); width > limit && !onlyText.MatchString(line) && !marker.MatchString(line) {
			return i + 1, width
		}
	}
	return 0, 0
}
