package install

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func write(t *testing.T, path, content string, mode os.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), mode); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

func TestCopy(t *testing.T) {
	src, dst := t.TempDir(), filepath.Join(t.TempDir(), "made", "on", "the", "way")
	write(t, filepath.Join(src, "lib.so"), "library", 0o700)
	write(t, filepath.Join(src, "manifest.json"), "{}", 0o600)
	write(t, filepath.Join(src, "folder", "inner"), "no", 0o644)
	write(t, filepath.Join(src, "python", "evenkeel", "torch.py"), "backend", 0o600)
	write(t, filepath.Join(src, "python", "evenkeel.dist-info", "METADATA"), "", 0o644)
	if err := os.Symlink("lib.so", filepath.Join(src, "alias.so")); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(filepath.Join(src, "pipe"), 0o644); err != nil {
		t.Fatal(err)
	}

	// Twice: the kubelet runs an init container again when the pod's sandbox is created again.
	for range 2 {
		names, err := Copy(t.Context(), src, dst)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]string{"alias.so", "lib.so", "manifest.json", "python/evenkeel.dist-info/METADATA", "python/evenkeel/torch.py"}, names); diff != "" {
			t.Errorf("copied (-want +got):\n%s", diff)
		}
	}
	if got := read(t, filepath.Join(dst, "alias.so")); got != "library" {
		t.Errorf("the link inside the folder arrived as %q", got)
	}
	if got := read(t, filepath.Join(dst, "python", "evenkeel", "torch.py")); got != "backend" {
		t.Errorf("the Python package arrived as %q", got)
	}
	for name, want := range map[string]os.FileMode{"lib.so": 0o744, "python": 0o755, "python/evenkeel": 0o755, "python/evenkeel/torch.py": 0o644} {
		info, err := os.Stat(filepath.Join(dst, name))
		if err != nil {
			t.Fatal(err)
		}
		if got := info.Mode().Perm(); got != want {
			t.Errorf("%s has mode %o: another user has to be able to read it", name, got)
		}
	}
	entries, err := os.ReadDir(dst)
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != 4 {
		t.Errorf("the target holds %v", entries)
	}
}

func TestCopyReplacesPartialFiles(t *testing.T) {
	src, dst := t.TempDir(), t.TempDir()
	write(t, filepath.Join(src, "lib.so"), "new", 0o644)
	write(t, filepath.Join(dst, "lib.so"), "older and longer", 0o444)
	write(t, filepath.Join(dst, ".lib.so.partial"), "ha", 0o000)
	if _, err := Copy(t.Context(), src, dst); err != nil {
		t.Fatal(err)
	}
	if got := read(t, filepath.Join(dst, "lib.so")); got != "new" {
		t.Errorf("lib.so holds %q", got)
	}
	if _, err := os.Stat(filepath.Join(dst, ".lib.so.partial")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the partial file is still there: %v", err)
	}
}

func TestCopyRefuses(t *testing.T) {
	for _, test := range []struct {
		name, want string
		prepare    func(t *testing.T, src, dst string) (string, string)
	}{
		{"a missing source", "source folder", func(_ *testing.T, src, dst string) (string, string) {
			return filepath.Join(src, "absent"), dst
		}},
		{"an empty source", "plugin.path", func(_ *testing.T, src, dst string) (string, string) { return src, dst }},
		{"a link that leads out", "leak", func(t *testing.T, src, dst string) (string, string) {
			outside := filepath.Join(t.TempDir(), "secret")
			write(t, outside, "secret", 0o644)
			if err := os.Symlink(outside, filepath.Join(src, "leak")); err != nil {
				t.Fatal(err)
			}
			return src, dst
		}},
		{"a target that is a file", "target folder", func(t *testing.T, src, dst string) (string, string) {
			write(t, filepath.Join(src, "lib.so"), "x", 0o644)
			write(t, filepath.Join(dst, "file"), "x", 0o644)
			return src, filepath.Join(dst, "file")
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			src, dst := test.prepare(t, t.TempDir(), t.TempDir())
			if _, err := Copy(t.Context(), src, dst); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want one about %q", err, test.want)
			}
		})
	}
}

func TestCopyStops(t *testing.T) {
	src := t.TempDir()
	write(t, filepath.Join(src, "lib.so"), "x", 0o644)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Copy(ctx, src, t.TempDir()); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}
