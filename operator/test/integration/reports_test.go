package integration

import (
	"context"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// report sends datagrams as the plugin of the pod does, until one is answered or the context is done.
func report(ctx context.Context, to, uid, outcome, text string) error {
	conn, err := net.Dial("udp", to)
	if err != nil {
		return err
	}
	defer conn.Close()
	for ctx.Err() == nil {
		if err := send(conn, uid, outcome, text); err != nil {
			return err
		}
		if answers(conn, uid, 500*time.Millisecond) {
			return nil
		}
	}
	return ctx.Err()
}

func send(conn net.Conn, uid, outcome, text string) error {
	_, err := fmt.Fprintf(conn, "evenkeel-report 1\n%s\n%s\n%s\n", uid, outcome, text)
	return err
}

// answers reports whether the receiver has taken the report of the pod, or does in time.
func answers(conn net.Conn, uid string, within time.Duration) bool {
	buffer := make([]byte, 64)
	if err := conn.SetReadDeadline(time.Now().Add(within)); err != nil {
		return false
	}
	n, err := conn.Read(buffer)
	return err == nil && string(buffer[:n]) == uid
}

// runningPod is a pod of the job that runs at an address.
func runningPod(t *testing.T, pod *corev1.Pod, address string) *corev1.Pod {
	t.Helper()
	createPod(t, pod)
	remove(t, pod)
	before := pod.DeepCopy()
	pod.Status.Phase, pod.Status.PodIP, pod.Status.PodIPs = corev1.PodRunning, address, []corev1.PodIP{{IP: address}}
	if err := admin.Status().Patch(t.Context(), pod, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	return pod
}

func TestPluginReports(t *testing.T) {
	waitProfile(t, "default", func(p *evenkeel.NetworkProfile) bool { return ready(p) != nil })
	ns := newNamespace(t, nil)
	job, templates := newJob("PyTorchJob", ns, "default")
	createJob(t, job)
	var given string
	here := func() *corev1.Pod {
		eventually(t, "the webhook knows where the plugin reports to", func(ctx context.Context) (bool, error) {
			probe := podOf(t, job, templates[0])
			err := admin.Create(ctx, probe, client.DryRunAll)
			given = variable(&probe.Spec.Containers[0], "EVENKEEL_REPORT")
			return given != "", err
		})
		return runningPod(t, podOf(t, job, templates[0]), "127.0.0.1")
	}
	good, bad, last, elsewhere := here(), here(), here(), runningPod(t, podOf(t, job, templates[1]), "192.0.2.7")
	if given != install.reports || good.Annotations[evenkeel.PluginStatusKey] != evenkeel.PluginNotReported {
		t.Fatalf("EVENKEEL_REPORT=%q, annotations %v", given, good.Annotations)
	}
	limited, cancel := context.WithTimeout(t.Context(), waitTimeout)
	defer cancel()
	if err := report(limited, given, string(good.UID), "Loaded", "version 0.1.0, devices: eth0 25000 Mb/s"); err != nil {
		t.Fatal(err)
	}
	if err := report(limited, given, string(bad.UID), "Failed", "EVENKEEL_FLOWS=many is not valid"); err != nil {
		t.Fatal(err)
	}
	status := func(pod *corev1.Pod) string {
		if err := admin.Get(t.Context(), client.ObjectKeyFromObject(pod), pod); err != nil {
			t.Fatal(err)
		}
		return pod.Annotations[evenkeel.PluginStatusKey]
	}
	if got := status(good); !strings.HasPrefix(got, "Loaded 20") || !strings.HasSuffix(got, " version 0.1.0, devices: eth0 25000 Mb/s") {
		t.Errorf("the annotation is %q", got)
	}
	// What comes from another address than the pod's is not believed, and neither is what names no pod. The controller takes reports in
	// order: when the Event below is written, it has judged these long before.
	forgeries := map[string]net.Conn{}
	for _, uid := range []string{string(elsewhere.UID), "no-such-pod"} {
		conn, err := net.Dial("udp", given)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := send(conn, uid, "Loaded", "forged"); err != nil {
			t.Fatal(err)
		}
		forgeries[uid] = conn
	}
	if err := report(limited, given, string(last.UID), "Loaded", "version 0.1.0"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "an Event on the job names the pod without the plugin", func(ctx context.Context) (bool, error) {
		var events corev1.EventList
		err := admin.List(ctx, &events, client.InNamespace(ns))
		for _, e := range events.Items {
			if e.Reason == "EvenkeelPluginFailed" && e.InvolvedObject.Name == job.GetName() && strings.Contains(e.Message, bad.Name) && strings.Contains(e.Message, "EVENKEEL_FLOWS=many") {
				return true, err
			}
		}
		return false, err
	})
	for uid, conn := range forgeries {
		if answers(conn, uid, time.Millisecond) {
			t.Errorf("a report for %s was accepted", uid)
		}
	}
	if got := status(elsewhere); got != evenkeel.PluginNotReported {
		t.Errorf("a forged report: %q", got)
	}
}

// TestPluginReportsAreAllThatIsChanged acts as the controller's account.
func TestPluginReportsAreAllThatIsChanged(t *testing.T) {
	waitProfile(t, "default", func(p *evenkeel.NetworkProfile) bool { return ready(p) != nil })
	ns := newNamespace(t, nil)
	as := rest.CopyConfig(config)
	as.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:" + systemNamespace + ":evenkeel-controller"}
	account, err := client.New(as, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	pod := labelledPod(ns)
	pod.Annotations[evenkeel.PluginStatusKey] = "of another pod"
	createPod(t, pod)
	plain := createPod(t, plainPod(ns))
	merge := func(pod *corev1.Pod, text string) error {
		return account.Patch(t.Context(), pod.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(text)))
	}
	if pod.Annotations[evenkeel.PluginStatusKey] != evenkeel.PluginNotReported {
		t.Fatalf("the webhook left %q", pod.Annotations[evenkeel.PluginStatusKey])
	}
	if err := merge(pod, `{"metadata":{"annotations":{"evenkeel.dev/plugin-status":"Loaded 2026-11-23T07:00:00Z x"}}}`); err != nil {
		t.Errorf("what it is for: %v", err)
	}
	for _, value := range []string{`"{}"`, `null`} {
		if err := merge(pod, `{"metadata":{"annotations":{"evenkeel.dev/suspects":`+value+`}}}`); err != nil {
			t.Errorf("what it is for: %v", err)
		}
	}
	for name, text := range map[string]string{
		"another annotation":  `{"metadata":{"annotations":{"evenkeel.dev/plugin-status":"y","mine":"x"}}}`,
		"a label":             `{"metadata":{"annotations":{"evenkeel.dev/plugin-status":"y"},"labels":{"mine":"x"}}}`,
		"the image":           `{"metadata":{"annotations":{"evenkeel.dev/plugin-status":"y"}},"spec":{"containers":[{"name":"pytorch","image":"evil"}]}}`,
		"one beside suspects": `{"metadata":{"annotations":{"evenkeel.dev/suspects":"y","mine":"x"}}}`,
		"an owner":            `{"metadata":{"annotations":{"evenkeel.dev/plugin-status":"y"},"ownerReferences":[{"apiVersion":"v1","kind":"Pod","name":"x","uid":"x"}]}}`,
		"its removal":         `{"metadata":{"annotations":{"evenkeel.dev/plugin-status":null}}}`,
		"something else":      `{"metadata":{"labels":{"mine":"x"}}}`,
	} {
		if err := merge(pod, text); err == nil {
			t.Errorf("%s may be changed", name)
		}
	}
	for _, key := range []string{"plugin-status", "suspects"} {
		if err := merge(plain, `{"metadata":{"annotations":{"evenkeel.dev/`+key+`":"y"}}}`); err == nil {
			t.Errorf("of a pod that Evenkeel has nothing to do with, %s may be changed", key)
		}
	}
}
