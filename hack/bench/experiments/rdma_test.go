package experiments

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// The checks name Rust tests, which must exist.
func TestChecksNameRustTests(t *testing.T) {
	root, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range rdmaChecks {
		for _, name := range c.tests {
			function := "fn " + name[strings.LastIndex(name, ":")+1:] + "("
			if err := exec.Command("grep", "-rqF", "--include=*.rs", function, filepath.Join(root, "plugin", "crates")).Run(); err != nil {
				t.Errorf("no Rust test %s: %v", name, err)
			}
		}
	}
}
