//go:build e2e

package artifacts

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// What is shipped runs in a root of Debian 11, whose glibc 2.31 is that of Ubuntu 20.04 too: the plugin is loaded and carries an
// all-reduce, and the reduction server starts.
func TestShippedBinariesRunOnDebian11(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("only root can enter another root file system")
	}
	b := Builder{Progress: os.Stderr}
	if err := b.Dist(t.Context()); err != nil {
		t.Fatal(err)
	}
	root := debian11(t, b)
	checkout, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{"evenkeel-bench", "evenkeel-reduction-server", "plugin/libnccl-net-evenkeel.so"} {
		if err := copyFile(filepath.Join(checkout, "dist", file), filepath.Join(root, "opt", filepath.Base(file))); err != nil {
			t.Fatal(err)
		}
	}
	version := enter(t, root, "ldd", "--version")
	if !strings.Contains(version, "2.31") {
		t.Fatalf("glibc is not 2.31: %s", version)
	}
	out := enter(t, root, "/opt/evenkeel-bench", "allreduce", "--spawn", "2", "--plugin", "/opt/libnccl-net-evenkeel.so", "-b", "64K", "-e", "64K")
	for _, want := range []string{"# Network: Evenkeel carried", "# Out of bounds values : 0 OK"} {
		if !strings.Contains(out, want) {
			t.Errorf("no line %q in\n%s", want, out)
		}
	}
	if out := enter(t, root, "/opt/evenkeel-reduction-server", "--help"); !strings.Contains(out, "serve") {
		t.Errorf("help of the reduction server: %s", out)
	}
}

// debian11 is the root of a Debian 11, from the cache.
func debian11(t *testing.T, b Builder) string {
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(cache, "evenkeel", "roots", "bullseye")
	if err := os.MkdirAll(filepath.Dir(root), 0o755); err != nil {
		t.Fatal(err)
	}
	unlock, err := toolbox.Lock(t.Context(), root+".lock", func() { t.Log("waiting: another run makes the root of Debian 11") })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(unlock) // what is copied into it belongs to this test alone
	if _, err := os.Stat(root); err == nil {
		return root
	}
	// Moved into place when it is whole.
	making := root + ".making"
	if err := b.debootstrap(t.Context(), "bullseye", making); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(making, root); err != nil {
		t.Fatal(err)
	}
	return root
}

// enter runs a command in a root file system, with processes of its own, and returns its output.
func enter(t *testing.T, root string, command ...string) string {
	t.Helper()
	args := append([]string{"--mount", "--pid", "--fork", "--kill-child", "--root=" + root, "--mount-proc"}, command...)
	out, err := exec.CommandContext(t.Context(), "unshare", args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(command, " "), err, out)
	}
	return string(out)
}
