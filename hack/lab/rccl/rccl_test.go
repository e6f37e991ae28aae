//go:build e2e

package rccl

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/internal/cargo"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// The lab, and the reduction server's program; made once for all tests.
var (
	lab    *Lab
	server string
)

func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	ctx := context.Background()
	checkout, err := toolbox.Root()
	if err != nil {
		return 1, err
	}
	built, err := cargo.Everything(ctx, checkout)
	if err != nil {
		return 1, err
	}
	if lab, err = New(ctx, os.Stderr); err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, lab.Close()) }()
	server = built.Executables["evenkeel-reduction-server"]
	if err := lab.Use(built.Files[cargo.Library]); err != nil {
		return 1, err
	}
	return m.Run(), nil
}

// A hang must not last until the test binary's own timeout.
const testTimeout = 3 * time.Minute

type group struct {
	*Group
	t   *testing.T
	ctx context.Context
}

// start starts ranks, and a communicator of all, which has number 0.
func start(t *testing.T, c Config) group {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(t.Context(), testTimeout, fmt.Errorf("not done within %s", testTimeout))
	t.Cleanup(cancel)
	if c.Logs == "" {
		c.Logs = t.TempDir()
	}
	g, err := lab.Start(ctx, c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Kill)
	t.Cleanup(func() {
		for i := range g.Ranks {
			if text, err := g.Log(i); err == nil && t.Failed() {
				lines := strings.SplitAfter(text, "\n")
				t.Logf("rank %d:\n%s", i, strings.Join(lines[max(0, len(lines)-15):], ""))
			}
		}
	})
	all := group{g, t, ctx}
	all.init(func(rank int) int { return rank })
	return all
}

func (g group) init(place func(rank int) int) int {
	g.t.Helper()
	number, err := g.Init(g.ctx, place)
	if err != nil {
		g.t.Fatal(err)
	}
	return number
}

func (g group) all(command string) {
	g.t.Helper()
	if _, err := g.All(g.ctx, command); err != nil {
		g.t.Fatal(err)
	}
}

// random runs operations drawn with a new seed.
func (g group) random(count, maxBytes int, communicators string) {
	g.t.Helper()
	seed := rand.Uint32()
	g.t.Logf("seed %d", seed)
	g.all(fmt.Sprintf("random %d %d %d %s", seed, count, maxBytes, communicators))
}

func (g group) end() {
	g.t.Helper()
	if err := g.End(); err != nil {
		g.t.Fatal(err)
	}
}

func (g group) log(rank int) string {
	g.t.Helper()
	text, err := g.Log(rank)
	if err != nil {
		g.t.Fatal(err)
	}
	return text
}

func (g group) mustLog(rank int, want string) {
	g.t.Helper()
	if !strings.Contains(g.log(rank), want) {
		g.t.Errorf("rank %d has not logged %q", rank, want)
	}
}

func TestRCCLCollectivesAreRight(t *testing.T) {
	for _, ranks := range []int{2, 3, 4, 5, 8} {
		t.Run(fmt.Sprintf("%d ranks", ranks), func(t *testing.T) {
			g := start(t, Config{Ranks: ranks})
			g.mustLog(0, "Using network Evenkeel")
			g.random(60, 256<<10, "0")
			g.random(10, 4<<20, "0")
			g.all("destroy 0")
			g.end()
		})
	}
}

func TestRCCLHostsOfSeveralRanksAreRight(t *testing.T) {
	for _, perHost := range []int{2, 4} {
		t.Run(fmt.Sprintf("%d ranks each", perHost), func(t *testing.T) {
			g := start(t, Config{Ranks: 2 * perHost, PerHost: perHost})
			g.random(60, 256<<10, "0")
			g.all("destroy 0")
			g.end()
			g.mustLog(0, "via SHM")
			g.mustLog(0, "via NET/Evenkeel")
		})
	}
}

func TestRCCLAlgorithmsAndProtocolsAreRight(t *testing.T) {
	for _, algorithm := range []string{"Ring", "Tree"} {
		for _, protocol := range []string{"Simple", "LL"} {
			t.Run(algorithm+" "+protocol, func(t *testing.T) {
				g := start(t, Config{Ranks: 4, Env: []string{"NCCL_ALGO=" + algorithm, "NCCL_PROTO=" + protocol}})
				g.random(30, 1<<20, "0")
				if _, err := g.AllReduce(g.ctx, 0, 8<<20, 2); err != nil {
					t.Fatal(err)
				}
				g.all("destroy 0")
				g.end()
			})
		}
	}
}

func TestRCCLCommunicatorsDoNotDisturbEachOther(t *testing.T) {
	g := start(t, Config{Ranks: 3})
	g.init(func(rank int) int { return 2 - rank })
	g.init(func(rank int) int { return (rank + 1) % 3 })
	g.random(90, 512<<10, "0 1 2")
	g.all("destroy 1")
	g.random(30, 512<<10, "0 2")
	g.all("destroy 0")
	g.all("destroy 2")
	g.end()
}

func TestRCCLAbortEndsAnOperation(t *testing.T) {
	g := start(t, Config{Ranks: 2})
	g.random(5, 64<<10, "0")
	// Rank 1 does not take part, so that it cannot end otherwise.
	for _, command := range []string{"launch 0 1048576", "abort 0"} {
		if err := g.Ranks[0].Send(command); err != nil {
			t.Fatal(err)
		}
		if _, err := g.Ranks[0].Answer(g.ctx); err != nil {
			t.Fatalf("%s: %v", command, err)
		}
	}
	if err := g.Ranks[1].Send("abort 0"); err != nil {
		t.Fatal(err)
	}
	if _, err := g.Ranks[1].Answer(g.ctx); err != nil {
		t.Fatal(err)
	}
	// The processes are as good as new.
	g.random(5, 64<<10, fmt.Sprint(g.init(func(rank int) int { return rank })))
	g.end()
}

func TestRCCLKilledPeerIsAnError(t *testing.T) {
	g := start(t, Config{Ranks: 3})
	g.random(5, 64<<10, "0")
	for _, r := range g.Ranks {
		if err := r.Send("allreduce 0 4194304 100000"); err != nil {
			t.Fatal(err)
		}
	}
	if err := g.Ranks[2].Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for i, r := range g.Ranks[:2] {
		_, err := r.Answer(g.ctx)
		if err == nil || !strings.Contains(err.Error(), "asynchronous error") {
			t.Errorf("rank %d: %v; want an asynchronous error", i, err)
		}
		if err := r.Send("abort 0"); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Answer(g.ctx); err != nil {
			t.Errorf("rank %d: abort: %v", i, err)
		}
	}
	for i := range 2 { // in its own words
		g.mustLog(i, "in flight; device lo")
	}
}

func TestRCCLStoppedPeerIsWaitedFor(t *testing.T) {
	// Its host still answers, so this is longer than the peer timeout and no error.
	g := start(t, Config{Ranks: 2, Env: []string{"EVENKEEL_PEER_TIMEOUT=1", "EVENKEEL_RECOVERY_TIMEOUT=1"}})
	g.random(5, 64<<10, "0")
	if err := g.Ranks[1].Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for _, r := range g.Ranks {
		if err := r.Send("allreduce 0 4194304 3"); err != nil {
			t.Fatal(err)
		}
	}
	early, cancel := context.WithTimeout(g.ctx, 3*time.Second)
	defer cancel()
	if answer, err := g.Ranks[0].Answer(early); early.Err() == nil {
		t.Fatalf("rank 0 has not waited for its stopped peer: %q, %v", answer, err)
	}
	if err := g.Ranks[1].Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	for i, r := range g.Ranks {
		if _, err := r.Answer(g.ctx); err != nil {
			t.Errorf("rank %d: %v", i, err)
		}
	}
	g.all("destroy 0")
	g.end()
}

func TestRCCLFlippedBitIsFound(t *testing.T) {
	g := start(t, Config{Ranks: 2})
	g.random(5, 64<<10, "0")
	if err := g.Ranks[1].Send("flip"); err != nil {
		t.Fatal(err)
	}
	if _, err := g.Ranks[1].Answer(g.ctx); err != nil {
		t.Fatal(err)
	}
	for _, r := range g.Ranks {
		if err := r.Send("allreduce 0 1048576 1"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := g.Ranks[1].Answer(g.ctx); err == nil || !strings.Contains(err.Error(), "wrong: ") {
		t.Errorf("%v; want a wrong element", err)
	}
}

// freeAddress is an address of the loopback interface that nobody listens on.
func freeAddress(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	return listener.Addr().String()
}

// reductionServers starts servers and returns their list, and a function that ends them and returns what they have
// logged.
func reductionServers(t *testing.T, count int) (list string, end func() string) {
	t.Helper()
	var addresses []string
	var logs []*strings.Builder
	var ends []func() error
	for range count {
		address := freeAddress(t)
		cmd := exec.CommandContext(t.Context(), server, "serve", "--listen", address, "--until-stdin-closes")
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		log := &strings.Builder{}
		cmd.Stderr = log
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		wait := sync.OnceValue(func() error { in.Close(); return cmd.Wait() })
		t.Cleanup(func() { wait() }) //nolint:errcheck // after a failure
		addresses, logs, ends = append(addresses, address), append(logs, log), append(ends, wait)
	}
	return strings.Join(addresses, ","), func() string {
		var text strings.Builder
		for i, end := range ends {
			if err := end(); err != nil {
				t.Error(err)
			}
			text.WriteString(logs[i].String())
		}
		return text.String()
	}
}

func TestRCCLCollNetReducesOnServers(t *testing.T) {
	for _, test := range []struct{ ranks, perHost, servers int }{{2, 1, 1}, {3, 1, 2}, {4, 2, 1}, {8, 4, 2}} {
		t.Run(fmt.Sprintf("%d ranks, %d on a host, %d servers", test.ranks, test.perHost, test.servers), func(t *testing.T) {
			servers, endServers := reductionServers(t, test.servers)
			g := start(t, Config{Ranks: test.ranks, PerHost: test.perHost, Env: []string{
				"NCCL_COLLNET_ENABLE=1", "NCCL_ALGO=CollNet", "EVENKEEL_REDUCTION_SERVERS=" + servers,
			}})
			g.mustLog(0, "via COLLNET/Evenkeel")
			// Many: two results that come shortly after each other must not reach RCCL as one.
			const rounds = 10
			if _, err := g.AllReduce(g.ctx, 0, 8<<20, rounds); err != nil {
				t.Fatal(err)
			}
			if test.perHost <= 2 { // with more, sends and receives wait for each other in RCCL; see README.md
				g.random(40, 512<<10, "0")
			}
			g.all("destroy 0")
			g.end()
			var received, all int // the sums went through the servers
			for _, match := range regexp.MustCompile(`recv=(\d+)B`).FindAllStringSubmatch(endServers(), -1) {
				if _, err := fmt.Sscan(match[1], &received); err != nil {
					t.Fatal(err)
				}
				all += received
			}
			if hosts := test.ranks / test.perHost; all < hosts*rounds*8<<20 {
				t.Errorf("the servers received %d bytes of %d hosts", all, hosts)
			}
		})
	}
}

func TestRCCLContinuesOverResetFlows(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("only root can create network namespaces")
	}
	network, err := netns.Up(t.Context(), netns.Config{Name: fmt.Sprintf("rccl-%d", os.Getpid()), Links: netns.Links(netns.Gbit, netns.Gbit)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := network.Down(context.Background()); err != nil {
			t.Error(err)
		}
	})
	hosts := []netns.Host{netns.H1, netns.H2}
	g := start(t, Config{
		Ranks: 2, Env: []string{"NCCL_SOCKET_IFNAME=eth0"},
		Command: func(ctx context.Context, host int, argv ...string) (*exec.Cmd, error) {
			return network.Command(ctx, hosts[host], argv...)
		},
	})
	if _, err := g.AllReduce(g.ctx, 0, 4<<20, 1); err != nil {
		t.Fatal(err)
	}
	// RCCL's own connections are to the port of its bootstrap, and have little to send; the plugin's have a packet on its
	// way.
	done := make(chan error, 1)
	go func() {
		_, err := g.AllReduce(g.ctx, 0, 4<<20, 40)
		done <- err
	}()
	resets := 0
	for running := true; running; {
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			running = false
		case <-time.After(200 * time.Millisecond):
			for _, line := range busiestFlows(t, network, 2) {
				if _, err := network.Exec(g.ctx, netns.H1, "ss", "-K", "-t", "src", line[0], "dst", line[1]); err == nil {
					resets++
				}
			}
		}
	}
	g.all("destroy 0")
	g.end()
	if resets == 0 {
		t.Error("no flow was reset")
	}
	if text := g.log(0) + g.log(1); !strings.Contains(text, "replaced=") || strings.Count(text, "replaced=0") == strings.Count(text, "replaced=") {
		t.Errorf("after %d resets no flow was replaced", resets)
	}
}

// busiestFlows are the addresses of connections of h1 with unsent data, at most so many.
func busiestFlows(t *testing.T, network *netns.Lab, most int) [][2]string {
	t.Helper()
	text, err := network.Exec(t.Context(), netns.H1, "ss", "-Htn", "state", "established")
	if err != nil {
		t.Fatal(err)
	}
	var flows [][2]string
	for line := range strings.Lines(text) {
		fields := strings.Fields(line) // Recv-Q Send-Q local peer
		if len(fields) >= 4 && len(fields[1]) >= 5 && len(flows) < most {
			flows = append(flows, [2]string{fields[2], fields[3]})
		}
	}
	return flows
}
