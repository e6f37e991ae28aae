package preflight

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/nodeuse"
)

// giveGPUs makes nodes offer GPUs.
func giveGPUs(t *testing.T, count int, nodes ...string) {
	t.Helper()
	for _, name := range nodes {
		status := fmt.Appendf(nil, `{"status": {"capacity": {"nvidia.com/gpu": "%[1]d"}, "allocatable": {"nvidia.com/gpu": "%[1]d"}}}`, count)
		if err := admin.Status().Patch(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, client.RawPatch(types.StrategicMergePatchType, status)); err != nil {
			t.Fatal(err)
		}
	}
}

// useNode puts somebody's pod with GPUs on a node. The returned function ends it, as does the test's end.
func useNode(t *testing.T, node string, gpus int) (leave func()) {
	t.Helper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: users, Name: "train-on-" + node}}
	pod.Spec.NodeName = node
	pod.Spec.Containers = []corev1.Container{{Name: "c", Image: "c", Resources: corev1.ResourceRequirements{
		Limits: corev1.ResourceList{"nvidia.com/gpu": *resource.NewQuantity(int64(gpus), resource.DecimalSI)},
	}}}
	if err := admin.Create(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	leave = func() {
		if err := admin.Delete(context.Background(), pod, client.GracePeriodSeconds(0)); client.IgnoreNotFound(err) != nil {
			t.Error(err)
		}
	}
	t.Cleanup(leave)
	return leave
}

func TestCheckLeavesNodesInUseAlone(t *testing.T) {
	f := newFleet(t, links(nil))
	nodes := newNodes(t, "inuse", 5)
	giveGPUs(t, 8, nodes...)
	useNode(t, "inuse-1", 2)
	start(t, f, &clock{}, &clock{})
	c := ended(t, newCheck(t, "inuse", nil))
	if got := found(c, "Inconclusive"); !slices.Equal(got, []string{"inuse-1"}) || *c.Status.Summary.Passed != 4 || len(found(c, "Fail")) > 0 {
		t.Fatalf("%+v", c.Status)
	}
	if f := c.Status.Findings[0]; f.Reason != "NodeInUse" || !strings.Contains(f.Message, "default/train-on-inuse-1") {
		t.Errorf("%+v", f)
	}
	for _, r := range f.all() {
		if slices.Contains(r.nodes, "inuse-1") {
			t.Errorf("run %s was on the node", r.name)
		}
	}
}

func TestCheckTestsBusyNodesOnRequest(t *testing.T) {
	f := newFleet(t, links(nil))
	nodes := newNodes(t, "busy", 2)
	giveGPUs(t, 8, nodes...)
	useNode(t, "busy-1", 8)
	start(t, f, &clock{}, &clock{})
	c := ended(t, newCheck(t, "busy", func(s *evenkeel.NetworkCheckSpec) { s.BusyNodes = evenkeel.BusyNodesTest }))
	if c.Status.Verdict != evenkeel.VerdictPass {
		t.Errorf("%+v", c.Status)
	}
}

// A run is slow since somebody else's job began on one of its nodes.
func TestCheckRunBesideAnotherPodIsInconclusive(t *testing.T) {
	for _, stays := range []bool{true, false} {
		pool := fmt.Sprintf("beside-%t", stays)
		t.Run(pool, func(t *testing.T) {
			taken, arrived := pool+"-2", atomic.Bool{}
			var waiting atomic.Int32
			f := newFleet(t, func(nodes []string) ending {
				e := links(nil)(nodes)
				if len(nodes) > 1 && slices.Contains(nodes, taken) {
					e = ending{failure: "rank 1 is gone", running: !arrived.Load()}
					waiting.Add(1)
				}
				return e
			})
			nodes := newNodes(t, pool, 6)
			giveGPUs(t, 8, nodes...)
			use := nodeuse.New(namespace, &clock{})
			controllers{logs: f, clock: &clock{}, calendar: &clock{}, use: use}.start(t)
			c := newCheck(t, pool, nil)
			eventually(t, "the node is being tested", func(context.Context) (bool, error) { return waiting.Load() > 0, nil })
			createdBefore(t, c.Name)
			leave := useNode(t, taken, 8)
			eventually(t, "the pod is seen", func(context.Context) (bool, error) { return use.User(taken) != "", nil })
			if !stays {
				leave()
				eventually(t, "its end is seen", func(context.Context) (bool, error) { return use.User(taken) == "", nil })
			}
			arrived.Store(true)
			c = ended(t, c)
			if got := found(c, "Inconclusive"); !slices.Equal(got, []string{taken}) || *c.Status.Summary.Passed != 5 || len(found(c, "Fail")) > 0 || c.Status.Findings[0].Reason != "NodeInUse" {
				t.Errorf("%+v", c.Status)
			}
		})
	}
}

// createdBefore waits until the clock's second is another one than that in which the check's Jobs were made.
func createdBefore(t *testing.T, check string) {
	t.Helper()
	eventually(t, "the second of the Jobs' creation is over", func(ctx context.Context) (bool, error) {
		var jobs batchv1.JobList
		err := admin.List(ctx, &jobs, client.InNamespace(namespace), client.MatchingLabels{evenkeel.CheckKey: check})
		now := metav1.Now().Rfc3339Copy()
		return !slices.ContainsFunc(jobs.Items, func(j batchv1.Job) bool { return !j.CreationTimestamp.Before(&now) }), err
	})
}

// A pod with priority took the place of a rank; the other one's log blames the network.
func TestCheckPreemptedRunIsInconclusive(t *testing.T) {
	var gone sync.Map // the runs that lost a pod, by their nodes
	f := newFleet(t, func(nodes []string) ending {
		e := links(nil)(nodes)
		if len(nodes) > 1 && slices.Contains(nodes, "preempted-2") {
			_, lost := gone.Load(strings.Join(nodes, " "))
			e = ending{failure: "rank 1 is gone: its process or its machine has ended", running: !lost}
		}
		return e
	})
	start(t, f, &clock{}, &clock{})
	newNodes(t, "preempted", 6)
	c := newCheck(t, "preempted", func(s *evenkeel.NetworkCheckSpec) { s.Stages = []evenkeel.Stage{"Pairs"} })
	deleted := map[string]bool{}
	eventually(t, "the check has ended", func(ctx context.Context) (bool, error) {
		var pods corev1.PodList
		if err := admin.List(ctx, &pods, client.InNamespace(namespace), client.MatchingLabels{evenkeel.CheckKey: c.Name}); err != nil {
			return false, err
		}
		for i := range pods.Items {
			p := &pods.Items[i]
			if p.Spec.NodeName == "preempted-2" && !deleted[p.Name] {
				deleted[p.Name] = true
				f.forget(p)
				if err := admin.Delete(ctx, p, client.GracePeriodSeconds(0)); client.IgnoreNotFound(err) != nil {
					return false, err
				}
				for _, r := range f.all() {
					if r.name == p.Labels[evenkeel.RunKey] {
						gone.Store(strings.Join(r.nodes, " "), true)
					}
				}
			}
		}
		err := admin.Get(ctx, client.ObjectKeyFromObject(c), c)
		return c.Status.Verdict != "", err
	})
	if got := found(c, "Inconclusive"); len(found(c, "Fail")) > 0 || !slices.Contains(got, "preempted-2") {
		t.Errorf("%+v", c.Status)
	}
}

func TestCheckRequestsWholeNodes(t *testing.T) {
	f := newFleet(t, links(nil))
	nodes := newNodes(t, "whole", 2)
	giveGPUs(t, 8, nodes...)
	start(t, f, &clock{}, &clock{})
	f.hold.Store(true)
	c := newCheck(t, "whole", func(s *evenkeel.NetworkCheckSpec) { s.Stages = []evenkeel.Stage{"Pairs"} })
	var pods corev1.PodList
	eventually(t, "its pods are there", func(ctx context.Context) (bool, error) {
		err := admin.List(ctx, &pods, client.InNamespace(namespace), client.MatchingLabels{evenkeel.CheckKey: c.Name})
		return len(pods.Items) == 2, err
	})
	for _, p := range pods.Items {
		gpus := p.Spec.Containers[0].Resources.Limits["nvidia.com/gpu"]
		if gpus.Value() != 8 || p.Spec.PriorityClassName != checkPriority || p.Spec.Priority == nil || *p.Spec.Priority >= 0 || *p.Spec.PreemptionPolicy != corev1.PreemptNever {
			t.Errorf("%s requests %s GPUs, priority %v %q", p.Name, gpus.String(), p.Spec.Priority, p.Spec.PriorityClassName)
		}
	}
	f.hold.Store(false)
	// Its own pods are not somebody else's.
	if c = ended(t, c); c.Status.Verdict != evenkeel.VerdictPass {
		t.Errorf("%+v", c.Status)
	}
}
