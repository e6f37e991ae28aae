package v1alpha1

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// TestGeneratedFilesAreFresh compares the checked-in files with newly generated ones.
func TestGeneratedFilesAreFresh(t *testing.T) {
	dir := t.TempDir()
	for _, generator := range []string{"crd", "object"} {
		out, err := exec.CommandContext(t.Context(), "go", "tool", "controller-gen", generator, "paths=.", "output:"+generator+":dir="+dir).CombinedOutput()
		if err != nil {
			t.Fatalf("controller-gen %s: %v\n%s", generator, err, out)
		}
	}
	generated, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil || len(generated) != 5 {
		t.Fatalf("controller-gen wrote %v (%v), want five kinds", generated, err)
	}
	pairs := map[string]string{"zz_generated.deepcopy.go": "zz_generated.deepcopy.go"}
	for _, path := range generated {
		crd := filepath.Base(path)
		pairs[filepath.Join("..", "..", "..", "charts", "evenkeel", "files", "crds", crd)] = crd
	}
	for checkedIn, generated := range pairs {
		want, err := os.ReadFile(filepath.Join(dir, generated))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(checkedIn); err != nil || string(got) != string(want) {
			t.Errorf("%s is not what its types say (%v): run `make generate`", checkedIn, err)
		}
	}
}
