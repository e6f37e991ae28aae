//go:build e2e

package netns

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// ownerVariable makes the test binary own a lab of that name until it is killed.
const ownerVariable = "NETLAB_TEST_OWNER"

func TestMain(m *testing.M) {
	if name := os.Getenv(ownerVariable); name != "" {
		if err := ownLab(name); err != nil {
			fmt.Println(err)
		}
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// ownLab creates a lab with a program in it that is not tied to the owner.
func ownLab(name string) error {
	ctx := context.Background()
	l, err := Up(ctx, Config{Name: name, Links: Links(Gbit, Gbit)})
	if err != nil {
		return err
	}
	orphan, err := l.Command(ctx, H1, "sleep", "600")
	if err != nil {
		return err
	}
	orphan.SysProcAttr.Pdeathsig = 0
	if err := orphan.Start(); err != nil {
		return err
	}
	fmt.Println("ready", orphan.Process.Pid)
	select {}
}

func labUp(t *testing.T, c Config) *Lab {
	t.Helper()
	if c.Name == "" {
		c.Name = "test"
	}
	l, err := Up(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Down(context.Background()); err != nil {
			t.Errorf("down: %v", err)
		}
	})
	return l
}

// flowOn opens a flow over a given link.
func flowOn(t *testing.T, l *Lab, link int) *Flow {
	t.Helper()
	for range 40 * len(l.config.Links) {
		f, err := l.OpenFlow(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		took, err := l.Path(t.Context(), f)
		if err != nil {
			t.Fatal(err)
		}
		if took == link {
			t.Cleanup(f.Close)
			return f
		}
		f.Close()
	}
	t.Fatalf("no source port leads to link %d: the routers do not hash ports", link)
	return nil
}

func flows(t *testing.T, l *Lab, count int) []*Flow {
	t.Helper()
	var all []*Flow
	for range count {
		f, err := l.OpenFlow(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(f.Close)
		all = append(all, f)
	}
	return all
}

// awaitBytes waits until a flow has received this many more bytes.
func awaitBytes(t *testing.T, f *Flow, bytes uint64) {
	t.Helper()
	from := f.Received()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err := poll(ctx, func() error {
		if now := f.Received(); now < from+bytes {
			return fmt.Errorf("a flow has received %d more bytes, not %d", now-from, bytes)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// A shaper lets a burst and a queue pass at once, then its rate. The clock and the counters are not read at the same
// time.
func maxBytes(l *Lab, rate Rate, took time.Duration) uint64 {
	return uint64(rate.bytesIn(took.Seconds())*105/100 + minBurst + l.queueBytes(rate))
}

func TestLinkRates(t *testing.T) {
	l := labUp(t, Config{Links: Links(40*Mbit, 40*Mbit, 10*Mbit)})
	var all []*Flow
	for link := range l.config.Links {
		all = append(all, flowOn(t, l, link))
	}
	measure := func() {
		t.Helper()
		start := time.Now()
		before, err := l.Sent()
		must(t, err)
		awaitBytes(t, all[0], 4<<20)
		after, err := l.Sent()
		must(t, err)
		took := time.Since(start)
		for link, rate := range l.config.Links {
			sent := after[link] - before[link]
			if limit := maxBytes(l, rate.Rate, took); sent == 0 || sent > limit {
				t.Errorf("link %d carried %d bytes in %s at %s: want some, and at most %d", link, sent, took, rate.Rate, limit)
			}
		}
	}
	measure()
	must(t, l.SetRate(t.Context(), 1, 5*Mbit))
	l.config.Links[1].Rate = 5 * Mbit
	measure()
}

func TestStarLinkRates(t *testing.T) {
	l := labUp(t, Config{Star: []Rate{40 * Mbit, 10 * Mbit, 40 * Mbit}})
	f := flows(t, l, 1)[0]
	start, before := time.Now(), f.Received()
	awaitBytes(t, f, 2<<20)
	took, got := time.Since(start), f.Received()-before
	// There are two queues on the path, and the receiver's socket may hold data that has left them.
	if limit := 2*maxBytes(l, 10*Mbit, 0) + uint64((10 * Mbit).bytesIn(took.Seconds()*1.05)) + 1<<20; got > limit {
		t.Errorf("h2's link of %s carried %d bytes in %s: want at most %d", 10*Mbit, got, took, limit)
	}
	listener := StarHost(2)
	var at net.Listener
	must(t, l.Do(listener, func() (err error) {
		at, err = net.Listen("tcp", netip.AddrPortFrom(l.Address(listener), 0).String())
		return err
	}))
	defer at.Close()
	for _, host := range []Host{H1, H2} {
		must(t, l.Do(host, func() error {
			conn, err := net.DialTimeout("tcp", at.Addr().String(), timeout)
			if err == nil {
				conn.Close()
			}
			return err
		}))
	}
	if _, err := l.Sent(); err == nil {
		t.Error("a star has counters of links between routers")
	}
}

func TestFlowHashSelectsTheLink(t *testing.T) {
	l := labUp(t, Config{Links: Links(50*Mbit, 50*Mbit, 50*Mbit, 50*Mbit)})
	f := flowOn(t, l, 2)
	before, err := l.Sent()
	must(t, err)
	awaitBytes(t, f, 4<<20)
	after, err := l.Sent()
	must(t, err)
	for link := range after {
		// Queues may still hold data of the other flows.
		left := uint64(2 * l.queueBytes(50*Mbit))
		if sent := after[link] - before[link]; link == 2 && sent < 4<<20 || link != 2 && sent > left {
			t.Errorf("link %d carried %d bytes of a flow on link 2", link, sent)
		}
	}
	if received, sent, err := l.Traffic(H2); err != nil || received < 4<<20 || sent == 0 || sent > received {
		t.Errorf("h2 has received %d bytes and sent %d, %v: want more than %d, and some", received, sent, err, 4<<20)
	}
	used := map[int]int{}
	for port := range uint16(64) {
		link, err := l.path(t.Context(), 50_000+port, 5201)
		must(t, err)
		used[link]++
	}
	if len(used) != 4 {
		t.Errorf("64 ports use the links %v: want all 4", used)
	}
	twin := l.config
	twin.Name = "test-twin"
	again := labUp(t, twin)
	for port := range uint16(16) {
		one, err := l.path(t.Context(), 50_000+port, 5201)
		must(t, err)
		two, err := again.path(t.Context(), 50_000+port, 5201)
		must(t, err)
		if one != two {
			t.Errorf("port %d: link %d in one lab, %d in another of the same seed", 50_000+port, one, two)
		}
	}
}

func TestSilentLinkStopsOnlyItsFlows(t *testing.T) {
	l := labUp(t, Config{Links: Links(50*Mbit, 50*Mbit)})
	stuck, free := flowOn(t, l, 0), flowOn(t, l, 1)
	awaitBytes(t, stuck, 1<<20)
	must(t, l.SetState(t.Context(), 0, LinkSilent))
	awaitBytes(t, free, 1<<20) // more than was in flight
	before, sent := stuck.Received(), sentBy(t, l, 0)
	awaitBytes(t, free, 2<<20)
	if now := stuck.Received(); now != before {
		t.Errorf("%d bytes came over a silent link", now-before)
	}
	// Less than one packet of the flow: the routers themselves still send neighbour discovery.
	if now := sentBy(t, l, 0); now >= sent+DefaultMTU {
		t.Errorf("a silent link carried %d bytes", now-sent)
	}
	must(t, l.SetState(t.Context(), 0, LinkUp))
	awaitBytes(t, stuck, 1<<20)
}

func TestDownLinkIsAvoided(t *testing.T) {
	l := labUp(t, Config{Links: Links(50*Mbit, 50*Mbit)})
	f := flowOn(t, l, 0)
	awaitBytes(t, f, 1<<20)
	must(t, l.SetState(t.Context(), 0, LinkDown))
	sent := sentBy(t, l, 0)
	awaitBytes(t, f, 1<<20)
	if now := sentBy(t, l, 0); now != sent {
		t.Errorf("a link that is down carried %d bytes", now-sent)
	}
	must(t, l.SetState(t.Context(), 0, LinkUp))
	awaitBytes(t, flowOn(t, l, 0), 1<<20)
	if now := sentBy(t, l, 0); now == sent {
		t.Error("a link that is up again carried nothing")
	}
}

func sentBy(t *testing.T, l *Lab, link int) uint64 {
	t.Helper()
	sent, err := l.Sent()
	must(t, err)
	return sent[link]
}

func TestLinkLoss(t *testing.T) {
	l := labUp(t, Config{Links: Links(50*Mbit, 50*Mbit)})
	lossy, clean := flowOn(t, l, 0), flowOn(t, l, 1)
	must(t, l.SetLoss(t.Context(), 0, 0.02))
	awaitBytes(t, lossy, 2<<20)
	// Some thousand packets: it is practically impossible that none is lost.
	if retransmits(t, lossy) == 0 {
		t.Error("nothing was retransmitted on a link that loses packets")
	}
	must(t, l.SetLoss(t.Context(), 0, 1))
	awaitBytes(t, clean, 1<<20)
	before := lossy.Received()
	awaitBytes(t, clean, 1<<20)
	if now := lossy.Received(); now != before {
		t.Errorf("%d bytes came over a link that loses all", now-before)
	}
	must(t, l.SetLoss(t.Context(), 0, 0))
	awaitBytes(t, lossy, 1<<20)
}

func retransmits(t *testing.T, f *Flow) uint32 {
	t.Helper()
	raw, err := f.from.SyscallConn()
	must(t, err)
	var info *unix.TCPInfo
	err = raw.Control(func(fd uintptr) {
		if got, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			info = got
		}
	})
	must(t, err)
	if info == nil {
		t.Fatal("no TCP_INFO")
	}
	return info.Total_retrans
}

func TestBlackholeDropsOneFlowOrAll(t *testing.T) {
	l := labUp(t, Config{Links: Links(50 * Mbit)})
	both := flows(t, l, 2)
	from, _ := both[0].Ports()
	must(t, l.SetBlackhole(t.Context(), Match{Port: from}))
	awaitBytes(t, both[1], 1<<20)
	before := both[0].Received()
	awaitBytes(t, both[1], 1<<20)
	if now := both[0].Received(); now != before {
		t.Errorf("%d bytes passed a black hole", now-before)
	}
	must(t, l.SetBlackhole(t.Context(), Match{Address: l.Address(H2)}))
	brief, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if got, err := l.OpenFlow(brief); err == nil {
		got.Close()
		t.Error("a flow was opened to an address in a black hole")
	}
	must(t, l.SetBlackhole(t.Context()))
	for _, f := range both {
		awaitBytes(t, f, 1<<20)
	}
}

func TestFlowCaps(t *testing.T) {
	rates := []Rate{40 * Mbit, 40 * Mbit, 10 * Mbit}
	l := labUp(t, Config{FlowRates: rates})
	all := flows(t, l, len(rates))
	start := time.Now()
	var before []uint64
	for _, f := range all {
		before = append(before, f.Received())
	}
	awaitBytes(t, all[0], 4<<20)
	took := time.Since(start)
	for i, f := range all {
		got := f.Received() - before[i]
		// The receiver's socket may hold data that has left the shaper.
		if limit := maxBytes(l, rates[i], took) + 1<<20; got == 0 || got > limit {
			t.Errorf("connection %d received %d bytes in %s at %s: want some, and at most %d", i, got, took, rates[i], limit)
		}
	}
}

func TestControlInterfaceBypassesTheNetwork(t *testing.T) {
	l := labUp(t, Config{Links: Links(Gbit)})
	must(t, l.SetState(t.Context(), 0, LinkSilent))
	text, err := l.Exec(t.Context(), H1, "ip", "route", "get", l.ControlAddress(H2).String())
	must(t, err)
	if !strings.Contains(text, "dev "+ControlInterface) {
		t.Errorf("the way to h2's other address: %s", text)
	}
}

func TestDownLeavesNothing(t *testing.T) {
	before := machine(t)
	l, err := Up(t.Context(), Config{Name: "test-leaves", Links: Links(Gbit, 100*Mbit), FlowRates: []Rate{100 * Mbit}})
	must(t, err)
	namespaces := l.namespaces
	if _, err := Up(t.Context(), Config{Name: "test-leaves"}); err == nil || !strings.Contains(err.Error(), "is up") {
		t.Errorf("a second lab of the same name: %v", err)
	}
	inside, err := l.Command(t.Context(), H2, "sleep", "600")
	must(t, err)
	must(t, inside.Start())
	must(t, l.Down(t.Context()))
	inside.Wait()
	if inside.ProcessState.ExitCode() == 0 {
		t.Error("a program in the lab outlived it")
	}
	nothingOf(t, namespaces)
	if after := machine(t); after != before {
		t.Errorf("the machine's own network changed:\n%s\nbefore:\n%s", after, before)
	}
	if _, err := Open("test-leaves"); err == nil {
		t.Error("a lab that is down can be opened")
	}
}

func TestKilledOwnerLeavesNothing(t *testing.T) {
	const name = "test-killed"
	before := machine(t)
	self, err := os.Executable()
	must(t, err)
	owner := exec.Command(self)
	owner.Env = append(os.Environ(), ownerVariable+"="+name)
	owner.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	stdout, err := owner.StdoutPipe()
	must(t, err)
	must(t, owner.Start())
	line, _ := bufio.NewReader(stdout).ReadString('\n')
	number, ok := strings.CutPrefix(strings.TrimSpace(line), "ready ")
	if !ok {
		t.Fatalf("unexpected line of the owner: %q", line)
	}
	orphan, err := strconv.Atoi(number)
	must(t, err)
	r, err := readRecord(name)
	must(t, err)
	must(t, owner.Process.Kill())
	owner.Wait()
	if _, err := Open(name); err == nil {
		t.Error("a lab without its owner can be opened")
	}
	again, err := Up(t.Context(), Config{Name: name})
	must(t, err)
	if _, err := os.Stat(fmt.Sprintf("/proc/%d", orphan)); err == nil && r.Namespaces[H1].isAt(fmt.Sprintf("/proc/%d/ns/net", orphan)) {
		t.Errorf("process %d of the earlier lab still runs", orphan)
	}
	must(t, again.Down(t.Context()))
	nothingOf(t, r.Namespaces)
	if after := machine(t); after != before {
		t.Errorf("the machine's own network changed:\n%s\nbefore:\n%s", after, before)
	}
}

// nothingOf checks that no process has any of the namespaces, nor keeps it open.
func nothingOf(t *testing.T, namespaces map[Host]namespace) {
	t.Helper()
	var paths []string
	for _, pattern := range []string{"/proc/[0-9]*/task/*/ns/net", "/proc/[0-9]*/fd/*", folder + "/*"} {
		found, err := filepath.Glob(pattern)
		must(t, err)
		paths = append(paths, found...)
	}
	for host, s := range namespaces {
		// Threads and files of the lab's commands may still be closing.
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		err := poll(ctx, func() error {
			if i := slices.IndexFunc(paths, s.isAt); i >= 0 {
				return fmt.Errorf("%s is still there: %s", host, paths[i])
			}
			return nil
		})
		cancel()
		if err != nil {
			t.Error(err)
		}
	}
	for _, path := range paths {
		if strings.HasPrefix(path, folder+"/test-") {
			t.Errorf("%s is still there", path)
		}
	}
}

// machine is the state of the machine's own network that could be changed.
func machine(t *testing.T) string {
	t.Helper()
	var text strings.Builder
	for _, command := range []string{"ip -brief link", "ip route", "nft list tables", "ip netns"} {
		words := strings.Fields(command)
		out, err := exec.Command(words[0], words[1:]...).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v: %s", command, err, out)
		}
		text.Write(out)
	}
	for _, setting := range []string{"ip_forward", "tcp_allowed_congestion_control", "tcp_congestion_control", "fib_multipath_hash_policy"} {
		value, err := os.ReadFile("/proc/sys/net/ipv4/" + setting)
		must(t, err)
		text.Write(value)
	}
	return text.String()
}

func TestInvalidConfigIsRejected(t *testing.T) {
	for name, c := range map[string]Config{
		"name":       {Name: "No"},
		"queue":      {Name: "test-refused", Queue: time.Hour},
		"mtu":        {Name: "test-refused", MTU: 70},
		"congestion": {Name: "test-refused", Congestion: "nosuch"},
		"cap":        {Name: "test-refused", FlowRates: []Rate{0}},
		"star":       {Name: "test-refused", Star: []Rate{Gbit}},
		"both":       {Name: "test-refused", Star: []Rate{Gbit, Gbit}, Links: Links(Gbit)},
		"links":      {Name: "test-refused", Links: make([]Link, MaxLinks+1)},
	} {
		t.Run(name, func(t *testing.T) {
			if l, err := Up(t.Context(), c); err == nil {
				must(t, l.Down(context.Background()))
				t.Error("came up")
			}
		})
	}
	l := labUp(t, Config{Links: Links(Gbit)})
	for what, err := range map[string]error{
		"link 1 of 1": l.SetRate(t.Context(), 1, Gbit),
		"link -1":     l.SetState(t.Context(), -1, LinkUp),
		"state":       l.SetState(t.Context(), 0, "sideways"),
		"loss":        l.SetLoss(t.Context(), 0, 1.1),
		"host":        l.Do("h3", func() error { return nil }),
	} {
		if err == nil {
			t.Errorf("%s was accepted", what)
		}
	}
	direct := labUp(t, Config{Name: "test-direct"})
	if _, err := direct.Sent(); err == nil {
		t.Error("a lab without links has counters of links")
	}
}
