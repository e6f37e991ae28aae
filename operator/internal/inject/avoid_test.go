package inject

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

func TestInjectAvoidUnhealthyNodes(t *testing.T) {
	healthy := corev1.NodeSelectorRequirement{Key: evenkeel.HealthKey, Operator: corev1.NodeSelectorOpNotIn, Values: []string{evenkeel.UnhealthyValue}}
	zone := corev1.NodeSelectorRequirement{Key: "zone", Operator: corev1.NodeSelectorOpIn, Values: []string{"a"}}
	own := corev1.NodeSelectorRequirement{Key: evenkeel.HealthKey, Operator: corev1.NodeSelectorOpExists}
	expressions := func(all ...corev1.NodeSelectorRequirement) corev1.NodeSelectorTerm {
		return corev1.NodeSelectorTerm{MatchExpressions: all}
	}
	for name, test := range map[string]struct{ has, want []corev1.NodeSelectorTerm }{
		"nothing":            {nil, []corev1.NodeSelectorTerm{expressions(healthy)}},
		"alternatives":       {[]corev1.NodeSelectorTerm{expressions(zone), {}}, []corev1.NodeSelectorTerm{expressions(zone, healthy), {}}},
		"no node":            {[]corev1.NodeSelectorTerm{{}}, []corev1.NodeSelectorTerm{{}}},
		"the user's own key": {[]corev1.NodeSelectorTerm{expressions(own)}, []corev1.NodeSelectorTerm{expressions(own)}},
	} {
		t.Run(name, func(t *testing.T) {
			p := pod(corev1.Container{Name: "main"})
			if test.has != nil {
				p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: test.has}}}
			}
			for range 2 { // twice changes nothing
				AvoidUnhealthyNodes(p)
				if diff := cmp.Diff(test.want, p.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms); diff != "" {
					t.Error(diff)
				}
			}
			if preferred := p.Spec.Affinity.NodeAffinity.PreferredDuringSchedulingIgnoredDuringExecution; len(preferred) != 1 || preferred[0].Preference.MatchExpressions[0].Values[0] != evenkeel.HealthyValue {
				t.Errorf("proven nodes are not preferred: %+v", preferred)
			}
		})
	}
	placed := pod(corev1.Container{Name: "main"})
	placed.Spec.NodeName = "gpu-1"
	if AvoidUnhealthyNodes(placed); placed.Spec.Affinity != nil {
		t.Error("a pod that was placed already is none of our business")
	}
}

func TestAvoidedNodes(t *testing.T) {
	node := func(name string, labels map[string]string) corev1.Node {
		n := corev1.Node{}
		n.Name, n.Labels = name, labels
		return n
	}
	bad := []corev1.Node{
		node("a", map[string]string{evenkeel.HealthKey: evenkeel.UnhealthyValue, "zone": "a"}), node("b", map[string]string{evenkeel.HealthKey: evenkeel.UnhealthyValue, "zone": "b"}),
	}
	require := func(p *corev1.Pod, r corev1.NodeSelectorRequirement) {
		p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
			NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{r}}},
		}}}
	}
	for name, test := range map[string]struct {
		change func(*corev1.Pod)
		want   []string
	}{
		"anywhere":      {func(*corev1.Pod) {}, []string{"a", "b"}},
		"node selector": {func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"zone": "a"} }, []string{"a"}},
		"affinity": {func(p *corev1.Pod) {
			require(p, corev1.NodeSelectorRequirement{Key: "zone", Operator: corev1.NodeSelectorOpNotIn, Values: []string{"a"}})
		}, []string{"b"}},
		"other nodes": {func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"zone": "c"} }, nil},
		"the user's own": {func(p *corev1.Pod) {
			require(p, corev1.NodeSelectorRequirement{Key: evenkeel.HealthKey, Operator: corev1.NodeSelectorOpExists})
		}, nil},
	} {
		p := pod(corev1.Container{Name: "main"})
		test.change(p)
		AvoidUnhealthyNodes(p)
		if diff := cmp.Diff(test.want, AvoidedNodes(p, bad)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
	if kept := AvoidedNodes(pod(corev1.Container{Name: "main"}), bad); kept != nil {
		t.Errorf("without the rule it keeps off %v", kept)
	}
}
