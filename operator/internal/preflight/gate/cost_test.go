package gate

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// countingUse counts how often somebody looks at the use of a node.
type countingUse struct{ looks int }

func (u *countingUse) User(string) string { u.looks++; return "" }

func (u *countingUse) Used(string) map[corev1.ResourceName]int64 { u.looks++; return nil }

// ownSpecs are as many pods of one template, each with a spec of its own, as the API server has them.
func ownSpecs(count int, gpus string) []*corev1.PodSpec {
	pods := make([]*corev1.PodSpec, count)
	for i := range pods {
		pods[i] = gpuPods(1, gpus)[0].DeepCopy()
		pods[i].Hostname = fmt.Sprintf("worker-%d", i)
	}
	return pods
}

// However many jobs and pods wait, a node is looked at a few times a pass.
func TestGateCostOfPassIsLinear(t *testing.T) {
	const nodes = 200
	for name, jobs := range map[string][]Job{
		"many jobs of one pod": slices.Collect(func(yield func(Job) bool) {
			for _, spec := range ownSpecs(300, "1") {
				if !yield(Job{Profile: "default", Since: noon, Pods: []*corev1.PodSpec{spec}}) {
					return
				}
			}
		}),
		"one job of many pods": {{Profile: "default", Since: noon, Pods: ownSpecs(300, "1")}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene(nil)
			for i := range nodes {
				s.gpuNodes("healthy", fmt.Sprintf("n%03d", i))
			}
			use := &countingUse{}
			w := NewSnapshot(s.nodes, s.states, s.policies, s.checks, use, s.now)
			for _, job := range jobs {
				if d := w.Decide(job); d.Action != Open {
					t.Fatalf("%+v", d)
				}
			}
			if use.looks > 4*nodes {
				t.Errorf("%d nodes were looked at %d times", nodes, use.looks)
			}
		})
	}
}

// Jobs for which no node can be proven do not each ask every node why.
func TestGateCostOfStuckJobs(t *testing.T) {
	const nodes, jobs = 200, 300
	s := newScene(waitRegardless)
	var names []string
	for i := range nodes {
		names = append(names, fmt.Sprintf("n%03d", i))
	}
	s.gpuNodes("new", names...)
	s.check("refused", noon, names...)
	specs := ownSpecs(jobs, "8")
	w := s.snapshot()
	pass := func() {
		for _, spec := range specs {
			if d := w.Decide(Job{Profile: "default", Since: noon, Pods: []*corev1.PodSpec{spec}}); d.Action != Wait || !strings.Contains(d.Message, "could not be run") {
				t.Fatalf("%+v", d)
			}
		}
	}
	if allocations := testing.AllocsPerRun(1, pass); allocations > jobs*nodes {
		t.Errorf("%.0f allocations for %d jobs beside %d nodes", allocations, jobs, nodes)
	}
}

// Pods of one template count as of one kind, whatever else they differ in.
func TestGateCostOfPodsOfOneTemplate(t *testing.T) {
	g := newGang(Job{Pods: append(ownSpecs(300, "1"), ownSpecs(20, "8")...)})
	if g.count != 320 || len(g.kinds) != 2 {
		t.Errorf("%d pods, %d kinds of requests", g.count, len(g.kinds))
	}
	// A template is kept once, whatever number its user wrote.
	var job Job
	for _, spec := range append(ownSpecs(2, "1"), &corev1.PodSpec{}) {
		job.AddTemplate(spec, 1000)
	}
	job.AddTemplate(ownSpecs(1, "8")[0], 1<<40)
	if g := newGang(job); g.count != 2000+maxPods || len(job.Pods) != 4 {
		t.Errorf("%d pods, of which %d specs are kept", g.count, len(job.Pods))
	}
}

func BenchmarkGatePass(b *testing.B) {
	const nodes, pods = 5000, 5000
	for name, group := range map[string]int{"jobs of one pod": 1, "one job": pods} {
		for _, state := range []string{"healthy", "new", "new and refused"} {
			b.Run(name+", "+state, func(b *testing.B) {
				s := newScene(nil)
				var names []string
				for i := range nodes {
					names = append(names, fmt.Sprintf("n%04d", i))
				}
				kind, refused := strings.CutSuffix(state, " and refused")
				s.gpuNodes(kind, names...)
				if refused {
					s.check("refused", noon, names...)
				}
				specs := ownSpecs(pods, "8")
				for b.Loop() {
					w := s.snapshot()
					for chunk := range slices.Chunk(specs, group) {
						w.Decide(Job{Profile: "default", Since: noon, Pods: chunk})
					}
				}
			})
		}
	}
}
