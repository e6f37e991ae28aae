//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/test/nvsentineltest"
)

// NVSentinel itself does not run here. The tests are its platform connector, on a socket of this machine.

// connector starts one, and returns its target for programs on nodes.
func connector(t *testing.T) (server *nvsentineltest.Server, target string) {
	t.Helper()
	machine, node := cluster.Local.Shared()
	t.Setenv("TMPDIR", machine)
	server, target = nvsentineltest.Start(t)
	return server, strings.Replace(target, machine, node, 1)
}

// told waits until so many events have come, and returns them.
func told(ctx context.Context, t *testing.T, server *nvsentineltest.Server, count int) []nvsentineltest.Call {
	t.Helper()
	eventually(ctx, t, fmt.Sprintf("%d events have come", count), func(context.Context) (bool, error) { return len(server.Calls()) >= count, nil })
	return server.Calls()
}

// The chart's bridge, as root with the socket of its node and a token, tells of a node that failed.
func TestNVSentinelIsToldByTheChartsBridge(t *testing.T) {
	ctx := testContext(t)
	server, target := connector(t)
	recordResults(ctx, t)
	policy := &evenkeel.NetworkCheckPolicy{ObjectMeta: metav1.ObjectMeta{Name: "sentinel"}}
	policy.Spec.Triggers = evenkeel.TriggerSpec{NewNodes: evenkeel.SwitchDisabled}
	policy.Spec.Check.Runner.Type = evenkeel.RunnerBench
	if err := cluster.Client.Create(ctx, policy); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cluster.Client.Delete(context.Background(), policy); client.IgnoreNotFound(err) != nil {
			t.Error(err)
		}
		if t.Failed() {
			out, err := cluster.Kubectl(context.Background(), "-n", "evenkeel-system", "logs", "deployment/evenkeel-nvsentinel", "--tail=20")
			t.Logf("%s %v", out, err)
		}
		if err := cluster.InstallChart(context.Background()); err != nil {
			t.Error(err)
		}
	})
	if err := cluster.InstallChart(ctx, "--set", "nvsentinel.connector="+target); err != nil {
		t.Fatal(err)
	}
	fault := told(ctx, t, server, 1)[0]
	if e := fault.Events[0]; e.NodeName != "n2" || e.IsHealthy || !strings.HasPrefix(e.Message, "TooSlow: ") || !strings.HasPrefix(fault.Authorization, "Bearer ey") {
		t.Errorf("%+v", fault)
	}
	if err := cluster.Client.Delete(ctx, policy); err != nil {
		t.Fatal(err)
	}
	calls := told(ctx, t, server, 2)
	if e := calls[1].Events[0]; len(calls) != 2 || e.NodeName != "n2" || !e.IsHealthy || !strings.HasPrefix(e.Message, "no longer marked: ") {
		t.Errorf("%+v", calls)
	}
}

// The image of the check, as the init container that NVSentinel adds: two pods on two hosts wait for each other,
// measure, and start.
func TestNVSentinelCheckOfAGangStartsIt(t *testing.T) {
	ctx := testContext(t)
	server, target := connector(t)
	socket := strings.TrimPrefix(target, "unix://")
	folder := socket[:strings.LastIndex(socket, "/")]
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "e2e-sentinel-"}}
	if err := cluster.Client.Create(ctx, ns); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cluster.Client.Delete(context.Background(), ns); err != nil {
			t.Error(err)
		}
	})
	describe(t, ns.Name)
	gang := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns.Name, Name: "preflight-gang"}, Data: map[string]string{"expected_count": "2"}}
	if err := cluster.Client.Create(ctx, gang); err != nil {
		t.Fatal(err)
	}
	hosts := map[string]string{"train-0": "n1", "train-1": "n3"}
	names := slices.Sorted(maps.Keys(hosts))
	for _, name := range names {
		pod := plainPod(ns.Name, nil)
		pod.GenerateName, pod.Name = "", name
		pod.Spec.NodeSelector = map[string]string{"kubernetes.io/hostname": hosts[name]}
		pod.Spec.RestartPolicy = corev1.RestartPolicyNever
		pod.Spec.Containers[0].Command = []string{"true"}
		pod.Spec.SecurityContext = nil
		pod.Spec.Volumes = []corev1.Volume{
			{Name: "socket", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: folder}}},
			{Name: "gang", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: gang.Name}}}},
		}
		field := func(path string) *corev1.EnvVarSource {
			return &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: path}}
		}
		pod.Spec.InitContainers = []corev1.Container{{
			Name: "preflight-evenkeel", Image: cluster.Images.NVSentinelCheck,
			Env: []corev1.EnvVar{
				{Name: "NODE_NAME", ValueFrom: field("spec.nodeName")}, {Name: "POD_NAME", ValueFrom: field("metadata.name")},
				{Name: "PLATFORM_CONNECTOR_SOCKET", Value: target}, {Name: "PROCESSING_STRATEGY", Value: "EXECUTE_REMEDIATION"},
				{Name: "GANG_ID", Value: "gang"}, {Name: "GANG_CONFIG_DIR", Value: "/etc/preflight"}, {Name: "TEST_SIZE_MB", Value: "4"}, {Name: "BENCHMARK_ITERS", Value: "3"},
			},
			VolumeMounts: []corev1.VolumeMount{{Name: "socket", MountPath: folder}, {Name: "gang", MountPath: "/etc/preflight", ReadOnly: true}},
		}}
		if err := cluster.Client.Create(ctx, pod); err != nil {
			t.Fatal(err)
		}
	}
	// What NVSentinel's controller does when the pods have addresses.
	addresses := map[string]string{}
	eventually(ctx, t, "the checks wait for each other", func(ctx context.Context) (bool, error) {
		for _, name := range names {
			p := pod(ctx, t, ns.Name, name)
			if s := p.Status.InitContainerStatuses; p.Status.PodIP == "" || len(s) != 1 || s[0].State.Running == nil {
				return false, nil
			}
			addresses[name] = p.Status.PodIP
		}
		return true, nil
	})
	gang.Data["master_addr"], gang.Data["master_port"] = addresses["train-0"], "29500"
	gang.Data["peers"] = fmt.Sprintf("train-0;%s;0;preflight-evenkeel\ntrain-1;%s;1;preflight-evenkeel", addresses["train-0"], addresses["train-1"])
	if err := cluster.Client.Update(ctx, gang); err != nil {
		t.Fatal(err)
	}
	for _, name := range names { // a kubelet reads ConfigMaps when it looks at the pod
		if _, err := cluster.Kubectl(ctx, "-n", ns.Name, "annotate", "pod", name, "looked-at=1"); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range names {
		eventually(ctx, t, name+" has run", func(ctx context.Context) (bool, error) {
			p := pod(ctx, t, ns.Name, name)
			if p.Status.Phase == corev1.PodFailed {
				raw, err := cluster.Clientset.CoreV1().Pods(ns.Name).GetLogs(name, &corev1.PodLogOptions{Container: "preflight-evenkeel"}).DoRaw(ctx)
				return false, fmt.Errorf("it failed: %s %v", raw, err)
			}
			return p.Status.Phase == corev1.PodSucceeded, nil
		})
	}
	calls := told(ctx, t, server, 1)
	if e := calls[0].Events[0]; len(calls) != 1 || e.NodeName != "n1" || !e.IsHealthy || !strings.HasPrefix(e.Message, "all-reduce among 2 pods (train-0, train-1): ") {
		t.Errorf("%+v", calls)
	}
}
