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
	for _, args := range [][]string{
		{"crd", "paths=../...", "output:crd:dir=" + dir},
		{"object", "paths=.", "output:object:dir=" + filepath.Join(dir, "v1alpha1")},
		{"object", "paths=../v1beta1", "output:object:dir=" + filepath.Join(dir, "v1beta1")},
	} {
		command := append([]string{"tool", "controller-gen"}, args...)
		if out, err := exec.CommandContext(t.Context(), "go", command...).CombinedOutput(); err != nil {
			t.Fatalf("controller-gen %s: %v\n%s", args, err, out)
		}
	}
	generated, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil || len(generated) != 5 {
		t.Fatalf("controller-gen wrote %v (%v), want five kinds", generated, err)
	}
	const copies = "zz_generated.deepcopy.go"
	pairs := map[string]string{copies: filepath.Join("v1alpha1", copies), filepath.Join("..", "v1beta1", copies): filepath.Join("v1beta1", copies)}
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
