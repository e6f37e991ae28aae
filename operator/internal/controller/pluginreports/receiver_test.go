package pluginreports

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// podsByUID is an index of pods, as the cache has it.
type podsByUID map[string]metav1.PartialObjectMetadata

func (podsByUID) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return errors.New("not asked")
}

func (p podsByUID) List(_ context.Context, list client.ObjectList, options ...client.ListOption) error {
	var all client.ListOptions
	all.ApplyOptions(options)
	uid, _ := all.FieldSelector.RequiresExactMatch(uidIndex)
	if pod, ok := p[uid]; ok {
		list.(*metav1.PartialObjectMetadataList).Items = []metav1.PartialObjectMetadata{pod}
	}
	return nil
}

// TestPluginReportsFlood sends more than can be written: the queue stays bounded, and processes repeat what was dropped.
func TestPluginReportsFlood(t *testing.T) {
	const pods = maxWaiting + 100
	cluster := podsByUID{}
	for i := range pods {
		uid := fmt.Sprint("uid-", i)
		cluster[uid] = metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
			Namespace: "n", Name: fmt.Sprint("p", i), UID: types.UID(uid), Annotations: map[string]string{evenkeel.PluginStatusKey: evenkeel.PluginNotReported},
		}}
	}
	now := clocktesting.NewFakePassiveClock(time.Now())
	r := &Receiver{Clock: now}
	r.prepare(cluster, nil)
	from := netip.MustParseAddrPort("10.0.0.1:5")
	send := func(i int) bool {
		return r.receive(t.Context(), fmt.Appendf(nil, "evenkeel-report 1\nuid-%d\nLoaded\nx\n", i), from)
	}
	for range 3 {
		for i := range 10 {
			send(i) // as eight processes of a pod do
		}
	}
	if len(r.queue) != 10 {
		t.Errorf("%d reports wait, want one for each of 10 pods", len(r.queue))
	}
	for i := range pods {
		send(i)
	}
	if len(r.queue) != maxWaiting || len(r.waiting) != maxWaiting {
		t.Errorf("%d wait, and %d are known to", len(r.queue), len(r.waiting))
	}
}
