package preflight

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/cli"
	"evenkeel.dev/evenkeel/operator/internal/flightrecord"
)

// newKubelet makes a node whose kubelet runs commands on this machine, and has a log of each pod by its name. It serves the API server's
// requests only: commands of a pod without a log fail.
func newKubelet(t *testing.T, node string, logs map[string]string) {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("/containerLogs/{namespace}/{pod}/{container}", func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("tailLines") == "" {
			http.Error(w, "the whole log", http.StatusBadRequest)
			return
		}
		fmt.Fprint(w, logs[r.PathValue("pod")])
	})
	mux.HandleFunc("/exec/{namespace}/{pod}/{container}", func(w http.ResponseWriter, r *http.Request) {
		if err := execute(w, r); err != nil {
			t.Error(err)
		}
	})
	server := httptest.NewTLSServer(mux)
	t.Cleanup(server.Close)
	host, portText, err := net.SplitHostPort(server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	port, err := strconv.ParseInt(portText, 10, 32)
	if err != nil {
		t.Fatal(err)
	}
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}
	if err := admin.Create(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	removeAfter(t, n)
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: host}}
	n.Status.DaemonEndpoints.KubeletEndpoint.Port = int32(port)
	if err := admin.Status().Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
}

func removeAfter(t *testing.T, objects ...client.Object) {
	t.Helper()
	t.Cleanup(func() {
		for _, object := range objects {
			if err := admin.Delete(context.Background(), object, client.GracePeriodSeconds(0), client.PropagationPolicy(metav1.DeletePropagationBackground)); err != nil {
				t.Error(err)
			}
		}
	})
}

// execute runs the command of a request as the kubelet does (version 4 of the protocol of k8s.io/cri-streaming).
func execute(w http.ResponseWriter, r *http.Request) error {
	const protocol = "v4.channel.k8s.io"
	if _, err := httpstream.Handshake(r, w, []string{protocol}); err != nil {
		return fmt.Errorf("handshake: %w", err)
	}
	var mutex sync.Mutex
	streams, all := map[string]httpstream.Stream{}, make(chan struct{})
	connection := spdy.NewResponseUpgrader().UpgradeResponse(w, r, func(stream httpstream.Stream, _ <-chan struct{}) error {
		mutex.Lock()
		defer mutex.Unlock()
		if streams[stream.Headers().Get("streamType")] = stream; len(streams) == 3 {
			close(all)
		}
		return nil
	})
	if connection == nil {
		return errors.New("the request is no upgrade to SPDY")
	}
	defer connection.Close()
	select {
	case <-all:
	case <-time.After(time.Minute):
		return errors.New("the streams have not come")
	}
	command := r.URL.Query()["command"]
	cmd := exec.CommandContext(r.Context(), command[0], command[1:]...)
	cmd.Stdout, cmd.Stderr = streams["stdout"], streams["stderr"]
	status := metav1.Status{Status: metav1.StatusSuccess}
	if err := cmd.Run(); err != nil {
		status = metav1.Status{Status: metav1.StatusFailure, Message: err.Error(), Reason: "InternalError"}
	}
	return json.NewEncoder(streams["error"]).Encode(status)
}

// callRecord is the record of a rank of four in a call for a minute, or after it.
func callRecord(t *testing.T, rank int, operation string, number int64, state, failure string) string {
	t.Helper()
	now := time.Now()
	data, err := json.Marshal(flightrecord.Record{
		Version: flightrecord.Version, Rank: rank, TimeNS: now.UnixNano(),
		Groups: []flightrecord.Group{{ID: "a", Name: "default_pg", Rank: rank, Ranks: []int{0, 1, 2, 3}}},
		Calls: []flightrecord.Call{{Group: "a", Kind: "collective", Number: number, Operation: operation, State: state,
			CreatedNS: now.Add(-time.Minute).UnixNano(), Failure: failure}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// TestKubectlPluginWhyCalls: running processes are asked for what they do, by a shell in their containers, and those that have ended have
// left it in their logs.
func TestKubectlPluginWhyCalls(t *testing.T) {
	config := kubeconfig(t)
	const failure = "all_reduce: rank 1 (calls-1, process 7) is lost"
	newKubelet(t, "calls", map[string]string{
		"calls-2": "step 812\nevenkeel: wrote the flight recorder to /x: it failed\nevenkeel: flight record: " + callRecord(t, 2, "all_reduce", 813, "failed", failure) + "\nTraceback\n",
	})
	job := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "calls", Annotations: map[string]string{evenkeel.ProfileKey: "default"}}}
	suspend := true
	job.Spec.Suspend = &suspend
	job.Spec.Template.Labels = map[string]string{evenkeel.ProfileKey: "default"}
	job.Spec.Template.Annotations = map[string]string{
		evenkeel.PluginImageKey: pluginName, evenkeel.DeliveryKey: "ImageVolume", evenkeel.PluginPathKey: "/plugin", evenkeel.ConflictPolicyKey: "Keep",
	}
	job.Spec.Template.Spec = corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, Containers: []corev1.Container{{Name: "main", Image: "x"}}}
	if err := admin.Create(t.Context(), job); err != nil {
		t.Fatal(err)
	}
	removeAfter(t, job)
	running := corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}
	pod := func(rank int, state corev1.ContainerState, record string) {
		t.Helper()
		folder := t.TempDir()
		if record != "" {
			path := filepath.Join(folder, fmt.Sprintf(".evenkeel-record-%d.json", rank))
			// Whoever looks finds it newer than the question.
			later := time.Now().Add(time.Hour)
			if err := errors.Join(os.WriteFile(path, []byte(record), 0o600), os.Chtimes(path, later, later)); err != nil {
				t.Fatal(err)
			}
		}
		spec := *job.Spec.Template.Spec.DeepCopy()
		spec.NodeName, spec.Containers[0].Env = "calls", []corev1.EnvVar{{Name: "EVENKEEL_FLIGHT_RECORDER", Value: folder + "/rank_"}}
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: fmt.Sprintf("calls-%d", rank), Labels: map[string]string{evenkeel.ProfileKey: "default"},
			Annotations:     map[string]string{evenkeel.InjectedKey: "1234"},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(job, batchv1.SchemeGroupVersion.WithKind("Job"))},
		}, Spec: spec}
		if err := admin.Create(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		removeAfter(t, p)
		p.Status.Phase = corev1.PodRunning
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main", State: state}}
		if err := admin.Status().Update(t.Context(), p); err != nil {
			t.Fatal(err)
		}
	}
	pod(0, running, callRecord(t, 0, "all_reduce", 813, "started", ""))
	pod(1, running, callRecord(t, 1, "all_gather", 812, "completed", ""))
	pod(2, corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 1}}, "")
	pod(3, corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff"}}, "")

	plugin(t, config, cli.ExitPass, "why job/calls -n default",
		"Calls\n  group default_pg: rank 1 never called all_reduce #813, in which ranks 0, 2 wait for 1m0s; the last call of rank 1 was all_gather #812; rank 2 failed first: "+failure+"\n",
		"  no record of rank 3: the process has ended, or was not found\n")

	// Somebody who may read everything, and run nothing.
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "calls"}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{"", "batch", "evenkeel.dev"}, Resources: []string{"jobs", "pods", "nodes", "events", "networkcheckpolicies", "networkprofiles"}, Verbs: []string{"get", "list"}},
	}}
	binding := &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "calls"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "calls"},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: "reader"}}}
	for _, object := range []client.Object{role, binding} {
		if err := admin.Create(t.Context(), object); err != nil {
			t.Fatal(err)
		}
		removeAfter(t, object)
	}
	var out string
	eventually(t, "the reader may read", func(ctx context.Context) (bool, error) {
		var printed, errs strings.Builder
		code := cli.Run(ctx, []string{"why", "job/calls", "-n", "default", "--as", "reader", "--kubeconfig", config}, &printed, &errs)
		out = printed.String() + errs.String()
		return code == cli.ExitPass, nil
	})
	for _, words := range []string{"calls-0, calls-1: you have no right to pods/exec there", "calls-2: you have no right to pods/log there"} {
		if !strings.Contains(out, words) {
			t.Errorf("does not say %q:\n%s", words, out)
		}
	}
}
