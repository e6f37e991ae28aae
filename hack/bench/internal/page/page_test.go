package page

import (
	"bytes"
	"strings"
	"testing"
)

func TestTable(t *testing.T) {
	table := Table{Heading: []string{"a", "b"}}
	table.Add("1", "2")
	var markdown, text bytes.Buffer
	table.Markdown(&markdown)
	if got, want := markdown.String(), "| a | b |\n| --- | --- |\n| 1 | 2 |\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if err := table.Text(&text); err != nil || text.String() != "a  b\n1  2\n" {
		t.Errorf("%q, %v", &text, err)
	}
}

func TestCommandIsThatOfTheProgram(t *testing.T) {
	got := Command([]string{"--quick", "--only", "two-links|2+2", "--plugin=x=/opt/x.so", "--library", "/opt/lib/y.so"})
	_, arguments, _ := strings.Cut(got, " --quick")
	if want := " --only 'two-links|2+2' --plugin=x=x.so --library y.so"; !strings.HasPrefix(got, "go run ./hack/bench/internal/page") || arguments != want {
		t.Errorf("%q, want %q", got, want)
	}
}
