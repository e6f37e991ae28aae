package inject

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// preferenceWeight is the largest that the API has.
const preferenceWeight = 100

// AvoidUnhealthyNodes adds a node affinity that excludes nodes whose network failed a check, and prefers those that passed, by
// the label that checked nodes carry. Without checks no node has the label, and the affinity excludes and prefers none.
func AvoidUnhealthyNodes(pod *corev1.Pod) {
	if pod.Spec.NodeName != "" {
		return // its creator chose the node
	}
	if pod.Spec.Affinity == nil {
		pod.Spec.Affinity = &corev1.Affinity{}
	}
	if pod.Spec.Affinity.NodeAffinity == nil {
		pod.Spec.Affinity.NodeAffinity = &corev1.NodeAffinity{}
	}
	healthy := corev1.NodeSelectorRequirement{Key: evenkeel.HealthKey, Operator: corev1.NodeSelectorOpNotIn, Values: []string{evenkeel.UnhealthyValue}}
	preferProvenNodes(pod.Spec.Affinity.NodeAffinity)
	required := &pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	if *required == nil {
		*required = &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{healthy}}}}
		return
	}
	// Terms are alternatives, so each gets it. One without expressions selects no node, which has to stay so.
	for i := range (*required).NodeSelectorTerms {
		term := &(*required).NodeSelectorTerms[i]
		has := slices.ContainsFunc(term.MatchExpressions, func(r corev1.NodeSelectorRequirement) bool { return r.Key == evenkeel.HealthKey })
		empty := len(term.MatchExpressions) == 0 && len(term.MatchFields) == 0
		if !has && !empty {
			term.MatchExpressions = append(term.MatchExpressions, healthy)
		}
	}
}

// preferProvenNodes adds the preference. A job's gate opens when there are enough proven nodes for it, beside others without a
// verdict.
func preferProvenNodes(affinity *corev1.NodeAffinity) {
	preferred := &affinity.PreferredDuringSchedulingIgnoredDuringExecution
	for _, term := range *preferred {
		if slices.ContainsFunc(term.Preference.MatchExpressions, func(r corev1.NodeSelectorRequirement) bool { return r.Key == evenkeel.HealthKey }) {
			return
		}
	}
	*preferred = append(*preferred, corev1.PreferredSchedulingTerm{Weight: preferenceWeight, Preference: corev1.NodeSelectorTerm{
		MatchExpressions: []corev1.NodeSelectorRequirement{{Key: evenkeel.HealthKey, Operator: corev1.NodeSelectorOpIn, Values: []string{evenkeel.HealthyValue}}},
	}})
}

// AvoidedNodes returns those of the nodes, all of them unhealthy, that the pod would fit on without the affinity that
// AvoidUnhealthyNodes added. Only its node selector and affinity count.
func AvoidedNodes(pod *corev1.Pod, nodes []corev1.Node) []string {
	required := nodeaffinity.GetRequiredNodeAffinity(pod)
	var names []string
	for i := range nodes {
		cleared := nodes[i].DeepCopy()
		delete(cleared.Labels, evenkeel.HealthKey)
		now, err := required.Match(&nodes[i])
		later, err2 := required.Match(cleared)
		if err == nil && err2 == nil && !now && later { // an invalid affinity selects no node
			names = append(names, nodes[i].Name)
		}
	}
	return names
}
