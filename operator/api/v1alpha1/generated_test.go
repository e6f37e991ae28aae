package v1alpha1

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// TestGeneratedFilesAreFresh generates everything anew and compares: what is checked in is what `make generate` gives.
func TestGeneratedFilesAreFresh(t *testing.T) {
	const crd = "evenkeel.dev_networkprofiles.yaml"
	dir := t.TempDir()
	for _, generator := range []string{"crd", "object"} {
		out, err := exec.CommandContext(t.Context(), "go", "tool", "controller-gen", generator, "paths=.", "output:"+generator+":dir="+dir).CombinedOutput()
		if err != nil {
			t.Fatalf("controller-gen %s: %v\n%s", generator, err, out)
		}
	}
	for checkedIn, generated := range map[string]string{
		filepath.Join("..", "..", "..", "config", "crd", crd):                       crd,
		filepath.Join("..", "..", "..", "charts", "evenkeel", "files", "crds", crd): crd,
		"zz_generated.deepcopy.go":                                                  "zz_generated.deepcopy.go",
	} {
		want, err := os.ReadFile(filepath.Join(dir, generated))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(checkedIn); err != nil || string(got) != string(want) {
			t.Errorf("%s is not what its types say (%v): run `make generate`", checkedIn, err)
		}
	}
}
