package jobgate

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// A Gang is the gated pods of one job, which start together.
type Gang struct {
	// Job is the object that all of them belong to, directly or through others. Its UID may be empty.
	Job corev1.ObjectReference
	// Pods are ordered by name.
	Pods []*corev1.Pod
}

// Gangs groups gated pods by their job, ordered by its key. Pods that are being deleted belong to none.
func Gangs(pods []*corev1.Pod) []Gang {
	byKey := map[string]*Gang{}
	for _, pod := range pods {
		if pod.DeletionTimestamp != nil {
			continue
		}
		gang := Gang{Job: workload.GangOf(pod)}
		if known := byKey[gang.Key()]; known != nil {
			known.Pods = append(known.Pods, pod)
			continue
		}
		gang.Pods = []*corev1.Pod{pod}
		byKey[gang.Key()] = &gang
	}
	gangs := make([]Gang, 0, len(byKey))
	for _, key := range slices.Sorted(maps.Keys(byKey)) {
		slices.SortFunc(byKey[key].Pods, func(a, b *corev1.Pod) int { return cmp.Compare(a.Name, b.Name) })
		gangs = append(gangs, *byKey[key])
	}
	return gangs
}

// Key is unique among gangs.
func (g Gang) Key() string {
	return fmt.Sprintf("pods of %s %s/%s %s", g.Job.GroupVersionKind().GroupKind(), g.Job.Namespace, g.Job.Name, g.Job.UID)
}

// Alone reports whether its one pod belongs to no other object.
func (g Gang) Alone() bool { return g.Job.APIVersion == "v1" && g.Job.Kind == "Pod" }
