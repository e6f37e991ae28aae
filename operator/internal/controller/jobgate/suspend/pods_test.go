package suspend

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/controller/jobgate"
	"evenkeel.dev/evenkeel/operator/internal/controller/networkcheckpolicy"
	"evenkeel.dev/evenkeel/operator/internal/kube/optionalwatch"
	"evenkeel.dev/evenkeel/operator/internal/nodeuse"
)

var noon = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

// A scene is a controller beside pods. Without a policy, every gate is opened as soon as it is decided about.
type scene struct {
	*Reconciler
	client.WithWatch
	t   *testing.T
	now *clocktesting.FakePassiveClock
	// patches counts the gates that were opened, and most the requests at a time.
	patches, atATime, most atomic.Int32
	reads                  atomic.Int32
	// beside, if set, is called while a gate is opened.
	beside func(context.Context)
	// eventless: no Event can be written. denied is what the API server says when a gate is opened; nil: it opens.
	eventless bool
	denied    error
}

// gatedCache has the gated pods.
type gatedCache struct {
	cache.Cache
	from client.Reader
}

func (c gatedCache) List(ctx context.Context, list client.ObjectList, _ ...client.ListOption) error {
	return c.from.List(ctx, list, client.MatchingLabelsSelector{Selector: GatedSelector()})
}

func newScene(t *testing.T) *scene {
	t.Helper()
	kinds := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(kinds), evenkeel.AddToScheme(kinds)); err != nil {
		t.Fatal(err)
	}
	s := &scene{t: t, now: clocktesting.NewFakePassiveClock(noon)}
	s.WithWatch = fake.NewClientBuilder().WithScheme(kinds).Build()
	counted := interceptor.NewClient(s.WithWatch, interceptor.Funcs{
		Patch: func(ctx context.Context, c client.WithWatch, object client.Object, patch client.Patch, options ...client.PatchOption) error {
			s.patches.Add(1)
			at := s.atATime.Add(1)
			defer s.atATime.Add(-1)
			for most := s.most.Load(); at > most && !s.most.CompareAndSwap(most, at); most = s.most.Load() {
			}
			if s.beside != nil {
				s.beside(ctx)
			}
			if s.denied != nil {
				return s.denied
			}
			return c.Patch(ctx, object, patch, options...)
		},
		Create: func(ctx context.Context, c client.WithWatch, object client.Object, options ...client.CreateOption) error {
			if _, event := object.(*corev1.Event); event && s.eventless {
				return errors.New("the storage of Events is down")
			}
			return c.Create(ctx, object, options...)
		},
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			s.reads.Add(1)
			return c.List(ctx, list, options...)
		},
		Get: func(context.Context, client.WithWatch, client.ObjectKey, client.Object, ...client.GetOption) error {
			s.reads.Add(1)
			return &meta.NoKindMatchError{}
		},
	})
	s.restart(counted)
	return s
}

// restart is another process.
func (s *scene) restart(counted client.Client) {
	s.Reconciler = &Reconciler{Evaluator: jobgate.Evaluator{
		Namespace: "system", Requests: networkcheckpolicy.NewCheckRequests(), Use: nodeuse.New("system", s.now), Clock: s.now,
		Client: counted, WaitingCache: gatedCache{from: s.WithWatch}, OptionalKinds: &optionalwatch.Watch{},
	}}
	s.start(counted)
}

// pod adds a gated pod with the labels, whose controller is the owner.
func (s *scene) pod(name, owner string, labels map[string]string) {
	s.t.Helper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: name, UID: types.UID(name), CreationTimestamp: metav1.NewTime(s.now.Now())}}
	pod.Labels = map[string]string{evenkeel.GatedKey: evenkeel.GatedValue, evenkeel.ProfileKey: "default"}
	maps.Copy(pod.Labels, labels)
	if kind, of, found := strings.Cut(owner, "/"); found {
		yes := true
		pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "example.com/v1", Kind: kind, Name: of, UID: types.UID(of), Controller: &yes}}
	}
	pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: evenkeel.SchedulingGate}}
	if err := s.WithWatch.Create(s.t.Context(), pod); err != nil {
		s.t.Fatal(err)
	}
}

// pass evaluates, so long after noon, and returns the names of the pods that wait still, and when to look again.
func (s *scene) pass(after time.Duration) (waiting string, again time.Duration) {
	s.t.Helper()
	s.now.SetTime(noon.Add(after))
	result, err := s.reconcileAll(s.t.Context())
	if err != nil {
		s.t.Fatal(err)
	}
	var list corev1.PodList
	if err := s.WithWatch.List(s.t.Context(), &list, client.MatchingLabelsSelector{Selector: GatedSelector()}); err != nil {
		s.t.Fatal(err)
	}
	var names []string
	for _, pod := range list.Items {
		names = append(names, pod.Name)
	}
	slices.Sort(names)
	return strings.Join(names, " "), result.RequeueAfter
}

func (s *scene) waits(after time.Duration, want string, wantAgain time.Duration) {
	s.t.Helper()
	if got, again := s.pass(after); got != want || again != wantAgain {
		s.t.Errorf("after %s, %q wait, and the next look is in %s; want %q, %s", after, got, again, want, wantAgain)
	}
}

// The pods of a job are there one after the other, some of other controllers: its gate opens when no more come.
func TestGangOpensWhenItIsWhole(t *testing.T) {
	set := map[string]string{"jobset.sigs.k8s.io/jobset-name": "llama", "jobset.sigs.k8s.io/jobset-uid": "1234"}
	group := map[string]string{"leaderworkerset.sigs.k8s.io/name": "serve"}
	for name, made := range map[string]struct {
		owners [2]string
		labels map[string]string
	}{
		"children of a JobSet":              {[2]string{"Job/a", "Job/b"}, set},
		"StatefulSets of a LeaderWorkerSet": {[2]string{"StatefulSet/leaders", "StatefulSet/workers"}, group},
		"groups of a RayCluster":            {[2]string{"RayCluster/ray", "RayCluster/ray"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t)
			s.pod("a", made.owners[0], made.labels)
			s.waits(0, "a", settleDelay)
			s.waits(2*time.Second, "a", settleDelay-2*time.Second)
			s.pod("b", made.owners[1], made.labels)
			s.waits(settleDelay-time.Second, "a b", settleDelay)
			s.waits(settleDelay, "a b", settleDelay-time.Second)
			s.waits(2*settleDelay-time.Second, "", 0)
		})
	}
}

// Jobs do not wait for each other's pods, and a pod alone waits for none.
func TestGangsSettleByThemselves(t *testing.T) {
	s := newScene(t)
	s.pod("alone", "", nil)
	s.pod("a", "RayCluster/one", nil)
	s.waits(0, "a", settleDelay)
	s.pod("b", "RayCluster/another", nil)
	s.waits(settleDelay, "b", settleDelay)
}

// A gang that grows and grows opens all the same.
func TestGangThatGrowsOpensInTheEnd(t *testing.T) {
	s := newScene(t)
	for after := time.Duration(0); after < maxSettle; after += 2 * time.Second {
		s.pod(fmt.Sprintf("p%02d", after/time.Second), "RayCluster/ray", nil)
		if waiting, again := s.pass(after); len(strings.Fields(waiting)) != int(after/(2*time.Second))+1 || again > maxSettle-after {
			t.Fatalf("after %s, %s wait; the next look is in %s", after, waiting, again)
		}
	}
	s.waits(maxSettle, "", 0)
}

// A pod of a gang that has started does not wait, even if another process opened the gate, or was opening it when it ended.
func TestGangLatePodDoesNotWait(t *testing.T) {
	s := newScene(t)
	owned := map[string]string{evenkeel.OwnerKey: "ray"}
	s.pod("running", "RayCluster/ray", owned)
	s.waits(0, "running", settleDelay)
	s.waits(settleDelay, "", 0)
	s.restart(s.Reconciler.Client)
	s.pod("late", "RayCluster/ray", owned)
	s.waits(settleDelay, "", 0)
}

// Events may be kept elsewhere, or denied in a namespace: the gate opens all the same.
func TestGateOpensWithoutItsEvent(t *testing.T) {
	s := newScene(t)
	s.eventless = true
	s.pod("alone", "", nil)
	s.waits(0, "", 0)
}

// A guard refuses what somebody else's webhook adds. The user of the job hears of it, and the gate opens when that is fixed.
func TestGateThatMayNotOpenSaysSo(t *testing.T) {
	s := newScene(t)
	s.pod("alone", "", nil)
	s.denied = apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "alone", errors.New("Evenkeel may not change annotations"))
	for range 2 {
		if _, err := s.reconcileAll(t.Context()); !apierrors.IsForbidden(err) {
			t.Fatalf("%v", err)
		}
	}
	var list corev1.EventList
	if err := s.WithWatch.List(t.Context(), &list); err != nil {
		t.Fatal(err)
	}
	said := slices.DeleteFunc(list.Items, func(e corev1.Event) bool { return e.Reason != ReasonNotOpened })
	if len(said) != 1 || !strings.Contains(said[0].Message, "may not change annotations") {
		t.Errorf("%+v", said)
	}
	s.denied = nil
	s.waits(0, "", 0)
}

// A gang of hundreds: one request for each pod, a bounded number at a time, and what is known of the job is read once.
func TestGangOpensInParallel(t *testing.T) {
	const pods = 300
	s := newScene(t)
	for i := range pods {
		s.pod(fmt.Sprintf("p%03d", i), "RayCluster/ray", map[string]string{evenkeel.OwnerKey: "ray"})
	}
	together, once := make(chan struct{}), sync.Once{}
	s.beside = func(ctx context.Context) {
		if s.atATime.Load() > 1 {
			once.Do(func() { close(together) })
			return
		}
		select {
		case <-together:
		case <-time.After(10 * time.Second):
			t.Error("a gate is opened while no other is")
			once.Do(func() { close(together) })
		}
	}
	s.pass(0)
	reads := s.reads.Load()
	s.waits(settleDelay, "", 0)
	if got := s.patches.Load(); got != pods {
		t.Errorf("%d requests for %d pods", got, pods)
	}
	if most := s.most.Load(); most < 2 || most > jobgate.MaxRequests {
		t.Errorf("%d requests at a time, at most %d are allowed", most, jobgate.MaxRequests)
	}
	// Nodes, their health, policies and checks; and once, whether the gang has started.
	if again := s.reads.Load() - reads; reads > 5 || again > 4 {
		t.Errorf("%d reads at first, %d later", reads, again)
	}
}
