package v1alpha1

import "testing"

// With its defaults, a check ends in time whatever the number of its nodes: each is tested some times, for half a minute.
func TestCheckDefaultsFollowNumberOfNodes(t *testing.T) {
	const secondsOfRun, timesTested = 30, 4
	few := int32(16)
	for _, nodes := range []int{2, 100, 1000, 5000} {
		for _, concurrent := range []*int32{nil, &few} {
			o := CheckOptions{MaxConcurrentNodes: concurrent}.WithDefaultsFor(nodes)
			waves := (nodes + int(*o.MaxConcurrentNodes) - 1) / int(*o.MaxConcurrentNodes)
			if needs := waves * secondsOfRun * timesTested; needs > int(*o.TimeoutSeconds) {
				t.Errorf("%d nodes, %d at a time, need %d s, and the timeout is %d s", nodes, *o.MaxConcurrentNodes, needs, *o.TimeoutSeconds)
			}
			if waves > 10 && concurrent == nil && nodes > 320 {
				t.Errorf("%d nodes are tested in %d waves", nodes, waves)
			}
		}
	}
}
