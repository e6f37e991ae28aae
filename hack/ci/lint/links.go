package lint

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"unicode"
)

var (
	codeSpan  = regexp.MustCompile("`[^`]*`")
	codeFence = regexp.MustCompile("^\\s*(```+|~~~+)")
	// inlineLink also matches images; reference is the definition of a link that is used by name.
	inlineLink  = regexp.MustCompile(`\]\(\s*<?([^)\s>]*)>?(?:\s+["'][^)]*)?\)`)
	reference   = regexp.MustCompile(`^\s{0,3}\[[^\]]+\]:\s+<?([^\s>]+)>?`)
	heading     = regexp.MustCompile(`^#{1,6}\s+(.*?)(?:\s+#+)?\s*$`)
	htmlAnchor  = regexp.MustCompile(`<[^>]*\b(?:id|name)="([^"]+)"`)
	linkText    = regexp.MustCompile(`!?\[([^\]]*)\]\([^)]*\)`)
	externalURL = regexp.MustCompile(`^[a-zA-Z][a-zA-Z0-9+.-]*:`)
)

// checkLinks checks that the relative links and anchors of all Markdown files resolve. It needs no network.
func checkLinks(ctx context.Context, root string) error {
	files, err := tracked(ctx, root, "*.md")
	if err != nil {
		return err
	}
	return brokenLinks(root, files)
}

// brokenLinks returns one error for each link that does not resolve. Files are relative to root.
func brokenLinks(root string, files []string) error {
	anchors := map[string]map[string]bool{} // of each file that was read
	var broken []error
	for _, file := range files {
		text, err := os.ReadFile(filepath.Join(root, file))
		if err != nil {
			return err
		}
		for number, line := range prose(string(text)) {
			line = codeSpan.ReplaceAllString(line, "")
			found := append(inlineLink.FindAllStringSubmatch(line, -1), reference.FindAllStringSubmatch(line, -1)...)
			for _, link := range found {
				if err := resolve(root, file, link[1], anchors); err != nil {
					broken = append(broken, fmt.Errorf("%s:%d: %s: %w", file, number+1, link[1], err))
				}
			}
		}
	}
	return errors.Join(broken...)
}

// resolve checks one link of a file.
func resolve(root, file, link string, anchors map[string]map[string]bool) error {
	if externalURL.MatchString(link) || strings.HasPrefix(link, "//") {
		return nil
	}
	path, anchor, _ := strings.Cut(link, "#")
	target := filepath.Join(root, file)
	switch {
	case strings.HasPrefix(path, "/"): // GitHub resolves it from the root of the repository
		target = filepath.Join(root, path)
	case path != "":
		target = filepath.Join(root, filepath.Dir(file), path)
	}
	info, err := os.Stat(target)
	if err != nil {
		return errors.New("no such file")
	}
	if anchor == "" || info.IsDir() || filepath.Ext(target) != ".md" {
		return nil
	}
	known, ok := anchors[target]
	if !ok {
		text, err := os.ReadFile(target)
		if err != nil {
			return err
		}
		known = anchorsOf(string(text))
		anchors[target] = known
	}
	if !known[anchor] {
		return errors.New("no such heading")
	}
	return nil
}

// anchorsOf lists the anchors of a page: those that GitHub derives from its headings, and explicit ones.
func anchorsOf(text string) map[string]bool {
	anchors := map[string]bool{}
	for _, line := range prose(text) {
		for _, explicit := range htmlAnchor.FindAllStringSubmatch(line, -1) {
			anchors[explicit[1]] = true
		}
		title := heading.FindStringSubmatch(line)
		if title == nil {
			continue
		}
		name := slug(title[1])
		unique := name
		for n := 1; anchors[unique]; n++ {
			unique = fmt.Sprintf("%s-%d", name, n)
		}
		anchors[unique] = true
	}
	return anchors
}

// slug is GitHub's anchor for a heading: lower case, without punctuation, with hyphens for spaces.
func slug(title string) string {
	title = linkText.ReplaceAllString(title, "$1")
	return strings.Map(func(r rune) rune {
		switch {
		case r == ' ':
			return '-'
		case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
			return unicode.ToLower(r)
		}
		return -1
	}, title)
}

// prose returns the lines of a page; those of fenced code are empty, so that line numbers stay right.
func prose(text string) []string {
	lines := strings.Split(text, "\n")
	fence := ""
	for i, line := range lines {
		mark := codeFence.FindStringSubmatch(line)
		switch {
		case fence == "" && mark != nil:
			fence, lines[i] = mark[1], ""
		case fence != "":
			if mark != nil && strings.HasPrefix(mark[1], fence) {
				fence = ""
			}
			lines[i] = ""
		}
	}
	return lines
}
