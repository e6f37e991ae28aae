package lint

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestBrokenLinksAreReported(t *testing.T) {
	root := t.TempDir()
	for name, text := range map[string]string{
		"README.md": strings.Join([]string{
			"# A `code` title: one, two_three", "", "## Again", "## Again", "### [Linked](docs/page.md) heading", `<a id="explicit"></a>`,
			"[file](docs/page.md), [folder](docs), [anchor](docs/page.md#the-page), [own](#again-1), [title](#a-code-title-one-two_three)",
			"[explicit](#explicit), [linked](#linked-heading), [root](/docs/page.md), [named][x], ![picture](docs/a+b.svg \"a title\")",
			"[site](https://example.com/none#none), [mail](mailto:a@example.com), `[code](none.md)`",
			"```", "[fenced](none.md)", "# fenced", "```",
			"[gone](none.md)", "[no anchor](docs/page.md#none)", "[fenced anchor](#fenced)", "[x]: docs/none.md",
		}, "\n"),
		"docs/page.md": "# The page\n\n[up](../README.md#again) and [gone](README.md)\n",
		"docs/a+b.svg": "<svg/>",
	} {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	err := brokenLinks(root, []string{"README.md", "docs/page.md"})
	want := strings.Join([]string{
		"README.md:14: none.md: no such file",
		"README.md:15: docs/page.md#none: no such heading",
		"README.md:16: #fenced: no such heading",
		"README.md:17: docs/none.md: no such file",
		"docs/page.md:3: README.md: no such file",
	}, "\n")
	if err == nil || err.Error() != want {
		t.Errorf("%v\nwant\n%s", err, want)
	}
}

// The links of this repository are checked here too, so that a broken one fails the tests.
func TestLinksOfThisRepository(t *testing.T) {
	if err := checkLinks(t.Context(), filepath.Join("..", "..", "..")); err != nil {
		t.Error(err)
	}
}
