package artifacts

import (
	"regexp"
	"testing"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

func TestProtocolIsThatOfTheSources(t *testing.T) {
	root, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	// The form is what the operator finds in tags.
	if got, err := Protocol(root); err != nil || !regexp.MustCompile(`^[0-9]+\.[0-9]+$`).MatchString(got) {
		t.Errorf("%q, %v", got, err)
	}
	if got, err := Protocol(t.TempDir()); err == nil {
		t.Errorf("a folder without sources speaks %q", got)
	}
}
