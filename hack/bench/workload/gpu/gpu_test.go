package gpu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// fakeNCCL builds the fake of CUDA and NCCL, which the loader then finds as the driver, and returns a short load over
// it. No test of this file runs real NCCL: they test the harness alone.
func fakeNCCL(t *testing.T, fault string) (Load, experiment.Run) {
	t.Helper()
	folder := t.TempDir()
	library := filepath.Join(folder, "libcuda.so.1")
	cmd := exec.Command("cc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", library, "testdata/fake_nccl.c")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(self, filepath.Join(folder, "evenkeel-reduction-server")); err != nil {
		t.Fatal(err)
	}
	t.Setenv("LD_LIBRARY_PATH", folder)
	t.Setenv("FAKE_FOLDER", folder)
	t.Setenv("FAKE", fault)
	load := Load{Ranks: 2, AllTypes: true, Min: minBytes, Max: 64 << 10, Iterations: 2, Timeout: time.Minute, OutputTimeout: time.Minute}
	return load, experiment.Run{Programs: experiment.Programs{Library: library, Driver: filepath.Join(folder, "evenkeel-bench")}}
}

// opened has the fake as NCCL.
func (w Load) opened(t *testing.T, r experiment.Run) Load {
	t.Helper()
	lab, err := open(t.Context(), filepath.Join(t.TempDir(), "logs"), r.Library)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := lab.Close(); err != nil {
			t.Error(err)
		}
	})
	w.Lab = func() *Lab { return lab }
	return w
}

// all runs every kind of contender once, until one fails.
func (w Load) all(ctx context.Context, r experiment.Run) (got []experiment.Measured, err error) {
	servers := Servers(2)
	for _, of := range []experiment.Contender{w.AllReduce(Plugin), w.AllReduce(Sockets), w.KillRank(Plugin), w.AllReduce(servers), w.KillServer(servers)} {
		m, err := of.Run(ctx, r)
		if err != nil {
			return got, err
		}
		got = append(got, m)
	}
	return got, nil
}

// TestMain is the fake of a reduction server, too: it accepts connections until it is killed.
func TestMain(m *testing.M) {
	if len(os.Args) < 2 || os.Args[1] != "serve" {
		os.Exit(m.Run())
	}
	if os.Getenv("EVENKEEL_ENCRYPTION") != "" {
		fmt.Fprintln(os.Stderr, "this server would refuse all ranks")
		os.Exit(1)
	}
	listener, err := net.Listen("tcp", os.Args[3])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Fprintf(os.Stderr, "a line before\nlistening at %s, and more\n", listener.Addr())
	var connections []net.Conn // held, so that none is closed
	for {
		connection, err := listener.Accept()
		if err != nil {
			os.Exit(1)
		}
		connections = append(connections, connection)
		_ = connections
	}
}

func TestFakeNCCLMeasuresEachWay(t *testing.T) {
	for _, ranks := range []int{2, 4} {
		w, r := fakeNCCL(t, "")
		w = w.opened(t, r)
		w.Ranks = ranks
		t.Setenv("NCCL_NET", "Other") // the caller's settings do not count
		t.Setenv("EVENKEEL_ENCRYPTION", "required")
		got, err := w.all(t.Context(), r)
		if err != nil {
			t.Fatalf("%d ranks: %v", ranks, err)
		}
		for _, at := range []int{0, 1, 3} {
			// Twelve types, of which two have four more operations.
			if m := got[at]; m.Values[Right] != float64(20*len(w.Sizes())) {
				t.Errorf("%d ranks: %+v, want every type and operation", ranks, m)
			}
			for _, bytes := range w.Sizes() {
				if got[at].Values[Time.At(float64(bytes))] <= 0 {
					t.Errorf("%d ranks: no time of %d bytes", ranks, bytes)
				}
			}
			for _, want := range []string{"2 times each: int8 sum, ", "bfloat16 avg", "float8e5m2 sum"} {
				if !strings.Contains(got[at].Note, want) {
					t.Errorf("%d ranks: no %q in %q", ranks, want, got[at].Note)
				}
			}
		}
		for _, at := range []int{2, 4} {
			if m := got[at]; m.Values[ErrorAfter] <= 0 || !strings.Contains(m.Note, "NCCL reports: remote error (6): injected failure") {
				t.Errorf("%d ranks: %+v, want an error of NCCL's", ranks, m)
			}
		}
		if v := got[0].Versions; !regexp.MustCompile(`^NCCL 2.30.7, fake GPU 0 by time slicing, driver .* \(CUDA 13.0\)$`).MatchString(v) {
			t.Errorf("versions %q", v)
		}
	}
}

// In a lab, ranks are on hosts of their own.
func TestFakeNCCLInShapedNetworks(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("networks of namespaces need root")
	}
	w, r := fakeNCCL(t, "")
	w = w.opened(t, r)
	w.Ranks, w.AllTypes, w.Name = 4, false, "cards-"
	lab, err := netns.Up(t.Context(), netns.Config{Name: "bench-gpu-test", Star: slices.Repeat([]netns.Rate{netns.Gbit}, 2*w.Ranks)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := lab.Down(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	r.Lab = lab
	if m, err := w.AllReduce(Servers(w.Ranks)).Run(t.Context(), r); err != nil || m.Values[Right] != float64(len(w.Sizes())) {
		t.Fatalf("%+v, %v", m, err)
	}
	places := map[string]bool{}
	for rank := range w.Ranks {
		log, err := os.ReadFile(filepath.Join(w.Lab().logs, fmt.Sprintf("cards-servers-rank%d.log", rank)))
		place := regexp.MustCompile(`in net:\[\d+\] by eth0`).Find(log)
		if err != nil || place == nil {
			t.Fatalf("rank %d: %v, %q", rank, err, log)
		}
		places[string(place)] = true
	}
	if len(places) != w.Ranks {
		t.Errorf("%d ranks are on %d hosts", w.Ranks, len(places))
	}
}

func TestFakeNCCLOldGPU(t *testing.T) {
	w, r := fakeNCCL(t, "old GPU")
	m, err := w.opened(t, r).AllReduce(Plugin).Run(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(m.Note, " needs NCCL 2.24 and compute capability 9.0"); n != 2 || !strings.Contains(m.Note, "; not run: float8e4m3 sum ") {
		t.Errorf("%d types are listed as not run, want both of 8 bits: %s", n, m.Note)
	}
}

func TestFakeNCCLFaultsAreReported(t *testing.T) {
	for fault, test := range map[string]struct {
		want    string // a regular expression
		shorten func(*Load)
	}{
		"wrong element":     {want: `^plugin: rank 1: all-reduce of int8, sum, 8192 bytes: 1 of 8192 elements are wrong, first element 5000: 0x\w+, must be 0x`},
		"wrong place":       {want: `^plugin: rank \d: all-reduce of int8, sum, 32768 bytes: \d{4} of 32768 elements are wrong, first element`},
		"fallback":          {want: `^plugin: NCCL used network Socket instead of Evenkeel; plugin-rank0.log has the reason`},
		"rings instead":     {want: `^servers: NCCL did not use the reduction servers; servers-rank0.log has the reason`},
		"error":             {want: `^plugin: rank 1: all-reduce of int8, sum, 128 bytes: ncclAllReduce: internal error \(3\): injected failure`},
		"late error":        {want: `^plugin: rank \d: all-reduce of int8, sum, 128 bytes: NCCL reports: remote error \(6\): injected failure`},
		"crash":             {want: `^plugin: rank 1: signal: aborted`},
		"hang":              {want: `128 bytes: not done after 1 s, and NCCL reports no error`, shorten: func(w *Load) { w.Timeout = time.Second }},
		"no output":         {want: `^plugin: no output of any rank for 2s`, shorten: func(w *Load) { w.OutputTimeout = 2 * time.Second }},
		"loss not reported": {want: `^kill: rank 0 got no error when rank 1 was killed: rank 0: .* not done after 1 s`, shorten: func(w *Load) { w.Timeout = time.Second }},
		"loss ignored":      {want: `^kill: 1 of 1 ranks had not exited \d+s after rank 1 was killed`, shorten: func(w *Load) { w.OutputTimeout = 2 * time.Second }},
		"server loss not reported": {
			want: `^kill-server: rank \d got no error when a reduction server was killed: rank \d: .* not done after 1 s`, shorten: func(w *Load) { w.Timeout = time.Second },
		},
	} {
		t.Run(fault, func(t *testing.T) {
			w, r := fakeNCCL(t, fault)
			if test.shorten != nil {
				test.shorten(&w)
			}
			_, err := w.opened(t, r).all(t.Context(), r)
			if err == nil || !regexp.MustCompile(test.want).MatchString(err.Error()) || strings.Contains(err.Error(), "\n") {
				t.Errorf("error %q, want one line like %q", err, test.want)
			}
		})
	}
}

// What a machine lacks is reported before anything is measured.
func TestFakeNCCLMissing(t *testing.T) {
	wantMissing := func(fault, want string, nccl func(library string) string) {
		t.Helper()
		_, r := fakeNCCL(t, fault)
		_, err := open(t.Context(), t.TempDir(), nccl(r.Library))
		if missing := experiment.MissingError(""); !errors.As(err, &missing) || !regexp.MustCompile(want).MatchString(err.Error()) {
			t.Errorf("error %q, want one about something missing like %q", err, want)
		}
	}
	there := func(library string) string { return library }
	wantMissing("no GPU", `^CUDA driver: no usable GPU: FAKE_NO_DEVICE \(100\): see the output of nvidia-smi$`, there)
	wantMissing("old NCCL", `^NCCL 2.20.5 \(\S+\) is too old: 2.21 is the first`, there)
	wantMissing("", `^NCCL: \S+libnccl.so.2: cannot open shared object file: .*; install NCCL \(pip install nvidia-nccl-cu13\) or name its folder in LD_LIBRARY_PATH$`,
		func(library string) string { return filepath.Join(filepath.Dir(library), "libnccl.so.2") })
	wantMissing("", `^CUDA driver: \S+libcuda.so.1: .*; there is no NVIDIA driver here: run this where there is a GPU and its driver$`, func(library string) string {
		if err := os.WriteFile(library, []byte("no library"), 0o644); err != nil {
			t.Fatal(err)
		}
		return library
	})
}

func TestFakeNCCLServerDoesNotStart(t *testing.T) {
	w, r := fakeNCCL(t, "")
	program := filepath.Join(filepath.Dir(r.Driver), "evenkeel-reduction-server")
	if err := errors.Join(os.Remove(program), os.Symlink("/bin/false", program)); err != nil {
		t.Fatal(err)
	}
	if _, err := w.opened(t, r).AllReduce(Servers(2)).Run(t.Context(), r); err == nil || !strings.HasPrefix(err.Error(), "reduction server 1: ended before it listened") {
		t.Errorf("error %v", err)
	}
}

func TestRankRefusesInvalidFlags(t *testing.T) {
	program, err := compile(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, arguments := range [][]string{{"--rank", "x"}, {"--ranks", "3"}, {"--rank", "2"}, {"--max", "9"}, {"--min", "64", "--max", "8"}, {"--iterations", "0"}, {"--what"}, {"--id"}, {"--only", "float"}, {}} {
		out, err := exec.Command(program, arguments...).CombinedOutput()
		if exitErr := (*exec.ExitError)(nil); !errors.As(err, &exitErr) || exitErr.ExitCode() != failed || bytes.Count(out, []byte("\n")) != 1 {
			t.Errorf("%q: %v, %q; want status %d and one line", arguments, err, out, failed)
		}
	}
}

func TestRootCauseOfTwoFailures(t *testing.T) {
	now := time.Now()
	crash, reported, timeout := exit{status: -1, at: now.Add(time.Second)}, exit{status: failed, at: now}, exit{status: timedOut, at: now.Add(time.Minute)}
	for name, pair := range map[string][2]exit{"a crash and the error it caused": {crash, reported}, "an error and a timeout": {reported, timeout}} {
		if !pair[0].causes(pair[1]) || pair[1].causes(pair[0]) {
			t.Errorf("%s: the wrong one counts as the cause", name)
		}
	}
}

// An interrupt leaves no process running.
func TestFakeNCCLInterrupt(t *testing.T) {
	w, r := fakeNCCL(t, "")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	if _, err := w.opened(t, r).world(Plugin, "plugin", r).run(ctx, exitGrace, func(int, row, func(int)) { cancel() }); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want that of an interrupt", err)
	}
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if text, err := os.ReadFile(file); err == nil && bytes.Contains(text, []byte(r.Library)) {
			t.Errorf("%s still runs", bytes.ReplaceAll(text, []byte{0}, []byte{' '}))
		}
	}
}
