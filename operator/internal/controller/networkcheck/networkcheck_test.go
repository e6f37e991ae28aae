package networkcheck

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/preflight"
	"evenkeel.dev/evenkeel/operator/internal/preflight/jobs"
	"evenkeel.dev/evenkeel/operator/internal/preflight/ncclout"
	"evenkeel.dev/evenkeel/operator/internal/preflight/pairing"
)

var bench = evenkeel.CheckOptions{Runner: evenkeel.RunnerSpec{Type: evenkeel.RunnerBench}}

// TestImageOfRunner: each runner has an image of its own for checks that name none, and a value of the chart.
func TestImageOfRunner(t *testing.T) {
	c := &Reconciler{BenchImage: "bench:1", NCCLTestsImage: "nccl-tests:1", RCCLTestsImage: "rccl-tests:1"}
	for runner, want := range map[evenkeel.RunnerType][2]string{
		evenkeel.RunnerBench: {"bench:1", "preflight.benchImage"}, evenkeel.RunnerNCCLTests: {"nccl-tests:1", "preflight.ncclTestsImage"},
		evenkeel.RunnerRCCLTests: {"rccl-tests:1", "preflight.rcclTestsImage"},
	} {
		if image, value := c.defaultImage(runner); image != want[0] || value != want[1] {
			t.Errorf("%s: %s of %s, want %s", runner, image, value, want)
		}
	}
	// Checks choose among those on GPUs that have an image.
	for _, test := range []struct {
		nccl, rccl string
		want       []evenkeel.RunnerType
	}{
		{"", "", nil}, {"n", "", []evenkeel.RunnerType{evenkeel.RunnerNCCLTests}}, {"", "r", []evenkeel.RunnerType{evenkeel.RunnerRCCLTests}},
		{"n", "r", []evenkeel.RunnerType{evenkeel.RunnerNCCLTests, evenkeel.RunnerRCCLTests}},
	} {
		c := &Reconciler{BenchImage: "bench:1", NCCLTestsImage: test.nccl, RCCLTestsImage: test.rccl}
		if got := c.installedGPURunners(); !slices.Equal(got, test.want) {
			t.Errorf("images %q and %q: %v, want %v", test.nccl, test.rccl, got, test.want)
		}
	}
}

func TestParseMeasurement(t *testing.T) {
	for file, want := range map[string]struct {
		outcome pairing.Outcome
		network string
	}{
		"evenkeel-json.log":                  {pairing.Measured, "Evenkeel"},
		"evenkeel-text.log":                  {pairing.Measured, "Evenkeel"},
		"synthetic-nccl-tests.log":           {pairing.Measured, "Evenkeel"},
		"synthetic-nccl-tests-fallback.log":  {pairing.Measured, "Socket"},
		"synthetic-nccl-tests-no-driver.log": {pairing.Fault, ""},
		"nccl-tests-no-driver.log":           {pairing.Fault, ""},
		"evenkeel-noplugin.log":              {pairing.Fault, ""},
		"cut-evenkeel-after-two-rows.log":    {pairing.Fault, ""},
	} {
		text, err := os.ReadFile(filepath.Join("..", "..", "preflight", "ncclout", "testdata", file))
		if err != nil {
			t.Fatal(err)
		}
		m := parseMeasurement(text, bench)
		if m.Outcome != want.outcome || (m.Detail == "") != (want.outcome == pairing.Measured) {
			t.Errorf("%s: %+v", file, m)
		}
		if driver := strings.Contains(file, "no-driver"); driver != strings.HasPrefix(m.Detail, "no usable GPU driver: ") {
			t.Errorf("%s: %q", file, m.Detail)
		}
		if want.network != "" && (len(m.Networks) != 1 || m.Networks[0].Name != want.network || m.BusBW <= 0) {
			t.Errorf("%s: %+v", file, m)
		}
	}
	lost := parseMeasurement([]byte("error: rank 1 (gpu-4, 10.0.0.2) is gone: its process or its machine has ended\n"), bench)
	if lost.Outcome != pairing.Broken || !strings.Contains(lost.Detail, "rank 1 (gpu-4") {
		t.Errorf("%+v", lost)
	}
	if m := parseMeasurement(nil, bench); m.Outcome != pairing.Fault {
		t.Errorf("an empty log: %+v", m)
	}
}

// TestRunOnReplacedNode: what a run measured is that of no selected node if another has the name of one.
func TestRunOnReplacedNode(t *testing.T) {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-17", UID: "new"}}
	c := &Reconciler{client: fake.NewClientBuilder().WithObjects(node).Build(), Clock: clocktesting.NewFakePassiveClock(time.Unix(10, 0))}
	seconds := int32(600)
	check := jobs.Check{Options: evenkeel.CheckOptions{RunTimeoutSeconds: &seconds}}
	run := preflight.PlannedRun{Nodes: []string{"gpu-17"}}
	job := runJob{Object: &batchv1.Job{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.NewTime(time.Unix(0, 0))}}}
	for uid, replaced := range map[types.UID]bool{"old": true, "new": false} {
		record := &preflight.Record{Nodes: []preflight.Node{{Name: "gpu-17", UID: uid}}}
		m, err := c.readResult(t.Context(), check, record, run, job, nil)
		if err != nil {
			t.Fatal(err)
		}
		if ended := m != nil && m.Outcome == pairing.Fault; ended != replaced {
			t.Errorf("UID %s was selected: %+v", uid, m)
		}
	}
}

func TestParseMeasurementLatency(t *testing.T) {
	const (
		end  = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 1\n"
		ours = `{"ranks":[{"network":{"name":"Evenkeel","devices":2}}],"rows":[{"size":64,"count":16,"out_of_place":{"time_us":750,"busbw":1},"in_place":{"time_us":750,"busbw":1}}],"latency_us":31.5,"wrong":0,"average_busbw":1}` + "\n"
		// NCCL uses all devices. Its time is that of the whole operation.
		small = "8 2 float sum -1 40.0 0.00 0.00 0 90.0 0.00 0.00 0\n"
		large = "1048576 262144 float sum -1 800.0 1.3 1.3 0 800.0 1.3 1.3 0\n"
	)
	tests := func(collective evenkeel.Collective) evenkeel.CheckOptions {
		return evenkeel.CheckOptions{Runner: evenkeel.RunnerSpec{Type: evenkeel.RunnerNCCLTests}, Sweep: evenkeel.SweepSpec{Collective: collective}}
	}
	for name, test := range map[string]struct {
		log     string
		options evenkeel.CheckOptions
		latency float64
		devices int
	}{
		"the benchmark":                 {ours, bench, 31.5, 2},
		"an older one":                  {small + end, bench, 0, 0},
		"nccl-tests":                    {small + large + end, tests(evenkeel.CollectiveAllReduce), 20, 0},
		"nccl-tests, from 1 MiB on":     {large + end, tests(evenkeel.CollectiveAllReduce), 0, 0},
		"nccl-tests, another operation": {small + large + end, tests(evenkeel.CollectiveAllGather), 0, 0},
		"a run that was cut":            {small, tests(evenkeel.CollectiveAllReduce), 0, 0},
	} {
		if m := parseMeasurement([]byte(test.log), test.options); m.LatencyUS != test.latency || m.Devices != test.devices {
			t.Errorf("%s: %+v", name, m)
		}
	}
}

func TestBlockingReason(t *testing.T) {
	container := func(state corev1.ContainerState) corev1.PodStatus {
		return corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{{Name: jobs.Container, State: state}}}
	}
	ended := func(code int32, reason string) corev1.PodStatus {
		status := container(corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: code, Reason: reason}})
		status.Phase = corev1.PodFailed
		return status
	}
	waiting := func(reason string) corev1.PodStatus {
		return container(corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: "so\nit is"}})
	}
	for want, status := range map[string]corev1.PodStatus{
		"":                                 ended(1, "Error"),
		" ":                                waiting("ContainerCreating"),
		"  ":                               {},
		"ImagePullBackOff: so it is":       waiting("ImagePullBackOff"),
		"CreateContainerConfigError":       waiting("CreateContainerConfigError"),
		"OOMKilled":                        ended(137, "OOMKilled"),
		"ended by signal 11":               ended(139, "Error"),
		"EvictionByEvictionAPI: drained":   {Conditions: []corev1.PodCondition{{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, Reason: "EvictionByEvictionAPI", Message: "drained"}}},
		"Evicted: low on memory":           {Phase: corev1.PodFailed, Reason: "Evicted", Message: "low on memory"},
		"UnexpectedAdmissionError: no GPU": {Phase: corev1.PodFailed, Reason: "UnexpectedAdmissionError", Message: "no GPU"},
	} {
		pod := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: corev1.PodSpec{NodeName: "gpu-1"}, Status: status}
		got := blockingReason([]corev1.Pod{{}, pod})
		if strings.TrimSpace(want) == "" {
			if got != "" {
				t.Errorf("%+v: %q, want nothing", status, got)
			}
		} else if !strings.Contains(got, want) || !strings.HasPrefix(got, "pod p on gpu-1: ") {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestResolveLauncher(t *testing.T) {
	lists := func(err error) *Reconciler {
		return &Reconciler{NCCLTestsImage: "nccl-tests:1", RCCLTestsImage: "rccl-tests:1", live: fake.NewClientBuilder().WithInterceptorFuncs(interceptor.Funcs{
			List: func(context.Context, client.WithWatch, client.ObjectList, ...client.ListOption) error { return err },
		}).Build()}
	}
	with := lists(nil)
	for _, unserved := range []error{
		&meta.NoKindMatchError{GroupKind: jobs.MPIJobKind.GroupKind()},
		apierrors.NewGenericServerResponse(http.StatusNotFound, "list", schema.GroupResource{}, "", "", 0, true), // the kind was served when the mapper looked
	} {
		without := lists(unserved)
		for _, test := range []struct {
			kind                   evenkeel.RunnerType
			asked, without, served evenkeel.Launcher
			image                  string
		}{
			{evenkeel.RunnerBench, evenkeel.LauncherAuto, evenkeel.LauncherIndexedJob, evenkeel.LauncherMPIJob, "any"},
			{evenkeel.RunnerBench, evenkeel.LauncherIndexedJob, evenkeel.LauncherIndexedJob, evenkeel.LauncherIndexedJob, "any"},
			{evenkeel.RunnerBench, evenkeel.LauncherMPIJob, "", evenkeel.LauncherMPIJob, "any"},
			// That of the installation has nccl-tests for Indexed Jobs. Others may have them with an MPI that needs mpirun.
			{evenkeel.RunnerNCCLTests, evenkeel.LauncherAuto, evenkeel.LauncherIndexedJob, evenkeel.LauncherMPIJob, "nccl-tests:1"},
			{evenkeel.RunnerNCCLTests, evenkeel.LauncherAuto, "", evenkeel.LauncherMPIJob, "others:1"},
			// That of the installation has rccl-tests for Indexed Jobs only.
			{evenkeel.RunnerRCCLTests, evenkeel.LauncherAuto, evenkeel.LauncherIndexedJob, evenkeel.LauncherIndexedJob, "rccl-tests:1"},
			{evenkeel.RunnerRCCLTests, evenkeel.LauncherMPIJob, "", evenkeel.LauncherMPIJob, "rccl-tests:1"},
			{evenkeel.RunnerRCCLTests, evenkeel.LauncherAuto, "", evenkeel.LauncherMPIJob, "nccl-tests:1"},
			{evenkeel.RunnerNCCLTests, evenkeel.LauncherIndexedJob, evenkeel.LauncherIndexedJob, evenkeel.LauncherIndexedJob, "others:1"},
		} {
			runner := evenkeel.RunnerSpec{Type: test.kind, Launcher: test.asked, Image: test.image}
			if got, err := without.resolveLauncher(t.Context(), "default", runner); err != nil || got != test.without {
				t.Errorf("%+v without MPIJobs: %q %v, want %q", runner, got, err, test.without)
			}
			if got, err := with.resolveLauncher(t.Context(), "default", runner); err != nil || got != test.served {
				t.Errorf("%+v with MPIJobs: %q %v, want %q", runner, got, err, test.served)
			}
		}
	}
	runner := evenkeel.RunnerSpec{Type: evenkeel.RunnerBench}
	if got, err := lists(apierrors.NewForbidden(schema.GroupResource{}, "", nil)).resolveLauncher(t.Context(), "default", runner); err == nil {
		t.Errorf("MPIJobs may not be listed: %q", got)
	}
}

// TestFinalStatusIsBounded has thousands of nodes, pools and networks fail with long names and reasons.
func TestFinalStatusIsBounded(t *testing.T) {
	long := strings.Repeat("x", 2000)
	record := &preflight.Record{Started: time.Unix(0, 0), Finished: time.Unix(1, 0)}
	d := preflight.Decision{Verdict: evenkeel.VerdictFail}
	for i := range 5000 {
		name := fmt.Sprintf("%s-%04d", long[:248], i)
		record.Networks = append(record.Networks, ncclout.Network{Name: name, SHA256: long, Version: 1})
		d.Nodes = append(d.Nodes, preflight.NodeResult{Node: preflight.Node{Name: name, Verdict: evenkeel.VerdictFail, Reason: "TooSlow", Message: long}, Stage: evenkeel.StagePairs, BusBW: 1.5})
		d.Fabrics = append(d.Fabrics, preflight.FabricResult{Pools: slices.Repeat([]string{long[:63]}, 5000), Verdict: evenkeel.VerdictFail, Reason: "NoPairPassed", Message: long, MinBusBW: 400})
	}
	text, err := json.Marshal(finalStatus(&evenkeel.NetworkCheck{}, record, d))
	if err != nil {
		t.Fatal(err)
	}
	if len(text) > 64<<10+maxFailedNodes*256 {
		t.Errorf("%d bytes", len(text))
	}
}

// TestOtherVersionsFailNoNode has a benchmark that does not know an option of this controller, and plugins that refuse each other.
func TestOtherVersionsFailNoNode(t *testing.T) {
	for log, want := range map[string]string{
		"error: unexpected argument '--device' found\n\nUsage: evenkeel-bench allreduce --json\n\nFor more information, try '--help'.\n": "runner.image",
		"error: unrecognized subcommand 'allreduce'\n":        "runner.image",
		"error: invalid value 'Gang' for '--stage <STAGE>'\n": "runner.image",
		"error: rank 1 lost\nerror: rank 0: connect to 10.0.0.1:1: the peer has Evenkeel protocol version 6, this side has version 7\n": "protocol version 6",
	} {
		if m := parseMeasurement([]byte(log), bench); m.Outcome != pairing.Fault || !strings.Contains(m.Detail, want) {
			t.Errorf("%q: %s %q, want a run that says nothing about the nodes, and %q", log, m.Outcome, m.Detail, want)
		}
	}
	if m := parseMeasurement([]byte("error: rank 1 lost\n"), bench); m.Outcome != pairing.Broken {
		t.Errorf("%+v", m)
	}
}

func TestQuantity(t *testing.T) {
	for gigabytes, want := range map[float64]string{0.1: "100M", 46.1234: "46123M", 340: "340G", 0.0001: "100k"} {
		if got := Quantity(gigabytes).String(); got != want {
			t.Errorf("%g: %s, want %s", gigabytes, got, want)
		}
	}
	if Quantity(0) != nil || Quantity(-1) != nil {
		t.Error("no speed is no quantity")
	}
}
