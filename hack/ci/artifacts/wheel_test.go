package artifacts

import (
	"archive/zip"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// zipOf makes an archive of files, by name, all of them programs.
func zipOf(t *testing.T, names ...string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "evenkeel-0.1.0-cp311-abi3-any.whl")
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	archive := zip.NewWriter(file)
	for _, name := range names {
		header := &zip.FileHeader{Name: name}
		header.SetMode(0o755)
		writer, err := archive.CreateHeader(header)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := writer.Write([]byte(name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := archive.Close(); err != nil {
		t.Fatal(err)
	}
	return path
}

// The plugin image gets what a wheel would install, and not a second plugin.
func TestUnpackWheel(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "python")
	if err := os.MkdirAll(filepath.Join(folder, "of", "before"), 0o755); err != nil {
		t.Fatal(err)
	}
	wheel := zipOf(t, "evenkeel/torch.py", "evenkeel/_evenkeel.abi3.so", "evenkeel/lib/libnccl-net-evenkeel.so", "evenkeel-0.1.0.dist-info/entry_points.txt")
	if err := unpackWheel(wheel, folder); err != nil {
		t.Fatal(err)
	}
	var found []string
	err := fs.WalkDir(os.DirFS(folder), ".", func(name string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			found = append(found, name)
		}
		return err
	})
	if want := []string{"evenkeel/_evenkeel.abi3.so", "evenkeel/torch.py", "evenkeel-0.1.0.dist-info/entry_points.txt"}; err != nil || !slices.Equal(found, want) {
		t.Errorf("unpacked %v, want %v; %v", found, want, err)
	}
	library := filepath.Join(folder, "evenkeel", "_evenkeel.abi3.so")
	if text, err := os.ReadFile(library); err != nil || string(text) != "evenkeel/_evenkeel.abi3.so" {
		t.Errorf("%s holds %q, %v", library, text, err)
	}
	if info, err := os.Stat(library); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("mode of %s: %v, %v", library, info, err)
	}
	if err := unpackWheel(zipOf(t, "../outside"), folder); err == nil {
		t.Error("a file that leads out of the folder was unpacked")
	}
}
