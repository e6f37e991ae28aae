//go:build e2e

package vm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// ownerVariable makes the test binary own a machine until it is killed.
const ownerVariable = "RDMALAB_TEST_OWNER"

func TestMain(m *testing.M) {
	if os.Getenv(ownerVariable) != "" {
		if err := ownMachine(); err != nil {
			fmt.Println(err)
		}
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func ownMachine() error {
	lab, err := New(context.Background(), os.Stderr)
	if err != nil {
		return err
	}
	_, err = lab.Run(context.Background(), Config{Command: []string{"sh", "-c", "echo ready; sleep 600"}, Env: os.Environ(), Stdout: os.Stdout})
	return err
}

func newLab(t *testing.T) *Lab {
	t.Helper()
	lab, err := New(t.Context(), os.Stderr)
	if errors.As(err, &Missing{}) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return lab
}

// A watcher reports when a text was written.
type watcher struct {
	text string
	seen chan struct{}
	got  strings.Builder
}

func (w *watcher) Write(p []byte) (int, error) {
	w.got.Write(p) // a Builder never fails
	if w.seen != nil && strings.Contains(w.got.String(), w.text) {
		close(w.seen)
		w.seen = nil
	}
	return len(p), nil
}

func TestVerbsOverTheLink(t *testing.T) {
	lab, share := newLab(t), t.TempDir()
	payload := bytes.Repeat([]byte("0123456789abcde\n"), 1<<16)
	if err := os.WriteFile(filepath.Join(share, "in"), payload, 0o644); err != nil {
		t.Fatal(err)
	}
	// The servers have a timeout of their own: they never stop waiting for a client that has failed. The transfers are short: beside
	// other tests, the emulated processors move a few megabytes a second.
	const script = `
set -e
link() { echo $(($(cat /sys/class/net/eth0/statistics/tx_bytes) + $(cat /sys/class/net/lo/statistics/tx_bytes) * 1000000000)); }
wait_for() { for i in $(seq 200); do if ss -Hlnt "sport = :$1" | grep -q .; then return; fi; sleep 0.1; done; echo "no server listens on port $1" >&2; exit 9; }
before=$(link)
timeout 100 ib_write_bw -d rxe1 -x 1 -F -n 32 > server.log &
wait_for 18515
timeout 100 ib_write_bw -d rxe0 -x 1 -F -n 32 10.77.0.2
wait
test $(($(link) - before)) -gt 1000000 # over the link, nothing over lo
test $(($(link) - before)) -lt 1000000000
timeout 100 ibv_rc_pingpong -d rxe1 -g 1 -n 200 > pong.log &
wait_for 18515
timeout 100 ibv_rc_pingpong -d rxe0 -g 1 -n 200 10.77.0.2
wait
sha256sum < in > sum; cp in out
ulimit -l > locked; echo "$EVENKEEL_RDMALAB" >> locked; touch /outside-of-the-share
echo complaint >&2
exit 3`
	var stdout, stderr bytes.Buffer
	code, err := lab.Run(t.Context(), Config{
		Dir: share, Env: os.Environ(), Command: []string{"bash", "-c", script}, Stdout: &stdout, Stderr: &stderr, Timeout: 6 * time.Minute,
	})
	if err != nil || code != 3 {
		t.Fatalf("status %d, %v\n%s\n%s", code, err, stdout.String(), stderr.String())
	}
	if out := stdout.String(); !strings.Contains(out, "BW average") || !strings.Contains(out, "200 iters in") {
		t.Errorf("perftest and pingpong have no results: %s", out)
	}
	if !strings.Contains(stderr.String(), "complaint\n") || strings.Contains(stdout.String(), "complaint") {
		t.Errorf("stderr is %q", stderr.String())
	}
	if copied, err := os.ReadFile(filepath.Join(share, "out")); err != nil || !bytes.Equal(copied, payload) {
		t.Errorf("of %d bytes %d came back: %v", len(payload), len(copied), err)
	}
	if locked, err := os.ReadFile(filepath.Join(share, "locked")); err != nil || string(locked) != "unlimited\npair\n" {
		t.Errorf("%q %v", locked, err)
	}
	if _, err := os.Stat("/outside-of-the-share"); err == nil {
		t.Error("what the command wrote outside of the shared folder is on this machine")
	}
}

func TestHostsTopologyUsesTwoNamespaces(t *testing.T) {
	lab := newLab(t)
	const script = `
timeout 60 ip netns exec h2 rping -s -a 10.77.0.2 -C 10 &
for i in $(seq 100); do if ip netns exec h1 rping -c -a 10.77.0.2 -C 10 2> /dev/null; then echo pinged; break; fi; sleep 0.2; done
wait
ip address show dev eth0 2>&1 || echo apart`
	var stdout, stderr bytes.Buffer
	code, err := lab.Run(t.Context(), Config{Topology: Hosts, Env: os.Environ(), Command: []string{"bash", "-c", script}, Stdout: &stdout, Stderr: &stderr, Timeout: 2 * time.Minute})
	if errors.As(err, &Missing{}) {
		t.Skip(err)
	}
	if out := stdout.String(); err != nil || code != 0 || !strings.Contains(out, "pinged\n") || !strings.Contains(out, "apart\n") {
		t.Errorf("status %d, %v\n%s\n%s", code, err, out, stderr.String())
	}
}

func TestTimeoutEndsTheMachine(t *testing.T) {
	_, err := newLab(t).Run(t.Context(), Config{Env: os.Environ(), Command: []string{"sleep", "600"}, Timeout: time.Second})
	if !errors.Is(err, ErrTimeout) {
		t.Error(err)
	}
	for _, child := range children(t, os.Getpid()) {
		awaitEnd(t, child)
	}
}

func TestMachineEndsWithItsOwner(t *testing.T) {
	newLab(t)
	owner := exec.Command(os.Args[0])
	owner.Env = append(os.Environ(), ownerVariable+"=1")
	seen := make(chan struct{})
	var complaint bytes.Buffer
	owner.Stdout, owner.Stderr = &watcher{text: "ready\n", seen: seen}, &complaint
	if err := owner.Start(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-seen:
	case <-time.After(bootTimeout):
		t.Errorf("no machine is ready: %s", complaint.String())
	}
	machines := children(t, owner.Process.Pid)
	if len(machines) != 1 {
		t.Errorf("the owner has the processes %v, want one: QEMU", machines)
	}
	if err := owner.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	owner.Wait() // it was killed
	for _, pid := range machines {
		awaitEnd(t, pid)
	}
}

// children are the running child processes of a process.
func children(t *testing.T, pid int) []int {
	t.Helper()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		t.Fatal(err)
	}
	var all []int
	for _, task := range tasks {
		text, err := os.ReadFile(task)
		if err != nil {
			continue // the thread has exited
		}
		for reader := bytes.NewReader(text); ; {
			var child int
			if _, err := fmt.Fscan(reader, &child); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatal(err)
			}
			all = append(all, child)
		}
	}
	return all
}

func awaitEnd(t *testing.T, pid int) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for time.Now().Before(deadline) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil || strings.Contains(string(stat), ") Z ") {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Errorf("process %d still runs", pid)
}
