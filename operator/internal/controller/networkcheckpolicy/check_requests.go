package networkcheckpolicy

import (
	"slices"
	"sync"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// A CheckRequests is which nodes others need verdicts on. It is kept in memory: who needs them asks again after a restart.
type CheckRequests struct {
	mu        sync.Mutex
	requested map[string]map[string][]string // nodes, by who asks and by policy
	changed   chan event.GenericEvent
}

// NewCheckRequests is an empty one.
func NewCheckRequests() *CheckRequests {
	return &CheckRequests{requested: map[string]map[string][]string{}, changed: make(chan event.GenericEvent, 1)}
}

// Set says what one asks for now, by policy, in place of what it asked for before. Nothing takes it back.
func (d *CheckRequests) Set(who string, nodes map[string][]string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	before := d.requested[who]
	if len(nodes) == 0 {
		delete(d.requested, who)
		return
	}
	d.requested[who] = nodes
	for policy, list := range nodes {
		if !slices.Equal(before[policy], list) {
			select {
			case d.changed <- event.GenericEvent{Object: client.Object(&evenkeel.NetworkCheckPolicy{})}:
			default: // the one that lies there is looked at after this
			}
			return
		}
	}
}

// forPolicy are the nodes of a policy that somebody asks for.
func (d *CheckRequests) forPolicy(policy string) map[string]bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	nodes := map[string]bool{}
	for _, asked := range d.requested {
		for _, name := range asked[policy] {
			nodes[name] = true
		}
	}
	return nodes
}
