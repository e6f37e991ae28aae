package jobs

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/inject"
	"evenkeel.dev/evenkeel/operator/internal/preflight"
)

func check(change func(*evenkeel.NetworkCheck)) Check {
	object := &evenkeel.NetworkCheck{ObjectMeta: metav1.ObjectMeta{Namespace: "evenkeel-system", Name: "nightly", UID: "1"}}
	object.Spec.Runner = evenkeel.RunnerSpec{Type: evenkeel.RunnerBench, Image: "bench"}
	if change != nil {
		change(object)
	}
	return Check{Object: object, Options: object.Spec.WithDefaults(), Plugin: inject.Resolved{
		Profile: "default", Image: "plugin@sha256:0", Delivery: evenkeel.DeliveryImageVolume, Path: "/plugin", Conflict: evenkeel.ConflictKeep,
		Environment: map[string]string{"EVENKEEL_FLOWS": "8"},
	}}
}

var pair = preflight.PlannedRun{Stage: evenkeel.StagePairs, Round: 2, Index: 7, Nodes: []string{"b", "a"}, Device: -1}

func TestJobNamesFitHosts(t *testing.T) {
	for _, name := range []string{"a", "9-lives", "with.dots", strings.Repeat("a", 27) + "-b", strings.Repeat("long", 16)[:63]} {
		c := check(func(n *evenkeel.NetworkCheck) { n.Name = name })
		w := pair
		w.Round, w.Index = 4999, 2499
		for _, label := range []string{c.RunName(w) + "-launcher", c.RunName(w) + "-worker-4999", c.RunName(w) + "-4999", c.ServiceName()} {
			if errs := validation.IsDNS1035Label(label); len(errs) > 0 {
				t.Errorf("%s: %s: %v", name, label, errs)
			}
		}
		if errs := validation.IsDNS1123Subdomain(c.ReportName()); len(errs) > 0 {
			t.Errorf("%s: %v", c.ReportName(), errs)
		}
	}
	again := check(func(n *evenkeel.NetworkCheck) { n.UID = "2" })
	if check(nil).RunName(pair) == again.RunName(pair) {
		t.Error("two checks of one name share the names of their runs")
	}
}

func TestJobImagePullSecrets(t *testing.T) {
	c := check(nil)
	c.ImagePullSecrets, c.Plugin.ImagePullSecrets = []string{"bench"}, []string{"bench", "plugin"}
	job, err := c.Job(pair, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := job.Spec.Template.Spec.ImagePullSecrets; !slices.Equal(got, []corev1.LocalObjectReference{{Name: "bench"}, {Name: "plugin"}}) {
		t.Errorf("it pulls with %v", got)
	}
}

func TestJobPodsGetWhatTheClusterNeeds(t *testing.T) {
	class := "nvidia"
	c := check(func(o *evenkeel.NetworkCheck) {
		r := &o.Spec.Runner
		r.RuntimeClassName, r.ImagePullSecrets = &class, []corev1.LocalObjectReference{{Name: "mirror"}}
		r.PodLabels = map[string]evenkeel.LabelValue{"sidecar.istio.io/inject": "false"}
		r.PodAnnotations = map[string]string{"linkerd.io/inject": "disabled"}
	})
	c.ImagePullSecrets = []string{"registry"}
	w := preflight.PlannedRun{Stage: evenkeel.StageLocal, Nodes: []string{"a"}, Device: -1}
	job, err := c.Job(w, nil)
	if err != nil {
		t.Fatal(err)
	}
	pod := job.Spec.Template
	if pod.Labels["sidecar.istio.io/inject"] != "false" || pod.Labels[evenkeel.RunKey] != c.RunName(w) || pod.Annotations["linkerd.io/inject"] != "disabled" {
		t.Errorf("labels %v, annotations %v", pod.Labels, pod.Annotations)
	}
	if c.Object.Spec.Runner.PodAnnotations[evenkeel.InjectedKey] != "" || pod.Annotations[evenkeel.InjectedKey] == "" {
		t.Error("runs that are made at the same time share the map of annotations")
	}
	if s := pod.Spec.ImagePullSecrets; len(s) != 2 || s[0].Name != "registry" || s[1].Name != "mirror" || *pod.Spec.RuntimeClassName != class {
		t.Errorf("pulled with %v, runs with %v", s, pod.Spec.RuntimeClassName)
	}
}

func TestJobHasOneRankPerNode(t *testing.T) {
	job, err := check(nil).Job(pair, nil)
	if err != nil {
		t.Fatal(err)
	}
	pod := job.Spec.Template
	c := pod.Spec.Containers[0]
	if *job.Spec.Completions != 2 || *job.Spec.Parallelism != 2 || *job.Spec.CompletionMode != "Indexed" || *job.Spec.BackoffLimitPerIndex != 0 || *job.Spec.ActiveDeadlineSeconds != 360 {
		t.Errorf("%+v", job.Spec)
	}
	var nodes []string
	for _, term := range pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		nodes = append(nodes, term.MatchFields[0].Values...)
	}
	if !slices.Equal(nodes, []string{"a", "b"}) {
		t.Errorf("pinned to %v", nodes)
	}
	apart := pod.Spec.Affinity.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	if len(apart) != 1 || apart[0].TopologyKey != "kubernetes.io/hostname" || apart[0].LabelSelector.MatchLabels[evenkeel.RunKey] != job.Name || pod.Labels[evenkeel.RunKey] != job.Name {
		t.Errorf("%+v", apart)
	}
	for name, want := range map[string]string{
		"WORLD_SIZE": "2", "MASTER_ADDR": job.Name + "-0." + pod.Spec.Subdomain, "EVENKEEL_FLOWS": "8", "NCCL_NET_PLUGIN": "/opt/evenkeel/plugin/libnccl-net-evenkeel.so",
	} {
		if got := value(c.Env, name); got != want {
			t.Errorf("%s=%q, want %q", name, got, want)
		}
	}
	if pod.Spec.Subdomain != check(nil).Service().Name || pod.Spec.Volumes[1].Image == nil || *pod.Spec.AutomountServiceAccountToken {
		t.Errorf("%+v", pod.Spec)
	}
	if got := strings.Join(c.Command, " "); got != "evenkeel-bench allreduce --json -b 1048576 -e 67108864 -f 4 -n 20 -w 2 -c 1 --timeout 150" {
		t.Error(got)
	}
}

func value(env []corev1.EnvVar, name string) string {
	for _, e := range env {
		if e.Name == name {
			return e.Value
		}
	}
	return ""
}

func TestJobCommandByStage(t *testing.T) {
	for _, test := range []struct {
		stage  evenkeel.Stage
		device int
		want   string
	}{
		{evenkeel.StageLocal, -1, "-e 4194304 -f 4 -n 20 -w 2 -c 1 --timeout 150 --spawn 2"},
		{evenkeel.StageRails, 3, "--timeout 150 --device 3"},
		{evenkeel.StageGang, -1, "-e 67108864 -f 4 -n 20 -w 2 -c 1 --timeout 150"},
	} {
		got := strings.Join(check(nil).benchmarkCommand(preflight.PlannedRun{Stage: test.stage, Nodes: []string{"a"}, Device: test.device}, evenkeel.LauncherIndexedJob), " ")
		if !strings.HasSuffix(got, test.want) {
			t.Errorf("%s: %s", test.stage, got)
		}
	}
}

func TestMPIJobPassesEnvironment(t *testing.T) {
	gpus := int32(8)
	c := check(func(n *evenkeel.NetworkCheck) {
		n.Spec.Runner = evenkeel.RunnerSpec{Type: evenkeel.RunnerNCCLTests, Image: "tests", GPUsPerNode: &gpus, Environment: []evenkeel.EnvironmentVariable{{Name: "EVENKEEL_FLOWS", Value: "2"}}}
		n.Spec.Sweep.Collective = evenkeel.CollectiveReduceScatter
	})
	job, err := c.MPIJob(pair, nil)
	if err != nil {
		t.Fatal(err)
	}
	container := func(role string) map[string]any {
		list, _, err := unstructured.NestedSlice(job.Object, "spec", "mpiReplicaSpecs", role, "template", "spec", "containers")
		if err != nil || len(list) != 1 {
			t.Fatalf("%s: %v", role, err)
		}
		return list[0].(map[string]any)
	}
	list, _, _ := unstructured.NestedStringSlice(container("Launcher"), "command")
	command := strings.Join(list, " ")
	for _, want := range []string{"sh -c for h in ", " sh mpirun -np 16 ", " -x NCCL_NET_PLUGIN ", " -x EVENKEEL_FLOWS ", " -x NCCL_DEBUG ", " -x MASTER_ADDR ", " reduce_scatter_perf -b 1048576 "} {
		if !strings.Contains(command, want) {
			t.Errorf("%q lacks %q", command, want)
		}
	}
	gpu := func(role string) string {
		s, _, _ := unstructured.NestedString(container(role), "resources", "limits", "nvidia.com/gpu")
		return s
	}
	if gpu("Worker") != "8" || gpu("Launcher") != "" {
		t.Errorf("GPUs of the workers %q, of the launcher %q", gpu("Worker"), gpu("Launcher"))
	}
	replicas, _, _ := unstructured.NestedInt64(job.Object, "spec", "mpiReplicaSpecs", "Worker", "replicas")
	if replicas != 2 {
		t.Errorf("%d workers", replicas)
	}
	env, _, _ := unstructured.NestedSlice(container("Launcher"), "env")
	for _, e := range env {
		if e := e.(map[string]any); e["name"] == "EVENKEEL_FLOWS" && e["value"] != "2" {
			t.Errorf("the check's own %v does not win", e)
		}
	}
}

// Without mpirun, one process of nccl-tests has all GPUs of a node, and finds the others by the Job's index.
func TestNCCLTestsInAnIndexedJob(t *testing.T) {
	gpus, seconds := int32(8), int32(100)
	c := check(func(n *evenkeel.NetworkCheck) {
		n.Spec.Runner = evenkeel.RunnerSpec{Type: evenkeel.RunnerNCCLTests, Image: "tests", GPUsPerNode: &gpus}
		n.Spec.Sweep.Collective, n.Spec.RunTimeoutSeconds = evenkeel.CollectiveReduceScatter, &seconds
	})
	job, err := c.Job(pair, nil)
	if err != nil {
		t.Fatal(err)
	}
	container := job.Spec.Template.Spec.Containers[0]
	command := strings.Join(container.Command, " ")
	if !strings.HasPrefix(command, "/opt/evenkeel/nccl-tests/reduce_scatter_perf -b 1048576 ") || !strings.HasSuffix(command, " -g 8") {
		t.Error(command)
	}
	for name, want := range map[string]string{"WORLD_SIZE": "2", "MASTER_PORT": "29500", "EVENKEEL_MPI_TIMEOUT": "50", "NCCL_DEBUG": "INFO"} {
		if got := value(container.Env, name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	if got := container.Resources.Limits["nvidia.com/gpu"]; got.Value() != 8 {
		t.Errorf("%v GPUs", got)
	}
	if *job.Spec.Completions != 2 || *job.Spec.CompletionMode != batchv1.IndexedCompletion {
		t.Errorf("%+v", job.Spec)
	}
}

// rccl-tests have the programs and options of nccl-tests, and use AMD's GPUs. They lie in a folder of their own.
func TestRCCLTestsRequestGPUsOfAMD(t *testing.T) {
	gpus := int32(8)
	c := check(func(n *evenkeel.NetworkCheck) {
		n.Spec.Runner = evenkeel.RunnerSpec{Type: evenkeel.RunnerRCCLTests, Image: "tests", GPUsPerNode: &gpus, SupplementalGroups: []int64{109}}
		n.Spec.Sweep.Collective = evenkeel.CollectiveAllToAll
	})
	job, err := c.Job(pair, nil)
	if err != nil {
		t.Fatal(err)
	}
	container := job.Spec.Template.Spec.Containers[0]
	command := strings.Join(container.Command, " ")
	if !strings.HasPrefix(command, "/opt/evenkeel/rccl-tests/alltoall_perf -b 1048576 ") || !strings.HasSuffix(command, " -g 8") {
		t.Error(command)
	}
	amd, nvidia := container.Resources.Limits["amd.com/gpu"], container.Resources.Limits["nvidia.com/gpu"]
	if amd.Value() != 8 || !nvidia.IsZero() {
		t.Errorf("%v GPUs of AMD's and %v of NVIDIA's", amd, nvidia)
	}
	if groups := job.Spec.Template.Spec.SecurityContext.SupplementalGroups; !slices.Equal(groups, []int64{109}) {
		t.Errorf("groups %v: the files of the GPUs cannot be opened", groups)
	}
	if value(container.Env, "NCCL_DEBUG") != "INFO" || value(container.Env, "EVENKEEL_MPI_TIMEOUT") == "" {
		t.Errorf("%v", container.Env)
	}
	mpiJob, err := c.MPIJob(pair, nil)
	if err != nil {
		t.Fatal(err)
	}
	if text := fmt.Sprint(mpiJob.Object); !strings.Contains(text, " -np 16 ") || !strings.Contains(text, " alltoall_perf ") || !strings.Contains(text, "amd.com/gpu:8") || strings.Contains(text, "nvidia.com/gpu:") {
		t.Error(text)
	}
}

// A benchmark that starts its own ranks refuses MASTER_ADDR.
func TestLocalStageHasNoMaster(t *testing.T) {
	local := preflight.PlannedRun{Stage: evenkeel.StageLocal, Round: 1, Nodes: []string{"a"}, Device: -1}
	job, err := check(nil).Job(local, nil)
	if err != nil {
		t.Fatal(err)
	}
	mpiJob, err := check(nil).MPIJob(local, nil)
	if err != nil {
		t.Fatal(err)
	}
	launcher, _, err := unstructured.NestedSlice(mpiJob.Object, "spec", "mpiReplicaSpecs", "Launcher", "template", "spec", "containers")
	if err != nil || len(launcher) != 1 {
		t.Fatalf("%v %v", launcher, err)
	}
	if text := fmt.Sprint(launcher); value(job.Spec.Template.Spec.Containers[0].Env, "MASTER_ADDR") != "" || strings.Contains(text, "MASTER_") || !strings.Contains(text, "--spawn 2") {
		t.Error(text)
	}
}

// Inside a node NCCL would use NVLink or shared memory. Stage Local has to go over the plugin.
func TestLocalStageOfNCCLTestsUsesPlugin(t *testing.T) {
	gpus := int32(8)
	c := check(func(n *evenkeel.NetworkCheck) {
		n.Spec.Runner = evenkeel.RunnerSpec{Type: evenkeel.RunnerNCCLTests, Image: "tests", GPUsPerNode: &gpus, Environment: []evenkeel.EnvironmentVariable{{Name: "NCCL_SHM_DISABLE", Value: "0"}}}
	})
	for stage, want := range map[evenkeel.Stage]map[string]string{
		evenkeel.StageLocal: {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "0", "NCCL_NVLS_ENABLE": "0"},
		evenkeel.StagePairs: {"NCCL_P2P_DISABLE": "", "NCCL_SHM_DISABLE": "0", "NCCL_NVLS_ENABLE": ""},
	} {
		job, err := c.MPIJob(preflight.PlannedRun{Stage: stage, Round: 1, Nodes: []string{"a"}, Device: -1}, nil)
		if err != nil {
			t.Fatal(err)
		}
		list, _, err := unstructured.NestedSlice(job.Object, "spec", "mpiReplicaSpecs", "Launcher", "template", "spec", "containers")
		if err != nil || len(list) != 1 {
			t.Fatalf("%v %v", list, err)
		}
		var launcher corev1.Container
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(list[0].(map[string]any), &launcher); err != nil {
			t.Fatal(err)
		}
		command := strings.Join(launcher.Command, " ")
		for name, expected := range want {
			if got := value(launcher.Env, name); got != expected {
				t.Errorf("stage %s: %s is %q, want %q", stage, name, got, expected)
			}
			if passed := strings.Count(command, " -x "+name+" "); passed > 1 || (passed == 1) != (expected != "") {
				t.Errorf("stage %s: mpirun passes %s on %d times: %s", stage, name, passed, command)
			}
		}
	}
}

var verbs = preflight.PlannedRun{Stage: evenkeel.StageRDMA, Round: 1, Index: 3, Nodes: []string{"a"}, Device: -1}

func rdmaCheck(change func(*inject.RDMA)) Check {
	c := check(func(n *evenkeel.NetworkCheck) {
		n.Spec.Runner.Environment = []evenkeel.EnvironmentVariable{{Name: inject.TransportEnv, Value: "tcp"}}
	})
	c.Plugin.RDMA = &inject.RDMA{Resource: "rdma/hca", Count: 2}
	if change != nil {
		change(c.Plugin.RDMA)
	}
	return c
}

func TestRDMAStageHasDevice(t *testing.T) {
	job, err := rdmaCheck(nil).Job(verbs, nil)
	if err != nil {
		t.Fatal(err)
	}
	spec := job.Spec.Template.Spec
	c := spec.Containers[0]
	if got := c.Resources.Limits["rdma/hca"]; got.Value() != 2 {
		t.Errorf("limits %v", c.Resources.Limits)
	}
	if got := value(c.Env, inject.TransportEnv); got != "rdma" {
		t.Errorf("%s=%q", inject.TransportEnv, got)
	}
	if command := strings.Join(c.Command, " "); !strings.HasPrefix(command, "sh -c ") || !strings.Contains(command, "ulimit -l") || !strings.HasSuffix(command, "--spawn 2") {
		t.Error(command)
	}
	if value(c.Env, "WORLD_SIZE") != "" || !*spec.SecurityContext.RunAsNonRoot || len(c.SecurityContext.Capabilities.Add) != 0 {
		t.Errorf("%+v", spec)
	}
}

func TestRDMAStageRunsAsRootWithMemoryLockCapability(t *testing.T) {
	c := rdmaCheck(func(r *inject.RDMA) { r.LockMemory = true })
	for _, w := range []preflight.PlannedRun{verbs, pair} {
		job, err := c.Job(w, nil)
		if err != nil {
			t.Fatal(err)
		}
		spec := job.Spec.Template.Spec
		if root := spec.SecurityContext.RunAsUser != nil && *spec.SecurityContext.RunAsUser == 0 && !*spec.SecurityContext.RunAsNonRoot; root != (w.Stage == evenkeel.StageRDMA) {
			t.Errorf("stage %s: %+v", w.Stage, spec.SecurityContext)
		}
		if added := spec.Containers[0].SecurityContext.Capabilities.Add; len(added) != 1 || added[0] != "IPC_LOCK" {
			t.Errorf("stage %s: capabilities %v", w.Stage, added)
		}
	}
}

func TestMPIJobLauncherGetsNoRDMADevice(t *testing.T) {
	job, err := rdmaCheck(nil).MPIJob(pair, nil)
	if err != nil {
		t.Fatal(err)
	}
	for role, want := range map[string]bool{"Launcher": false, "Worker": true} {
		containers, _, err := unstructured.NestedSlice(job.Object, "spec", "mpiReplicaSpecs", role, "template", "spec", "containers")
		if err != nil || len(containers) != 1 {
			t.Fatalf("%s: %v %v", role, containers, err)
		}
		_, has, _ := unstructured.NestedString(containers[0].(map[string]any), "resources", "limits", "rdma/hca")
		if has != want {
			t.Errorf("%s has the device: %t", role, has)
		}
	}
}
