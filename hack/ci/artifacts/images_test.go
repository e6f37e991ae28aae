package artifacts

import (
	"os"
	"path/filepath"
	"testing"
)

func TestCodename(t *testing.T) {
	for text, want := range map[string]string{
		"ID=debian\nVERSION_CODENAME=bookworm\n":     "bookworm",
		"VERSION_CODENAME=\"trixie\"\nID=debian\n":   "trixie",
		"ID=ubuntu\nVERSION_CODENAME=noble\n":        "",
		"ID=debian\nPRETTY_NAME=\"Debian sid\"\n":    "",
		"ID=debian\nVERSION_CODENAME=../../etc/x \n": "",
	} {
		path := filepath.Join(t.TempDir(), "os-release")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := codename(path); got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q %v, want %q", text, got, err, want)
		}
	}
}

func TestImageKeyChangesWithInputs(t *testing.T) {
	root := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(root, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	key := func(i image, from string) string {
		t.Helper()
		k, err := i.key(root, from)
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	write("Dockerfile", "FROM scratch\n")
	write("settings", "a\n")
	i := image{file: "Dockerfile", name: "localhost/a:dev"}
	first := key(i, "1")
	if key(i, "1") != first {
		t.Error("the same files give another key")
	}
	with := i
	with.args = []string{"A=1"}
	if key(i, "2") == first || key(with, "1") == first {
		t.Error("another parent or argument gives the same key")
	}
	write("settings", "b\n")
	if key(i, "1") == first {
		t.Error("another file gives the same key")
	}
}

func TestMPIHomeHasHeaderAndNameForTheLinker(t *testing.T) {
	root, home := t.TempDir(), t.TempDir()
	header := filepath.Join(root, "plugin", "bindings", "mpi", "include", "mpi.h")
	for path, text := range map[string]string{header: "header", filepath.Join(home, "lib", MPILibrary): "library"} {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 { // dist is used again
		if err := mpiHome(root, home); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]string{"include/mpi.h": "header", "lib/libmpi.so": "library"} {
		if got, err := os.ReadFile(filepath.Join(home, name)); err != nil || string(got) != want {
			t.Errorf("%s: %q %v", name, got, err)
		}
	}
}
