package networkcheck

import (
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/preflight/report"
)

// reportCache keeps the reports of running checks, which may have thousands of runs. Its zero value is empty.
type reportCache struct {
	mu   sync.Mutex
	kept map[types.NamespacedName]*keptReport
}

type keptReport struct {
	uid    types.UID
	report *report.Report
	// unwritable is set if the report can no longer be written. What it has in memory is all that there is.
	unwritable bool
}

func (c *reportCache) find(check *evenkeel.NetworkCheck) *keptReport {
	if k := c.kept[client.ObjectKeyFromObject(check)]; k != nil && k.uid == check.UID {
		return k
	}
	return nil
}

// get returns the check's report; nil if it is not kept.
func (c *reportCache) get(check *evenkeel.NetworkCheck) *report.Report {
	c.mu.Lock()
	defer c.mu.Unlock()
	if k := c.find(check); k != nil {
		return k.report
	}
	return nil
}

func (c *reportCache) put(check *evenkeel.NetworkCheck, r *report.Report) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.kept == nil {
		c.kept = map[types.NamespacedName]*keptReport{}
	}
	c.kept[client.ObjectKeyFromObject(check)] = &keptReport{uid: check.UID, report: r}
}

func (c *reportCache) unwritable(check *evenkeel.NetworkCheck) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	k := c.find(check)
	return k != nil && k.unwritable
}

func (c *reportCache) setUnwritable(check *evenkeel.NetworkCheck) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if k := c.find(check); k != nil {
		k.unwritable = true
	}
}

// drop forgets the check's report.
func (c *reportCache) drop(check *evenkeel.NetworkCheck) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.kept, client.ObjectKeyFromObject(check))
}
