//go:build aarch64

package artifacts

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// What is shipped for arm64 runs emulated, in Debian for arm64: the plugin is loaded and carries an all-reduce, and the
// reduction server and the operator start.
func TestShippedBinariesRunOnArm64(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("only root can enter another root file system")
	}
	b := Builder{Arch: "arm64", Progress: os.Stderr}
	checkout, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	if b.foreign() {
		stop, err := emulate(t.Context(), os.Stderr, b.Arch)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(stop)
	}
	if err := b.Dist(t.Context()); err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	if err := b.debootstrap(t.Context(), "bookworm", filepath.Join(root, "arm64"), "--arch=arm64"); err != nil {
		t.Fatal(err)
	}
	root = filepath.Join(root, "arm64")
	for _, file := range []string{"evenkeel-bench", "evenkeel-reduction-server", "evenkeel-operator", "plugin/libnccl-net-evenkeel.so"} {
		if err := copyFile(filepath.Join(checkout, b.Folder(), file), filepath.Join(root, "opt", filepath.Base(file))); err != nil {
			t.Fatal(err)
		}
	}
	enter := func(command ...string) string {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), "chroot", append([]string{root}, command...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", strings.Join(command, " "), err, out)
		}
		return string(out)
	}
	if machine := strings.TrimSpace(enter("uname", "-m")); machine != "aarch64" {
		t.Fatalf("the machine is %s, emulated on %s", machine, runtime.GOARCH)
	}
	out := enter("/opt/evenkeel-bench", "allreduce", "--spawn", "2", "--plugin", "/opt/libnccl-net-evenkeel.so", "-b", "64K", "-e", "64K")
	for _, want := range []string{"# Network: Evenkeel carried", "# Out of bounds values : 0 OK"} {
		if !strings.Contains(out, want) {
			t.Errorf("no line %q in\n%s", want, out)
		}
	}
	if out := enter("/opt/evenkeel-reduction-server", "--help"); !strings.Contains(out, "serve") {
		t.Errorf("help of the reduction server: %s", out)
	}
	if out := enter("/opt/evenkeel-operator", "version"); !strings.Contains(out, "evenkeel-operator") {
		t.Errorf("version of the operator: %s", out)
	}
}
