package check

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/clock"

	"evenkeel.dev/evenkeel/operator/test/nvsentineltest"
)

// environment is what NVSentinel sets, and more.
func environment(target string, more ...string) func(string) string {
	values := map[string]string{"NODE_NAME": "gpu-17", "POD_NAME": "llama-0", "PLATFORM_CONNECTOR_SOCKET": target}
	for i := 0; i < len(more); i += 2 {
		values[more[i]] = more[i+1]
	}
	return func(name string) string { return values[name] }
}

// bench is a stand-in for evenkeel-bench, which says how it was started, prints the file unless it has none, and ends with the status.
func bench(t *testing.T, log string, status int) string {
	t.Helper()
	path, err := filepath.Abs(filepath.Join("..", "..", "preflight", "ncclout", "testdata", log))
	if err != nil {
		t.Fatal(err)
	}
	if log == "" {
		path = os.DevNull
	}
	program := filepath.Join(t.TempDir(), "evenkeel-bench")
	script := fmt.Sprintf("#!/bin/sh\necho \"# started with $* rank=$RANK of=$WORLD_SIZE at=$MASTER_ADDR:$MASTER_PORT\"\ncat '%s'\nexit %d\n", path, status)
	if err := os.WriteFile(program, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	return program
}

// run is a check by the environment.
func run(t *testing.T, program string, getenv func(string) string) (status int, log string) {
	t.Helper()
	config, err := ReadConfig(getenv)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	c := Check{
		Config: config, Bench: program, Environment: append(os.Environ(), "RANK=7", "WORLD_SIZE=9"), Clock: clock.RealClock{}, Log: &out,
		Sending: wait.Backoff{Duration: time.Millisecond, Steps: 2},
	}
	return c.Run(t.Context()), out.String()
}

func TestNVSentinelCheckExitStatusAndEvent(t *testing.T) {
	for _, test := range []struct {
		name, log string
		ended     int
		settings  []string
		status    int
		healthy   bool
		code, has string
	}{
		{name: "it is fast enough", log: "evenkeel-json.log", settings: []string{"BW_THRESHOLD_GBPS", "2"}, healthy: true, has: "all-reduce inside the node: 2.35 GB/s, minimum 2 GB/s"},
		{name: "any speed will do", log: "evenkeel-json.log", healthy: true, has: "all-reduce inside the node: 2.35 GB/s"},
		{name: "it is too slow", log: "evenkeel-json.log", settings: []string{"BW_THRESHOLD_GBPS", "100"}, status: ExitFailed, code: CodeTooSlow, has: "2.35 GB/s, minimum 100 GB/s"},
		{name: "it is too slow, and that is only recorded", log: "evenkeel-json.log", settings: []string{"BW_THRESHOLD_GBPS", "100", "PROCESSING_STRATEGY", "STORE_ONLY"}, code: CodeTooSlow, has: "minimum 100 GB/s"},
		{name: "the run failed", log: "evenkeel-json.log", ended: 1, status: ExitFailed, code: CodeFailed, has: "exit status 1"},
		{name: "the output is cut", log: "cut-evenkeel-in-number.log", status: ExitFailed, code: CodeFailed, has: "all-reduce inside the node failed"},
		{name: "there is no plugin", log: "evenkeel-noplugin.log", ended: 1, status: ExitConfig, has: "cannot run here"},
		{name: "another network carried it", log: "synthetic-nccl-tests-fallback.log", status: ExitConfig, has: "over the network Socket"},
	} {
		t.Run(test.name, func(t *testing.T) {
			server, target := nvsentineltest.Start(t)
			status, log := run(t, bench(t, test.log, test.ended), environment(target, test.settings...))
			if status != test.status || !strings.Contains(log, test.has) {
				t.Errorf("status %d, want %d and %q:\n%s", status, test.status, test.has, log)
			}
			if !strings.Contains(log, "-b 67108864 -e 67108864 -n 20 -w 2 -c 1 --timeout 150 --spawn 2 rank= of= at=:") {
				t.Errorf("the benchmark was not started inside the node:\n%s", log)
			}
			calls := server.Calls()
			if status == ExitConfig {
				if len(calls) > 0 {
					t.Errorf("a fault of the environment was reported as one of the node: %+v", calls)
				}
				return
			}
			if len(calls) != 1 || len(calls[0].Events) != 1 || calls[0].Key == "" {
				t.Fatalf("%+v", calls)
			}
			e := calls[0].Events[0]
			if e.NodeName != "gpu-17" || e.CheckName != CheckName || e.IsHealthy != test.healthy || e.IsFatal == test.healthy || strings.Join(e.ErrorCode, " ") != test.code || !strings.Contains(e.Message, test.has) || e.Metadata["evenkeel.pod"] != "llama-0" {
				t.Errorf("%+v", e)
			}
		})
	}
}

func gangFiles(t *testing.T, files map[string]string) string {
	t.Helper()
	folder := t.TempDir()
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return folder
}

var wholeGang = map[string]string{
	"expected_count": "2", "gang_id": "g", "master_addr": "10.0.0.9", "master_port": "29500\n", "peers": "llama-0;10.0.0.9;0;evenkeel\nllama-1;10.0.3.6;1;evenkeel\n",
}

func TestNVSentinelCheckOfAGang(t *testing.T) {
	for _, test := range []struct {
		pod, threshold string
		status, events int
		started        string
		log            string
		ended          int
	}{
		{"llama-0", "1", ExitPassed, 1, "rank=0 of=2 at=10.0.0.9:29501", "evenkeel-json.log", 0},
		{"llama-0", "100", ExitFailed, 1, "rank=0 of=2", "evenkeel-json.log", 0},
		{"llama-0", "1", ExitFailed, 1, "rank=0 of=2", "", 0}, // it has to print something
		// Only rank 0 prints what was measured, and so knows how fast it was.
		{"llama-1", "100", ExitPassed, 0, "rank=1 of=2 at=10.0.0.9:29501", "", 0},
		{"llama-1", "1", ExitFailed, 0, "rank=1 of=2", "", 1},
	} {
		server, target := nvsentineltest.Start(t)
		status, log := run(t, bench(t, test.log, test.ended), environment(target, "POD_NAME", test.pod, "GANG_ID", "g", "GANG_CONFIG_DIR", gangFiles(t, wholeGang), "BW_THRESHOLD_GBPS", test.threshold))
		calls := server.Calls()
		if status != test.status || len(calls) != test.events || !strings.Contains(log, test.started) || strings.Contains(log, "--spawn") {
			t.Errorf("%+v: status %d, %d events:\n%s", test, status, len(calls), log)
		}
		if test.events == 0 || len(calls) == 0 {
			continue
		}
		// Two pods took part: no one knows which of their nodes is slow.
		e := calls[0].Events[0]
		if e.IsFatal || e.RecommendedAction != "NONE" || !strings.Contains(e.Message, "among 2 pods (llama-0, llama-1)") {
			t.Errorf("%+v: %+v", test, e)
		}
	}
}

func TestNVSentinelCheckWaitsForItsGang(t *testing.T) {
	with := func(name, text string) map[string]string {
		files := map[string]string{}
		for n, text := range wholeGang {
			files[n] = text
		}
		files[name] = text
		return files
	}
	for _, test := range []struct {
		name, has string
		files     map[string]string
		status    int
	}{
		{"no file yet", "0 of 0 pods", nil, ExitGang},
		{"a pod is missing", "1 of 2 pods of the gang have come within 1s", with("peers", "llama-0;10.0.0.9;0"), ExitGang},
		{"a gang without this pod", "2 of 2 pods", with("peers", "a;10.0.0.9;0\nb;10.0.0.8;1"), ExitGang},
		{"other checks", `llama-0 runs "evenkeel", llama-1 runs "other"`, with("peers", "llama-0;1;0;evenkeel\nllama-1;2;1;other"), ExitConfig},
		{"no count", `expected_count of the gang is "many"`, with("expected_count", "many"), ExitConfig},
		{"no port", `master_port of the gang is "99999"`, with("master_port", "99999"), ExitConfig},
		{"no rank", `want pod;address;rank`, with("peers", "llama-0\nllama-1"), ExitConfig},
		{"a rank too high", `the rank of llama-0 is 5, in a gang of 2`, with("peers", "llama-0;1;5\nllama-1;2;1"), ExitConfig},
	} {
		t.Run(test.name, func(t *testing.T) {
			server, target := nvsentineltest.Start(t)
			status, log := run(t, bench(t, "evenkeel-json.log", 0), environment(target, "GANG_ID", "g", "GANG_CONFIG_DIR", gangFiles(t, test.files), "GANG_TIMEOUT_SECONDS", "1"))
			if status != test.status || !strings.Contains(log, test.has) || len(server.Calls()) > 0 {
				t.Errorf("status %d, want %d and %q; %d events:\n%s", status, test.status, test.has, len(server.Calls()), log)
			}
		})
	}
}

func TestNVSentinelCheckWithoutNVSentinel(t *testing.T) {
	server, target := nvsentineltest.Start(t)
	server.Refuse(codes.Unavailable, "starting")
	status, log := run(t, bench(t, "evenkeel-json.log", 0), environment(target, "PROCESSING_STRATEGY", "STORE_ONLY"))
	if status != ExitNotSent || server.Refused() != 2 || !strings.Contains(log, "Unavailable: starting") {
		t.Errorf("status %d, %d attempts:\n%s", status, server.Refused(), log)
	}
	status, log = run(t, "/nowhere/evenkeel-bench", environment(target))
	if status != ExitConfig || !strings.Contains(log, "cannot run evenkeel-bench: ") {
		t.Errorf("no program: status %d:\n%s", status, log)
	}
}

// A pod that is deleted while it is checked is no fault of its node.
func TestNVSentinelCheckOfADeletedPod(t *testing.T) {
	server, target := nvsentineltest.Start(t)
	config, err := ReadConfig(environment(target))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	started := &onWrite{do: cancel}
	program := filepath.Join(t.TempDir(), "evenkeel-bench")
	if err := os.WriteFile(program, []byte("#!/bin/sh\necho started\nexec sleep 600\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	c := Check{Config: config, Bench: program, Environment: os.Environ(), Clock: clock.RealClock{}, Log: started}
	if status := c.Run(ctx); status != ExitConfig || len(server.Calls()) > 0 {
		t.Errorf("status %d, %+v", status, server.Calls())
	}
}

// onWrite does something when it is written to.
type onWrite struct{ do func() }

func (w *onWrite) Write(p []byte) (int, error) {
	w.do()
	return len(p), nil
}

func TestNVSentinelCheckSettings(t *testing.T) {
	for _, test := range []struct {
		settings []string
		want     string
	}{
		{[]string{"NODE_NAME", ""}, "NODE_NAME is not set"},
		{[]string{"PLATFORM_CONNECTOR_SOCKET", ""}, "neither PLATFORM_CONNECTOR_SOCKET nor HEALTH_PUBLISH_TARGET"},
		{[]string{"HEALTH_PUBLISH_TARGET", "pc:1"}, "name the files of both"},
		{[]string{"PROCESSING_STRATEGY", "MAYBE"}, "PROCESSING_STRATEGY"},
		{[]string{"BW_THRESHOLD_GBPS", "fast"}, `BW_THRESHOLD_GBPS="fast"`},
		{[]string{"BW_THRESHOLD_GBPS", "NaN"}, `BW_THRESHOLD_GBPS="NaN"`},
		{[]string{"TEST_SIZE_MB", "0"}, `TEST_SIZE_MB="0": want a number from 1 to 16384`},
		{[]string{"GANG_ID", "g", "POD_NAME", ""}, "POD_NAME is not set"},
	} {
		if _, err := ReadConfig(environment("unix:///run/s", test.settings...)); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%v: %v, want %q", test.settings, err, test.want)
		}
	}
	c, err := ReadConfig(environment("/run/s", "HEALTH_PUBLISH_TARGET", "pc:1", "HEALTH_PUBLISH_TOKEN_PATH", "/t", "HEALTH_PUBLISH_TLS_CA_FILE", "/c"))
	if err != nil || c.Connector.Target != "pc:1" || c.Connector.TokenFile != "/t" || c.Connector.CAFile != "/c" {
		t.Errorf("%+v, %v", c.Connector, err)
	}
}
