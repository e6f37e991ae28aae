//go:build e2e

package artifacts

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// Ubuntu's archive is verified by its keys, which Debian does not have. The packages of a release do not change.
const (
	ubuntuKeys     = "http://archive.ubuntu.com/ubuntu/pool/main/u/ubuntu-keyring/ubuntu-keyring_2020.02.11.2_all.deb"
	ubuntuKeysSum  = "7564f3f76fbc9f165ecc30e2cf2695d38b284e234bffa0c6441ff37f8a7aebd7" // sha256
	archiveTimeout = 30 * time.Second
)

// What is shipped runs in the roots of distributions of 2020 and 2021, both with glibc 2.31: the plugin is loaded and
// carries an all-reduce, and the reduction server starts.
func TestShippedBinariesRunOnOldDistributions(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("only root can enter another root file system")
	}
	b := Builder{Quick: true, Progress: os.Stderr}
	if err := b.Dist(t.Context()); err != nil {
		t.Fatal(err)
	}
	for release, of := range map[string]struct {
		glibc string
		flags func(*testing.T) []string
	}{
		"bullseye": {"(Debian GLIBC 2.31-", func(*testing.T) []string { return nil }},
		"focal":    {"(Ubuntu GLIBC 2.31-", ubuntuFlags},
	} {
		t.Run(release, func(t *testing.T) {
			root := distribution(t, b, release, of.flags)
			checkout, err := toolbox.Root()
			if err != nil {
				t.Fatal(err)
			}
			for _, file := range []string{"evenkeel-bench", "evenkeel-reduction-server", "plugin/libnccl-net-evenkeel.so"} {
				if err := copyFile(filepath.Join(checkout, "dist", file), filepath.Join(root, "opt", filepath.Base(file))); err != nil {
					t.Fatal(err)
				}
			}
			if version := enter(t, root, "ldd", "--version"); !strings.Contains(version, of.glibc) {
				t.Fatalf("glibc is not %s: %s", of.glibc, version)
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
		})
	}
}

// distribution is the root of a release, from the cache. Flags are those of debootstrap that make it.
func distribution(t *testing.T, b Builder, release string, flags func(*testing.T) []string) string {
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(cache, "evenkeel", "roots", release)
	if err := os.MkdirAll(filepath.Dir(root), 0o755); err != nil {
		t.Fatal(err)
	}
	unlock, err := toolbox.Lock(t.Context(), root+".lock", func() { t.Log("waiting: another run makes the root of " + release) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(unlock) // what is copied into it belongs to this test alone
	if _, err := os.Stat(root); err == nil {
		return root
	}
	// Moved into place when it is whole.
	making := root + ".making"
	if err := b.debootstrap(t.Context(), release, making, flags(t)...); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(making, root); err != nil {
		t.Fatal(err)
	}
	return root
}

var errMissing = errors.New("the archive does not have it")

// ubuntuFlags have debootstrap use Ubuntu's keys. Its archive is known to debootstrap. The test is skipped where the
// archive does not answer, as where only a mirror of Debian can be reached.
func ubuntuFlags(t *testing.T) []string {
	text, err := fetch(t.Context(), ubuntuKeys)
	if errors.Is(err, errMissing) {
		t.Fatalf("%v: Ubuntu has newer keys, name those", err)
	}
	if err != nil {
		t.Skipf("no Ubuntu: %v", err)
	}
	if sum := sha256.Sum256(text); hex.EncodeToString(sum[:]) != ubuntuKeysSum {
		t.Fatalf("%s has sha256 %x, want %s", ubuntuKeys, sum, ubuntuKeysSum)
	}
	dir := t.TempDir()
	unpack := exec.CommandContext(t.Context(), "dpkg-deb", "--extract", "/dev/stdin", dir)
	unpack.Stdin = bytes.NewReader(text)
	if out, err := unpack.CombinedOutput(); err != nil {
		t.Fatalf("unpack Ubuntu's keys: %v\n%s", err, out)
	}
	return []string{"--keyring=" + filepath.Join(dir, "usr/share/keyrings/ubuntu-archive-keyring.gpg")}
}

func fetch(ctx context.Context, url string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, archiveTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode == http.StatusNotFound {
		return nil, fmt.Errorf("%s: %w", url, errMissing)
	}
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", url, response.Status)
	}
	return io.ReadAll(response.Body)
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
