package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// fakeNCCL builds the fake of CUDA and NCCL, which the loader then finds as the driver, and returns options for a short run over
// it. No test of this file runs real NCCL: they test the harness alone.
func fakeNCCL(t *testing.T, fault string) options {
	t.Helper()
	folder := t.TempDir()
	library := filepath.Join(folder, "libcuda.so.1")
	cmd := exec.Command("cc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", library, "testdata/fake_nccl.c")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Setenv("LD_LIBRARY_PATH", folder)
	t.Setenv("FAKE_FOLDER", folder)
	t.Setenv("FAKE", fault)
	return options{
		nccl: library, plugin: library, server: os.Args[0], noLab: true, ranks: 2, output: filepath.Join(folder, "results"), logs: filepath.Join(folder, "logs"),
		plan: plan{maxBytes: 64 << 10, iterations: 2, timeout: time.Minute, outputTimeout: time.Minute},
	}
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

func TestFakeNCCLWritesThePage(t *testing.T) {
	for _, ranks := range []int{2, 4} {
		o := fakeNCCL(t, "")
		o.ranks = ranks
		t.Setenv("NCCL_NET", "Other") // the caller's settings do not count
		t.Setenv("EVENKEEL_ENCRYPTION", "required")
		var out bytes.Buffer
		if err := run(t.Context(), &out, o); err != nil {
			t.Fatalf("%d ranks: %v\n%s", ranks, err, &out)
		}
		text, err := os.ReadFile(filepath.Join(o.output, "gpu.md"))
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{
			"NCCL 2.30.7, fake GPU 0, ", "(CUDA 13.0)", "plugin and servers built elsewhere, from commit unknown",
			"| int8 | sum | 8, 8 B to 64 KiB | 2 | 0 |", "| bfloat16 | avg | 8, 8 B to 64 KiB | 2 | 0 |", "| float8e5m2 | sum | 8, ",
			"NCCL reports: remote error (6): injected failure", "by time slicing",
			"One of 2 reduction servers was killed", "Not measured: left out with `--no-lab`.",
		} {
			if !strings.Contains(string(text), want) {
				t.Errorf("%d ranks: the page lacks %q:\n%s", ranks, want, text)
			}
		}
		if times := regexp.MustCompile(`(?m)^\| \d+ \S+ \| \S+ ms \| \S+ ms \| \S+ ms \| \S+ \|$`).FindAll(text, -1); len(times) != 8 {
			t.Errorf("%d ranks: %d sizes in the table of times, want 8:\n%s", ranks, len(times), text)
		}
	}
}

// In the lab, ranks are on hosts of their own.
func TestFakeNCCLInShapedNetworks(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("networks of namespaces need root")
	}
	o := fakeNCCL(t, "")
	o.noLab = false
	if err := run(t.Context(), io.Discard, o); err != nil {
		t.Fatal(err)
	}
	places := map[string]bool{}
	for rank := range starRanks {
		log, err := os.ReadFile(filepath.Join(o.logs, fmt.Sprintf("shaped-%d-0-rank%d.log", starRanks, rank)))
		place := regexp.MustCompile(`in net:\[\d+\] by eth0`).Find(log)
		if err != nil || place == nil {
			t.Fatalf("rank %d: %v, %q", rank, err, log)
		}
		places[string(place)] = true
	}
	if len(places) != starRanks {
		t.Errorf("%d ranks are on %d hosts", starRanks, len(places))
	}
	text, err := os.ReadFile(filepath.Join(o.output, "gpu.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"**2 ranks, joined by links of 1gbit, 1gbit, 1gbit, 200mbit**", "**4 ranks, each on a card of 1gbit**",
		"| Evenkeel, 4 reduction servers | ", "| NCCL's sockets, 4 threads with 4 sockets each | ",
	} {
		if !strings.Contains(string(text), want) {
			t.Errorf("the page lacks %q:\n%s", want, text)
		}
	}
}

func TestFakeNCCLOldGPU(t *testing.T) {
	o := fakeNCCL(t, "old GPU")
	if err := run(t.Context(), io.Discard, o); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(o.output, "gpu.md"))
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(text), "not run: needs NCCL 2.24 and compute capability 9.0"); n != 2 {
		t.Errorf("%d types are listed as not run, want both of 8 bits:\n%s", n, text)
	}
}

func TestFakeNCCLFaultsAreReported(t *testing.T) {
	for fault, test := range map[string]struct {
		want    string // a regular expression
		shorten func(*plan)
		missing bool
	}{
		"wrong element":     {want: `^plugin: rank 1: all-reduce of int8, sum, 8192 bytes: 1 of 8192 elements are wrong, first element 5000: 0x\w+, must be 0x`},
		"wrong place":       {want: `^plugin: rank \d: all-reduce of int8, sum, 32768 bytes: \d{4} of 32768 elements are wrong, first element`},
		"fallback":          {want: `^plugin: NCCL used network Socket instead of Evenkeel; \S+plugin-rank0.log has the reason`},
		"rings instead":     {want: `^servers: NCCL did not use the reduction servers; \S+servers-rank0.log has the reason`},
		"error":             {want: `^plugin: rank 1: all-reduce of int8, sum, 128 bytes: ncclAllReduce: internal error \(3\): injected failure`},
		"late error":        {want: `^plugin: rank \d: all-reduce of int8, sum, 128 bytes: NCCL reports: remote error \(6\): injected failure`},
		"crash":             {want: `^plugin: rank 1: signal: aborted`},
		"hang":              {want: `128 bytes: not done after 1 s, and NCCL reports no error`, shorten: func(p *plan) { p.timeout = time.Second }},
		"no output":         {want: `^plugin: no output of any rank for 2s`, shorten: func(p *plan) { p.outputTimeout = 2 * time.Second }},
		"loss not reported": {want: `^kill: rank 0 got no error when rank 1 was killed: rank 0: .* not done after 1 s`, shorten: func(p *plan) { p.timeout = time.Second }},
		"loss ignored":      {want: `^kill: 1 of 1 ranks had not exited \d+s after rank 1 was killed`, shorten: func(p *plan) { p.outputTimeout = 2 * time.Second }},
		"server loss not reported": {
			want: `^kill-server: rank \d got no error when a reduction server was killed: rank \d: .* not done after 1 s`, shorten: func(p *plan) { p.timeout = time.Second },
		},
		"no GPU":   {want: `^CUDA driver: no usable GPU: FAKE_NO_DEVICE \(100\): see the output of nvidia-smi$`, missing: true},
		"old NCCL": {want: `^NCCL 2.20.5 \(\S+\) is too old: 2.21 is the first`, missing: true},
	} {
		t.Run(fault, func(t *testing.T) {
			o := fakeNCCL(t, fault)
			if test.shorten != nil {
				test.shorten(&o.plan)
			}
			err := run(t.Context(), io.Discard, o)
			if err == nil || !regexp.MustCompile(test.want).MatchString(err.Error()) {
				t.Errorf("error %q, want one like %q", err, test.want)
			}
			if errors.As(err, &missing{}) != test.missing {
				t.Errorf("%q counts as something missing: %v", err, !test.missing)
			}
			if err != nil && strings.Contains(err.Error(), "\n") {
				t.Errorf("more than one line: %q", err)
			}
			if _, err := os.Stat(filepath.Join(o.output, "gpu.md")); err == nil {
				t.Error("the page was written")
			}
		})
	}
}

// Missing libraries are reported before anything is built or started.
func TestFakeNCCLMissingLibraries(t *testing.T) {
	o := fakeNCCL(t, "")
	o.nccl = filepath.Join(t.TempDir(), "libnccl.so.2")
	wantMissing(t, o, `^NCCL: \S+libnccl.so.2: cannot open shared object file: .*; install NCCL \(pip install nvidia-nccl-cu13\) or name it with --nccl PATH$`)

	o = fakeNCCL(t, "")
	if err := os.WriteFile(filepath.Join(os.Getenv("LD_LIBRARY_PATH"), "libcuda.so.1"), []byte("no library"), 0o644); err != nil {
		t.Fatal(err)
	}
	wantMissing(t, o, `^CUDA driver: \S+libcuda.so.1: .*; there is no NVIDIA driver here: run this where there is a GPU and its driver$`)
}

func wantMissing(t *testing.T, o options, want string) {
	t.Helper()
	err := run(t.Context(), io.Discard, o)
	if err == nil || !errors.As(err, &missing{}) || !regexp.MustCompile(want).MatchString(err.Error()) {
		t.Errorf("error %q, want one about something missing like %q", err, want)
	}
}

func TestFakeNCCLServerDoesNotStart(t *testing.T) {
	o := fakeNCCL(t, "")
	o.server = "/bin/false"
	if err := run(t.Context(), io.Discard, o); err == nil || !strings.HasPrefix(err.Error(), "reduction server 1: ended before it listened") {
		t.Errorf("error %v", err)
	}
}

func TestFakeNCCLInvalidFlags(t *testing.T) {
	for _, ranks := range []int{-2, 0, 1, 3, 16} {
		if err := run(t.Context(), io.Discard, options{ranks: ranks}); err == nil || !strings.HasPrefix(err.Error(), "--ranks") {
			t.Errorf("--ranks %d: %v", ranks, err)
		}
	}
	o := fakeNCCL(t, "")
	o.plugin = filepath.Join(t.TempDir(), "not-there.so")
	if err := run(t.Context(), io.Discard, o); err == nil || !strings.HasPrefix(err.Error(), "--plugin") {
		t.Errorf("--plugin: %v", err)
	}
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
	o := fakeNCCL(t, "")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	if err := run(ctx, writer(func(text []byte) {
		if bytes.Contains(text, []byte("done")) { // and more to do
			cancel()
		}
	}), o); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want that of an interrupt", err)
	}
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if text, err := os.ReadFile(file); err == nil && bytes.Contains(text, []byte(o.nccl)) {
			t.Errorf("%s still runs", bytes.ReplaceAll(text, []byte{0}, []byte{' '}))
		}
	}
}

type writer func(text []byte)

func (w writer) Write(text []byte) (int, error) { w(text); return len(text), nil }
