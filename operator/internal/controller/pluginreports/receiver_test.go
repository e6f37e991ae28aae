package pluginreports

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/log"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/metrics"
)

// pods are those of the cache, by their names.
type pods map[string]*metav1.PartialObjectMetadata

func (p pods) Get(_ context.Context, key client.ObjectKey, object client.Object, _ ...client.GetOption) error {
	pod, ok := p[key.Name]
	if !ok {
		return errors.New("no such pod")
	}
	pod.DeepCopyInto(object.(*metav1.PartialObjectMetadata))
	return nil
}

func (pods) List(context.Context, client.ObjectList, ...client.ListOption) error {
	return errors.New("not asked")
}

func silentPod(name, uid string) *metav1.PartialObjectMetadata {
	return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		Namespace: "n", Name: name, UID: types.UID(uid), Annotations: map[string]string{evenkeel.PluginStatusKey: evenkeel.PluginNotReported},
	}}
}

// TestPluginReportsFlood sends more than can be written: the queue stays bounded, and processes repeat what was dropped.
func TestPluginReportsFlood(t *testing.T) {
	const count = maxWaiting + 100
	cluster := pods{}
	now := clocktesting.NewFakePassiveClock(time.Now())
	r := &Receiver{Clock: now}
	r.prepare(cluster, nil)
	for i := range count {
		pod := silentPod(fmt.Sprint("p", i), fmt.Sprint("uid-", i))
		cluster[pod.Name] = pod
		r.names.OnAdd(pod, true)
	}
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
	for i := range count {
		send(i)
	}
	if len(r.queue) != maxWaiting || len(r.waiting) != maxWaiting {
		t.Errorf("%d wait, and %d are known to", len(r.queue), len(r.waiting))
	}
}

// A report names its pod by the UID. What is known of it follows the pods that come, change and go, under a name used again too.
func TestPluginReportsFindPodByUID(t *testing.T) {
	before, after := silentPod("worker-0", "uid-1"), silentPod("worker-0", "uid-2")
	cluster := pods{}
	r := &Receiver{Clock: clocktesting.NewFakePassiveClock(time.Now())}
	r.prepare(cluster, nil)
	taken := func(uid string) bool {
		waiting := len(r.queue)
		r.receive(t.Context(), fmt.Appendf(nil, "evenkeel-report 1\n%s\nLoaded\nx\n", uid), netip.MustParseAddrPort("10.0.0.1:5"))
		return len(r.queue) > waiting
	}
	if taken("uid-1") {
		t.Error("a pod that does not exist has reported")
	}
	cluster["worker-0"] = before
	r.names.OnAdd(before, false)
	if !taken("uid-1") || taken("uid-2") {
		t.Error("the pod cannot report, or another can")
	}
	r.names.OnDelete(cache.DeletedFinalStateUnknown{Key: "n/worker-0", Obj: before})
	cluster["worker-0"] = after
	if delete(r.waiting, subject{sender{before.UID, netip.MustParseAddr("10.0.0.1")}, evenkeel.PluginStatusKey}); taken("uid-1") {
		t.Error("a pod that is gone has reported")
	}
	r.names.OnAdd(after, false)
	changed := after.DeepCopy()
	r.names.OnUpdate(after, changed)
	if !taken("uid-2") {
		t.Error("the next pod of that name cannot report")
	}
	r.names.OnDelete(changed)
	if len(r.names.named) != 0 {
		t.Errorf("%v are known, and no pods are there", r.names.named)
	}
}

// Whoever knows a pod's UID can send reports about it. They do not keep the pod's own from being written.
func TestPluginReportsOfOthersSilenceNoPod(t *testing.T) {
	pod := silentPod("worker-0", "uid-1")
	now := clocktesting.NewFakePassiveClock(time.Now())
	r := &Receiver{Clock: now}
	base := fake.NewClientBuilder().Build()
	r.prepare(pods{"worker-0": pod}, interceptor.NewClient(base, interceptor.Funcs{
		Patch: func(_ context.Context, _ client.WithWatch, _ client.Object, patch client.Patch, _ ...client.PatchOption) error {
			if data, err := patch.Data(nil); err != nil || !strings.Contains(string(data), `"10.0.0.1"`) {
				return apierrors.NewInvalid(schema.GroupKind{}, "", nil)
			}
			return nil
		},
	}))
	r.names.OnAdd(pod, true)
	// queued sends a report from the address, and returns whether it is to be written.
	queued := func(from string) bool {
		before := len(r.queue)
		r.receive(t.Context(), []byte("evenkeel-report 1\nuid-1\nLoaded\nx\n"), netip.AddrPortFrom(netip.MustParseAddr(from), 5))
		return len(r.queue) > before
	}
	if !queued("10.0.0.2") || queued("10.0.0.2") || !queued("10.0.0.1") {
		t.Fatal("another's report is written before, and the pod's is not")
	}
	for range 2 {
		r.writeNext(t.Context(), <-r.queue)
	}
	if queued("10.0.0.2") {
		t.Error("who was refused is heard again at once")
	}
	if !queued("10.0.0.1") || !queued("::ffff:10.0.0.3") {
		t.Error("the pod is not heard, as another was refused")
	}
	now.SetTime(now.Now().Add(refusedFor))
	if !queued("10.0.0.2") {
		t.Error("who was refused is never heard again")
	}
}

// reported is the metric of reports, by result.
func reported(t *testing.T) map[string]float64 {
	t.Helper()
	families, err := ctrlmetrics.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	counts := map[string]float64{}
	for _, family := range families {
		if family.GetName() == "evenkeel_reports_total" {
			for _, m := range family.GetMetric() {
				counts[m.GetLabel()[0].GetValue()] = m.GetCounter().GetValue()
			}
		}
	}
	return counts
}

// Whatever becomes of a report is counted, and the log names one of those that are refused, once a minute.
func TestPluginReportsAreCounted(t *testing.T) {
	pod := silentPod("worker-0", "uid-1")
	now := clocktesting.NewFakePassiveClock(time.Now())
	var lines []string
	ctx := log.IntoContext(t.Context(), funcr.New(func(_, args string) { lines = append(lines, args) }, funcr.Options{}))
	r := &Receiver{Clock: now}
	away := false
	r.prepare(pods{"worker-0": pod}, interceptor.NewClient(fake.NewClientBuilder().Build(), interceptor.Funcs{
		Patch: func(_ context.Context, _ client.WithWatch, _ client.Object, patch client.Patch, _ ...client.PatchOption) error {
			data, err := patch.Data(nil)
			switch {
			case away:
				return errors.New("the API server is away")
			case err != nil || !strings.Contains(string(data), `"10.0.0.1"`):
				return apierrors.NewInvalid(schema.GroupKind{}, "", nil)
			}
			return nil
		},
	}))
	r.names.OnAdd(pod, true)
	const loaded, other = "evenkeel-report 1\nuid-1\nLoaded\nx\n", "evenkeel-report 1\nuid-2\nLoaded\nx\n"
	for _, step := range []struct{ what, datagram, from, want string }{
		{"noise", "noise", "10.0.0.1", metrics.ReportUnreadable},
		{"of a pod that does not exist", other, "10.0.0.1", metrics.ReportUnknown},
		{"from another address", loaded, "10.0.0.2", metrics.ReportRefused},
		{"again", loaded, "10.0.0.2", metrics.ReportRefused},
		{"from a third one", loaded, "10.0.0.3", metrics.ReportRefused},
		{"the API server is away", loaded, "10.0.0.1", metrics.ReportFailed},
		{"the pod's", loaded, "10.0.0.1", metrics.ReportRecorded},
	} {
		before := reported(t)
		away = step.want == metrics.ReportFailed
		r.receive(ctx, []byte(step.datagram), netip.AddrPortFrom(netip.MustParseAddr(step.from), 5))
		select {
		case next := <-r.queue:
			r.writeNext(ctx, next)
		default:
		}
		after := reported(t)
		for result := range after {
			want := before[result]
			if result == step.want {
				want++
			}
			if after[result] != want {
				t.Errorf("%s: %q is %g, want %g", step.what, result, after[result], want)
			}
		}
	}
	if len(lines) != 1 || !strings.Contains(lines[0], `"worker-0"`) || !strings.Contains(lines[0], `"10.0.0.2:5"`) {
		t.Errorf("the log has %q, want one line with the pod and where its report came from", lines)
	}
	now.SetTime(now.Now().Add(complaintInterval))
	r.receive(ctx, []byte(loaded), netip.MustParseAddrPort("10.0.0.2:5"))
	r.writeNext(ctx, <-r.queue)
	if len(lines) != 2 {
		t.Errorf("%d lines, want another one a minute later", len(lines))
	}
	before := reported(t)
	r.receive(ctx, []byte(loaded), netip.MustParseAddrPort("10.0.0.1:5"))
	r.receive(ctx, []byte(loaded), netip.MustParseAddrPort("10.0.0.1:5"))
	r.queue = make(chan report)
	r.receive(ctx, []byte(loaded), netip.MustParseAddrPort("10.0.0.4:5"))
	after := reported(t)
	if after[metrics.ReportRepeated] != before[metrics.ReportRepeated]+1 || after[metrics.ReportDropped] != before[metrics.ReportDropped]+1 {
		t.Errorf("one that waits already, and one for which there is no room: %v, before %v", after, before)
	}
}

// What a rank says about others costs a request when it changes, and one a minute at most while it stands.
func TestPluginReportsOfSuspectsAreRateLimited(t *testing.T) {
	pod := silentPod("worker-0", "uid-1")
	plain := silentPod("plain", "uid-2")
	plain.Annotations = nil
	now := clocktesting.NewFakePassiveClock(time.Date(2026, 11, 25, 10, 0, 0, 0, time.UTC))
	r := &Receiver{Clock: now}
	r.prepare(pods{"worker-0": pod, "plain": plain}, nil)
	r.names.OnAdd(pod, true)
	r.names.OnAdd(plain, true)
	// says sends a report, and returns whether it is to be written. What is written is on the pod then.
	says := func(uid, host string) bool {
		list := ""
		if host != "" {
			list = fmt.Sprintf(`{"class":"link","host":%q}`, host)
		}
		datagram := fmt.Appendf(nil, "evenkeel-verdict 1\n%s\n{\"ranks\":8,\"text\":\"words\",\"suspects\":[%s]}\n", uid, list)
		if r.receive(t.Context(), datagram, netip.MustParseAddrPort("10.0.0.1:5")) {
			t.Error("it is answered")
		}
		select {
		case next := <-r.queue:
			delete(r.waiting, next.subject())
			if pod.Annotations[next.annotation] = next.value; next.value == "" {
				delete(pod.Annotations, next.annotation)
			}
			note(r.written, pod.UID, now.Now())
			return true
		default:
			return false
		}
	}
	for _, step := range []struct {
		after time.Duration
		host  string
		want  bool
	}{{0, "", false}, {0, "n1", true}, {5 * time.Second, "n1", false}, {0, "n2", false}, {5 * time.Second, "n2", true}, {9 * time.Second, "n1", false},
		{0, "", true}, {0, "", false}, {5 * time.Second, "n1", false}, {5 * time.Second, "n1", true}, {59 * time.Second, "n1", false}, {time.Second, "n1", true}} {
		now.SetTime(now.Now().Add(step.after))
		if got := says("uid-1", step.host); got != step.want {
			t.Errorf("after %s, %q: written %t, want %t", step.after, step.host, got, step.want)
		}
	}
	if says("uid-2", "n1") || says("uid-3", "n1") {
		t.Error("a pod without a profile, or one that does not exist, names somebody")
	}
	says("uid-1", "n 1")
	if len(r.queue) != 0 {
		t.Error("an invalid one is written")
	}
}
