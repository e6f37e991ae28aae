package networkcheckpolicy

import (
	"maps"
	"slices"
	"sync"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// CheckRequests are the nodes that need a verdict, by requester. They are kept in memory only: requesters repeat their
// requests after a restart.
type CheckRequests struct {
	mu        sync.Mutex
	requested map[string]map[string][]string // nodes, by requester and policy
	changed   chan event.GenericEvent
}

// NewCheckRequests returns an empty set of requests.
func NewCheckRequests() *CheckRequests {
	return &CheckRequests{requested: map[string]map[string][]string{}, changed: make(chan event.GenericEvent, 1)}
}

// Set replaces the nodes that a requester asks for, by policy. No nodes withdraw its request.
func (d *CheckRequests) Set(requester string, nodes map[string][]string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	before := d.requested[requester]
	if len(nodes) == 0 {
		delete(d.requested, requester)
		return
	}
	d.requested[requester] = nodes
	for policy, list := range nodes {
		if !slices.Equal(before[policy], list) {
			select {
			case d.changed <- event.GenericEvent{Object: client.Object(&evenkeel.NetworkCheckPolicy{})}:
			default: // the pending event is handled after this
			}
			return
		}
	}
}

// forPolicy returns the requested nodes of a policy by requester, ordered by the requester's name.
func (d *CheckRequests) forPolicy(policy string) [][]string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var lists [][]string
	for _, requester := range slices.Sorted(maps.Keys(d.requested)) {
		if list := d.requested[requester][policy]; len(list) > 0 {
			lists = append(lists, list)
		}
	}
	return lists
}
