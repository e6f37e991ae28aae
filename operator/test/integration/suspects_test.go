package integration

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// suspect sends what the rank in the pod says about a host; none: it is over. It is sent until the condition holds, as the plugin does
// while the suspicion stands.
func suspect(t *testing.T, what, uid, text, suspects string, holds func(context.Context) (bool, error)) {
	t.Helper()
	conn, err := net.Dial("udp", install.reports)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	eventually(t, what, func(ctx context.Context) (bool, error) {
		if _, err := fmt.Fprintf(conn, "evenkeel-verdict 1\n%s\n{\"ranks\":8,\"window_s\":8,\"outcome\":\"suspect\",\"text\":%q,\"suspects\":[%s]}\n", uid, text, suspects); err != nil {
			return false, err
		}
		return holds(ctx)
	})
}

func TestPluginReportsOfSuspects(t *testing.T) {
	waitProfile(t, "default", func(p *evenkeel.NetworkProfile) bool { return ready(p) != nil })
	ns := newNamespace(t, nil)
	here, elsewhere := runningPod(t, labelledPod(ns), "127.0.0.1"), runningPod(t, labelledPod(ns), "192.0.2.7")
	said := func(ctx context.Context, pod *corev1.Pod) (string, error) {
		err := admin.Get(ctx, client.ObjectKeyFromObject(pod), pod)
		return pod.Annotations[evenkeel.SuspectsKey], err
	}
	const link = `{"class":"link","host":"n3","device":"eth0","confidence":0.9,"for_s":1}`
	// Of the other pod it is sent as often, and counts nothing.
	suspect(t, "the pod says whom its job waits for", string(here.UID), "7 of 8 ranks wait", link, func(ctx context.Context) (bool, error) {
		value, err := said(ctx, here)
		return strings.Contains(value, `"host":"n3"`) && strings.Contains(value, "7 of 8 ranks wait"), err
	})
	short := 0
	suspect(t, "some reports are sent from another address", string(elsewhere.UID), "7 of 8 ranks wait", link, func(context.Context) (bool, error) {
		short++
		return short > 5, nil
	})
	suspect(t, "it is over", string(here.UID), "", "", func(ctx context.Context) (bool, error) {
		value, err := said(ctx, here)
		return value == "", err
	})
	if value, err := said(t.Context(), elsewhere); value != "" || err != nil {
		t.Errorf("a forged report: %q %v", value, err)
	}
	if here.Annotations[evenkeel.PluginStatusKey] != evenkeel.PluginNotReported {
		t.Errorf("its status is %q", here.Annotations[evenkeel.PluginStatusKey])
	}
}

// podOn is a running pod of the job on a node.
func podOn(t *testing.T, job *unstructured.Unstructured, template []string, node, address string) *corev1.Pod {
	t.Helper()
	pod := podOf(t, job, template)
	pod.Spec.NodeName = node
	return runningPod(t, pod, address)
}

// eventsAbout are the messages of Evenkeel's Events about an object, which begin with their reason.
func eventsAbout(ctx context.Context, namespace, name string) ([]string, error) {
	var list corev1.EventList
	err := admin.List(ctx, &list, client.InNamespace(namespace))
	var all []string
	for _, e := range list.Items {
		if e.InvolvedObject.Name == name && e.Source.Component == "evenkeel" {
			all = append(all, e.Reason+" "+e.Message)
		}
	}
	return all, err
}

// What a job says about a node is told on both, and about a node only if the job has a pod there.
func TestSuspectsAreTold(t *testing.T) {
	waitProfile(t, "default", func(p *evenkeel.NetworkProfile) bool { return ready(p) != nil })
	for _, node := range []string{"suspect-1", "suspect-2", "suspect-3", "suspect-9"} {
		newNode(t, node, "v1.36.0", "containerd://2.2.0", nil)
	}
	ns := newNamespace(t, nil)
	job, templates := newJob("PyTorchJob", ns, "default")
	createJob(t, job)
	other, _ := newJob("PyTorchJob", ns, "default")
	other.SetName(job.GetName() + "-other")
	createJob(t, other)
	collector := podOn(t, job, templates[0], "suspect-1", "127.0.0.1")
	worker := podOn(t, job, templates[1], "suspect-2", "192.0.2.2")
	podOn(t, job, templates[1], "suspect-3", "192.0.2.3")
	unrelated := podOn(t, other, templates[1], "suspect-9", "192.0.2.9")

	counted := func() string {
		t.Helper()
		served, err := install.controller.scrape()
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(served["evenkeel_suspects_total"], "\n")
	}
	before := counted()
	told := func(text string) func(context.Context) (bool, error) {
		return func(ctx context.Context) (bool, error) {
			all, err := eventsAbout(ctx, ns, job.GetName())
			return slices.Contains(all, "EvenkeelJobWaits "+text), err
		}
	}
	onNode := func(node string) string {
		t.Helper()
		all, err := eventsAbout(t.Context(), metav1.NamespaceDefault, node)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(all, "\n")
	}
	// By the pod's UID, which the process knows; the host's name is what its user says.
	suspect(t, "the job has an Event", string(collector.UID), "first", fmt.Sprintf(`{"class":"link","host":"rack-2","pod":%q,"device":"eth0","confidence":0.9}`, worker.UID), told("first"))
	if got, want := onNode("suspect-2"), "EvenkeelNodeSuspected PyTorchJob "+ns+"/"+job.GetName()+": first"; got != want {
		t.Errorf("node suspect-2: %q, want %q", got, want)
	}
	if after := counted(); after == before || !strings.Contains(after, `{class="link"}`) {
		t.Errorf("the metric is still %s", after)
	}
	// By the node's name, of processes without a UID: late, and so no fault of the network.
	suspect(t, "the job has another Event", string(collector.UID), "second", `{"class":"late","host":"suspect-3","rank":2}`, told("second"))
	if got := onNode("suspect-3"); !strings.HasPrefix(got, "EvenkeelProcessLate") || !strings.HasSuffix(got, ": second") {
		t.Errorf("node suspect-3: %q", got)
	}
	// Of a node without a pod of the job, nothing is believed.
	suspect(t, "the job has a third Event", string(collector.UID), "third",
		fmt.Sprintf(`{"class":"link","host":"suspect-9","pod":%q},{"class":"link","host":"suspect-9"}`, unrelated.UID), told("third"))
	if got := onNode("suspect-9"); got != "" {
		t.Errorf("a node without a pod of the job is accused: %q", got)
	}
	if all, err := eventsAbout(t.Context(), ns, job.GetName()); err != nil || len(all) != 3 {
		t.Errorf("%q, %v: want one Event for each change", all, err)
	}
}
