//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// sum is a script that sums through the job's reduction servers, as NCCL would, and checks every element.
const sum = "exec evenkeel-bench reduction --size 4M --chunksize 512K -w 1 -n 3 -c 2"

// servers waits until the job's reduction servers are in a state, and returns their service.
func servers(ctx context.Context, t *testing.T, namespace, state string) *evenkeel.ReductionService {
	t.Helper()
	var list evenkeel.ReductionServiceList
	eventually(ctx, t, "the reduction servers are "+state, func(ctx context.Context) (bool, error) {
		if err := cluster.Client.List(ctx, &list, client.InNamespace(namespace)); err != nil || len(list.Items) != 1 {
			return false, err
		}
		c := meta.FindStatusCondition(list.Items[0].Status.Conditions, evenkeel.ConditionAvailable)
		return c != nil && c.Reason == state, nil
	})
	return &list.Items[0]
}

// serverPods are the pods of all reduction servers in the namespace.
func serverPods(ctx context.Context, namespace string) ([]corev1.Pod, error) {
	var pods corev1.PodList
	err := cluster.Client.List(ctx, &pods, client.InNamespace(namespace), client.HasLabels{evenkeel.ReductionServerKey})
	return pods.Items, err
}

func reportServers(t *testing.T, namespace string) {
	t.Helper()
	t.Cleanup(func() {
		if t.Failed() {
			ctx := context.Background()
			out, err := cluster.Kubectl(ctx, "-n", namespace, "get", "rsvc,statefulsets,pods,events", "-o", "wide")
			t.Logf("%s %v", out, err)
			out, err = cluster.Kubectl(ctx, "-n", namespace, "logs", "-l", evenkeel.ReductionServerKey, "--prefix", "--tail=50")
			t.Logf("%s %v", out, err)
		}
	})
}

func TestReductionServersLiveWithTheirJob(t *testing.T) {
	ctx, ns := testContext(t), newNamespace(t)
	reportServers(t, ns)
	job := trainingJob{profile: "default", reduction: "2", script: sum}
	job.create(ctx, t, ns)
	if end := waitJob(ctx, t, ns, "Succeeded", "Failed"); end != "Succeeded" {
		t.Fatalf("the job %s", end)
	}
	if out := logs(ctx, ns, "train-master-0"); !strings.Contains(out, "2 ranks reduce 4194304 bytes of float") || !strings.Contains(out, ", 0 wrong") {
		t.Errorf("the master's output:\n%s", out)
	}
	service := servers(ctx, t, ns, evenkeel.ReasonJobFinished)
	worker := pod(ctx, t, ns, "train-worker-0")
	if got, want := variable(worker, "EVENKEEL_REDUCTION_SERVERS"), strings.Join(service.Status.Endpoints, ","); got != want {
		t.Errorf("EVENKEEL_REDUCTION_SERVERS is %q, want %q", got, want)
	}
	eventually(ctx, t, "the servers are gone with their job", func(ctx context.Context) (bool, error) {
		pods, err := serverPods(ctx, ns)
		return len(pods) == 0, err
	})
	// The other objects are deleted with the job.
	if err := cluster.Client.Delete(ctx, job.object(ns)); err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, "nothing of the servers is left", func(ctx context.Context) (bool, error) {
		out, err := cluster.Kubectl(ctx, "-n", ns, "get", "rsvc,statefulsets,services,poddisruptionbudgets,networkpolicies,secrets",
			"-l", evenkeel.ReductionServerKey, "-o", "name")
		return strings.TrimSpace(out) == "", err
	})
}

// TestReductionBenchmarkThroughKubectl is the example of docs/reduction.md.
func TestReductionBenchmarkThroughKubectl(t *testing.T) {
	ctx, ns := testContext(t), newNamespace(t)
	root, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	pods, err := os.ReadFile(filepath.Join(root, "config", "samples", "reduction-bench.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	images := strings.NewReplacer("SERVER_IMAGE", cluster.Images.Server, "BENCH_IMAGE", cluster.Images.Bench, "PLUGIN_IMAGE", cluster.Images.Plugin)
	if _, err := cluster.KubectlInput(ctx, images.Replace(string(pods)), "-n", ns, "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	var hosts strings.Builder
	for _, role := range []string{"server", "client"} {
		if _, err := cluster.Kubectl(ctx, "-n", ns, "rollout", "status", "statefulset/reduction-bench-"+role); err != nil {
			t.Fatal(err)
		}
		list, err := cluster.Kubectl(ctx, "-n", ns, "get", "pods", "-l", "app=reduction-bench,role="+role, "-o",
			`jsonpath={range .items[*]}- name: {.metadata.name}{"\n"}  address: {.status.podIP}{"\n"}{end}`)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&hosts, "%ss:\n%s", role, list)
	}
	file := filepath.Join(t.TempDir(), "pods.yaml")
	if err := os.WriteFile(file, []byte(hosts.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	bench := exec.CommandContext(ctx, filepath.Join(root, "dist", "evenkeel-bench"), "reduction", "--hosts", file,
		"--rsh", cluster.KubectlPath()+" -n "+ns+" exec -i {} -c main -- sh -c",
		"--bench-program", "/usr/local/bin/evenkeel-bench", "--server-program", "/usr/local/bin/evenkeel-reduction-server",
		"--plugin", "/evenkeel/plugin/libnccl-net-evenkeel.so", "--size", "4M", "-w", "1", "-n", "3")
	bench.Env = append(os.Environ(), "KUBECONFIG="+cluster.Kubeconfig)
	out, err := bench.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "2 ranks reduce 4194304 bytes of float") || !strings.Contains(string(out), ", 0 wrong") {
		t.Errorf("%v\n%s\nwith\n%s", err, out, hosts.String())
	}
	if !strings.Contains(string(out), "# 2 servers, each piece") {
		t.Errorf("the servers' steps are missing:\n%s", out)
	}
}

func TestReductionLostServerIsNamed(t *testing.T) {
	ctx, ns := testContext(t), newNamespace(t)
	reportServers(t, ns)
	trainingJob{
		profile: "default", reduction: "2", env: map[string]string{"EVENKEEL_REDUCTION_TIMEOUT": "20"},
		script: strings.ReplaceAll(sum, "-n 3", "-n 1000000"),
	}.create(ctx, t, ns)
	service := servers(ctx, t, ns, evenkeel.ReasonAllReady)
	lost := service.Name + "-1"
	eventually(ctx, t, "the server sums", func(ctx context.Context) (bool, error) {
		return sums(ctx, ns, strings.TrimSuffix(service.Status.Endpoints[1], ":7470"))
	})
	t.Run("key is required", func(t *testing.T) { rejectsOtherKeys(ctx, t, ns) })
	if _, err := cluster.Kubectl(ctx, "-n", ns, "delete", "pod", lost, "--grace-period=0", "--force"); err != nil {
		t.Fatal(err)
	}
	waitJob(ctx, t, ns, "Failed")
	// The line about joining names all servers. Lines about one server must be about the lost one, even where the other
	// server reported the loss.
	named := false
	for line := range strings.Lines(logs(ctx, ns, "train-master-0") + logs(ctx, ns, "train-worker-0")) {
		if !strings.Contains(line, "reduction server ") {
			continue
		}
		if !strings.Contains(line, "reduction server "+service.Status.Endpoints[1]+": ") {
			t.Errorf("the line is about another server than the lost one, %s: %s", lost, line)
		}
		named = true
	}
	if !named {
		t.Errorf("no output names the lost server %s", lost)
	}
	eventually(ctx, t, "an Event on the job names it", func(ctx context.Context) (bool, error) {
		var events corev1.EventList
		err := cluster.Client.List(ctx, &events, client.InNamespace(ns))
		return slices.ContainsFunc(events.Items, func(e corev1.Event) bool {
			return e.Reason == "EvenkeelReductionServerLost" && e.InvolvedObject.Name == "train" && strings.Contains(e.Message, lost)
		}), err
	})
}

// sums reports whether the server has summed anything for the job. It reads the server's metrics from a worker.
func sums(ctx context.Context, namespace, host string) (bool, error) {
	// The image has no HTTP client.
	request := `exec 3<>/dev/tcp/$0/9470 && printf 'GET /metrics HTTP/1.1\r\nHost: %s\r\n\r\n' "$0" >&3 && timeout 5 cat <&3`
	out, err := cluster.Kubectl(ctx, "-n", namespace, "exec", "train-master-0", "-c", "pytorch", "--", "bash", "-c", request, host)
	if err != nil {
		return false, nil // the worker has not started
	}
	for line := range strings.Lines(out) {
		if strings.HasPrefix(line, `evenkeel_reduction_pieces_total{job="`+namespace+`/train"}`) && !strings.HasSuffix(strings.TrimSpace(line), " 0") {
			return true, nil
		}
	}
	return false, nil
}

// rejectsOtherKeys joins the job's servers with one more rank, which has a communicator of its own. It runs in the
// master's pod, which can reach them.
func rejectsOtherKeys(ctx context.Context, t *testing.T, namespace string) {
	t.Helper()
	for _, test := range []struct {
		name  string
		key   []string // for env; none: the job's own
		joins bool
	}{
		{"the job's key", nil, true},
		{"another key", []string{"-u", "EVENKEEL_JOB_KEY_FILE", "EVENKEEL_JOB_KEY=" + strings.Repeat("9a", 32)}, false},
		{"no key", []string{"-u", "EVENKEEL_JOB_KEY_FILE"}, false},
	} {
		args := append([]string{"-n", namespace, "exec", "train-master-0", "-c", "pytorch", "--", "env"}, test.key...)
		out, err := cluster.Kubectl(ctx, append(args, "evenkeel-bench", "reduction", "--rank", "0", "--world-size", "1",
			"--master-addr", "127.0.0.1", "--master-port", "29555", "--timeout", "30", "--size", "1M", "-w", "0", "-n", "1", "-c", "1")...)
		switch {
		case test.joins && (err != nil || !strings.Contains(out, ", 0 wrong")):
			t.Errorf("with %s: %v\n%s", test.name, err, out)
		case !test.joins && err == nil:
			t.Errorf("with %s a rank joined:\n%s", test.name, out)
		case !test.joins && !slices.ContainsFunc(strings.Split(err.Error(), "\n"), func(line string) bool {
			return strings.Contains(line, "error: ") && strings.Contains(line, "reduction server ") && strings.Contains(line, "job key")
		}):
			t.Errorf("with %s the error is not about the key: %v", test.name, err)
		}
	}
}
