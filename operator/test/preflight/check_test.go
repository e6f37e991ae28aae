package preflight

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/controller/injectionevents"
	"evenkeel.dev/evenkeel/operator/internal/controller/jobgate"
	"evenkeel.dev/evenkeel/operator/internal/controller/jobgate/kueue"
	"evenkeel.dev/evenkeel/operator/internal/controller/jobgate/suspend"
	"evenkeel.dev/evenkeel/operator/internal/controller/networkcheck"
	"evenkeel.dev/evenkeel/operator/internal/controller/networkcheckpolicy"
	"evenkeel.dev/evenkeel/operator/internal/controller/networkprofile"
	"evenkeel.dev/evenkeel/operator/internal/controller/nodenetworkhealth"
	"evenkeel.dev/evenkeel/operator/internal/controller/suspicions"
	"evenkeel.dev/evenkeel/operator/internal/kube/debounce"
	"evenkeel.dev/evenkeel/operator/internal/nodeuse"
	"evenkeel.dev/evenkeel/operator/internal/preflight/jobs"
	"evenkeel.dev/evenkeel/operator/internal/preflight/report"
	"evenkeel.dev/evenkeel/operator/test/apiserver"
)

const waitTimeout = 60 * time.Second

// A clock runs as fast as any other, and can be put forward.
type clock struct{ ahead atomic.Int64 }

func (c *clock) Now() time.Time                  { return time.Now().Add(time.Duration(c.ahead.Load())) }
func (c *clock) Since(t time.Time) time.Duration { return c.Now().Sub(t) }
func (c *clock) advance(by time.Duration)        { c.ahead.Add(int64(by)) }

// quick makes controllers collect changes for a short time only.
const quick = debounce.Scale(0.1)

// start runs the controllers, with the chart's permissions, until the returned function is called. Those that go by days
// and hours have their own clock.
func start(t *testing.T, f *fleet, c, calendar *clock, change ...func(*ctrl.Options)) (stop func()) {
	t.Helper()
	return controllers{logs: f, clock: c, calendar: calendar}.start(t, change...)
}

// controllers are the settings of start. Tests that set no delays get quick ones, and a tracker of their own.
type controllers struct {
	logs            networkcheck.LogReader
	clock, calendar *clock
	delays          debounce.Scale
	use             *nodeuse.Tracker
	// api is the API server; nil: that of most tests.
	api *rest.Config
}

func (c controllers) start(t *testing.T, change ...func(*ctrl.Options)) (stop func()) {
	t.Helper()
	if c.delays == 0 {
		c.delays = quick
	}
	if c.use == nil {
		c.use = nodeuse.New(namespace, &clock{})
	}
	c.use.Delays = c.delays
	skip := true
	cached := networkprofile.Cached()
	maps.Copy(cached, networkcheck.Cached(namespace))
	maps.Copy(cached, injectionevents.Cached())
	options := ctrl.Options{
		Scheme: scheme, Metrics: metricsserver.Options{BindAddress: "0"}, HealthProbeBindAddress: "0",
		Cache:      cache.Options{ByObject: cached, ReaderFailOnMissingInformer: true},
		Controller: ctrlconfig.Controller{SkipNameValidation: &skip},
	}
	for _, f := range change {
		f(&options)
	}
	mgr, err := ctrl.NewManager(apiserver.As(cmp.Or(c.api, config), namespace, account), options)
	if err != nil {
		t.Fatal(err)
	}
	requests := networkcheckpolicy.NewCheckRequests()
	evaluator := jobgate.Evaluator{Namespace: namespace, Requests: requests, Use: c.use, Clock: c.calendar, Poll: 100 * time.Millisecond, Delays: c.delays}
	for _, controller := range []interface{ SetupWithManager(manager.Manager) error }{
		c.use,
		&networkcheck.Reconciler{Namespace: namespace, BenchImage: benchName, PriorityClass: checkPriority, Use: c.use, Logs: c.logs, Clock: c.clock, Poll: 50 * time.Millisecond, Delays: c.delays},
		&nodenetworkhealth.ResultRecorder{}, &nodenetworkhealth.NodeMarker{Clock: c.calendar, Delays: c.delays}, &networkcheckpolicy.Reconciler{Namespace: namespace, Requests: requests, Use: c.use, Clock: c.calendar, Delays: c.delays},
		&suspend.Reconciler{Evaluator: evaluator}, &kueue.Reconciler{Evaluator: evaluator},
		&suspicions.Reconciler{Clock: c.calendar, Poll: 100 * time.Millisecond},
	} {
		if err := controller.SetupWithManager(mgr); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- mgr.Start(ctx) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("the controller ended with %v", err)
			}
		case <-time.After(waitTimeout):
			t.Error("the controller does not end")
		}
	}
	t.Cleanup(stop)
	return stop
}

func eventually(t *testing.T, what string, condition func(ctx context.Context) (bool, error)) {
	t.Helper()
	within(t, waitTimeout, what, condition)
}

func within(t *testing.T, limit time.Duration, what string, condition func(ctx context.Context) (bool, error)) {
	t.Helper()
	every := max(20*time.Millisecond, limit/1000) // what takes long to come about may take long to look at
	if err := wait.PollUntilContextTimeout(t.Context(), every, limit, true, condition); err != nil {
		t.Fatalf("waited in vain until %s: %v", what, err)
	}
}

// wait until the check has ended, and that nothing of it is left but the report.
func ended(t *testing.T, c *evenkeel.NetworkCheck) *evenkeel.NetworkCheck {
	t.Helper()
	err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, waitTimeout, true, func(ctx context.Context) (bool, error) {
		err := admin.Get(ctx, client.ObjectKeyFromObject(c), c)
		return err == nil && meta.IsStatusConditionTrue(c.Status.Conditions, evenkeel.ConditionComplete), err
	})
	if err != nil {
		t.Fatalf("the check did not end: %v\n%+v", err, c.Status)
	}
	mine := client.MatchingLabels{evenkeel.CheckKey: c.Name}
	var jobs batchv1.JobList
	var services corev1.ServiceList
	if err := admin.List(t.Context(), &jobs, mine); err != nil || len(jobs.Items) > 0 {
		t.Errorf("%d Jobs are left (%v)", len(jobs.Items), err)
	}
	if err := admin.List(t.Context(), &services, mine); err != nil || len(services.Items) > 0 {
		t.Errorf("%d Services are left (%v)", len(services.Items), err)
	}
	return c
}

// once fails the test if two runs were of the same work.
func once(t *testing.T, runs []madeRun) {
	t.Helper()
	for i := 1; i < len(runs); i++ {
		if runs[i].name == runs[i-1].name {
			t.Errorf("run %s was made twice", runs[i].name)
		}
	}
}

// rounds are the numbers of the rounds of stage Pairs.
func rounds(runs []madeRun) int {
	last := 0
	for _, r := range runs {
		var round, index int
		at := strings.LastIndex(r.name, "-p")
		if at < 0 {
			continue
		}
		if n, err := fmt.Sscanf(r.name[at:], "-p%d-%d", &round, &index); n == 2 && err == nil {
			last = max(last, round)
		}
	}
	return last
}

// found are the names of the nodes with the verdict.
func found(c *evenkeel.NetworkCheck, v evenkeel.Verdict) []string {
	var names []string
	for _, f := range c.Status.Findings {
		if f.Verdict == v {
			names = append(names, f.Name)
		}
	}
	slices.Sort(names)
	return names
}

// printed is the row that kubectl prints about an object, by column; empty if there is none.
func printed(t *testing.T, resource, name string) map[string]string {
	t.Helper()
	transport, err := rest.HTTPClientFor(config)
	if err != nil {
		t.Fatal(err)
	}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+strings.Trim(strings.TrimPrefix(config.Host, "https://"), "/")+"/apis/evenkeel.dev/v1alpha1/"+resource, nil)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io")
	response, err := transport.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	var table metav1.Table
	if err := json.NewDecoder(response.Body).Decode(&table); err != nil {
		t.Fatal(err)
	}
	for _, r := range table.Rows {
		row := map[string]string{}
		for i, column := range table.ColumnDefinitions {
			row[column.Name] = fmt.Sprint(r.Cells[i])
		}
		if row["Name"] == name {
			return row
		}
	}
	return nil
}

func TestCheckHealthyPoolPasses(t *testing.T) {
	var looks atomic.Int32
	f := newFleet(t, func(nodes []string) ending {
		e := links(nil)(nodes)
		e.running = looks.Add(1)%4 != 0 // long enough for others to begin
		return e
	})
	start(t, f, &clock{}, &clock{})
	newNodes(t, "healthy", 5)
	c := ended(t, newCheck(t, "healthy", func(s *evenkeel.NetworkCheckSpec) {
		s.Stages = []evenkeel.Stage{"Gang", "Pairs", "Local", "Capacity"}
		four := int32(4)
		s.MaxConcurrentNodes = &four
	}))
	s := c.Status
	if s.Verdict != evenkeel.VerdictPass || *s.Summary.Passed != 5 || *s.Summary.Failed != 0 || len(s.Findings) != 0 || s.BadNodes != "" {
		t.Errorf("%+v", s)
	}
	if s.Summary.MedianBusBandwidth.String() != "1G" || len(s.Networks) != 1 || s.Networks[0].Name != "Evenkeel" || *s.Networks[0].API != 10 {
		t.Errorf("median %v, networks %+v", s.Summary.MedianBusBandwidth, s.Networks)
	}
	once(t, f.all())
	// Each by itself, two groups of an odd number, all together.
	if runs := f.all(); len(runs) != 5+2+1 || rounds(runs) != 1 {
		t.Errorf("%d runs, %d rounds: %v", len(runs), rounds(runs), runs)
	}
	// All together are more than the limit, and the only ones that may be.
	if f.most > 4 {
		t.Errorf("%d nodes were tested at once", f.most)
	}
	written, err := report.Read(t.Context(), admin, namespace, s.ReportName)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(written.Markdown, "healthy-3") || !strings.Contains(written.Pairs, "<svg") || len(written.Record.Runs) != 8 {
		t.Errorf("report: %+v", written)
	}
}

func TestCheckNamesSlowNode(t *testing.T) {
	f := newFleet(t, links(map[string]float64{"slow-2": 0.1}))
	start(t, f, &clock{}, &clock{})
	newNodes(t, "slow", 6)
	c := ended(t, newCheck(t, "slow", func(s *evenkeel.NetworkCheckSpec) { s.Stages = []evenkeel.Stage{"Pairs"} }))
	if bad := found(c, "Fail"); !slices.Equal(bad, []string{"slow-2"}) || c.Status.BadNodes != "slow-2" || *c.Status.Summary.Passed != 5 {
		t.Errorf("failed %v, %+v", bad, c.Status)
	}
	if s := c.Status; !slices.Equal(s.FailedNodes, []string{"slow-2"}) || s.ObservedGeneration != 1 || s.Stage != "" || s.Round != nil || s.Runs != nil || s.RunsDone != nil {
		t.Errorf("failedNodes %v, observedGeneration %d; of progress are left stage %q, round %v, runs %v, runsDone %v", s.FailedNodes, s.ObservedGeneration, s.Stage, s.Round, s.Runs, s.RunsDone)
	}
	if f := c.Status.Findings[0]; f.Reason != "TooSlow" || f.Stage != evenkeel.StagePairs || f.BusBandwidth.String() != "100M" {
		t.Errorf("%+v", f)
	}
	if n := rounds(f.all()); n != 2 {
		t.Errorf("%d rounds, want 2", n)
	}
	once(t, f.all())
	if row := printed(t, "namespaces/"+namespace+"/networkchecks", "slow"); row["Verdict"] != "Fail" || row["Bad nodes"] != "slow-2" || row["Passed"] != "5" || row["Median B/s"] != "1G" || row["Progress"] != "ended" {
		t.Errorf("kubectl prints %v", row)
	}
	eventually(t, "the node's own row says so too", func(context.Context) (bool, error) {
		row := printed(t, "nodenetworkhealths", "slow-2")
		return row["Health"] == "Unhealthy" && row["Reason"] == "TooSlow" && row["B/s"] == "100M", nil
	})
	if passed := meta.FindStatusCondition(c.Status.Conditions, evenkeel.ConditionPassed); passed == nil || passed.Status != "False" || !strings.Contains(passed.Message, "slow-2") {
		t.Errorf("condition %+v", passed)
	}
	says(t, namespace, "slow", "Normal EvenkeelCheckStarted", "Warning EvenkeelCheckFailed")
	says(t, "default", "slow-2", "Warning EvenkeelNetworkUnhealthy")
	says(t, "default", "slow-1") // that a node is as it should be is no news
}

// TestCheckProgressIsForPrograms reads a check that runs.
func TestCheckProgressIsForPrograms(t *testing.T) {
	f := newFleet(t, links(nil))
	f.hold.Store(true)
	start(t, f, &clock{}, &clock{})
	newNodes(t, "stages", 4)
	c := newCheck(t, "stages", func(s *evenkeel.NetworkCheckSpec) { s.Stages = []evenkeel.Stage{"Local", "Pairs"} })
	running := func(stage evenkeel.Stage, round, runs int32) {
		t.Helper()
		eventually(t, fmt.Sprintf("%s runs, and none of its %d runs has ended", stage, runs), func(ctx context.Context) (bool, error) {
			if err := admin.Get(ctx, client.ObjectKeyFromObject(c), c); err != nil {
				return false, err
			}
			s := c.Status
			return s.Stage == stage && ptr.Deref(s.Round, 0) == round && ptr.Deref(s.Runs, 0) == runs && ptr.Deref(s.RunsDone, -1) == 0 && s.ObservedGeneration == c.Generation, nil
		})
	}
	running(evenkeel.StageLocal, 0, 4)
	f.hold.Store(false)
	ended(t, c)
}

// says waits until the Events about the object are these, in the order of their reasons.
func says(t *testing.T, namespace, name string, want ...string) {
	t.Helper()
	eventually(t, fmt.Sprintf("the Events about %s are %q", name, want), func(ctx context.Context) (bool, error) {
		var list corev1.EventList
		if err := admin.List(ctx, &list, client.InNamespace(namespace), client.MatchingFields{"involvedObject.name": name}); err != nil {
			return false, err
		}
		var got []string
		for _, e := range list.Items {
			got = append(got, e.Type+" "+e.Reason)
		}
		slices.Sort(got)
		slices.Sort(want)
		return slices.Equal(got, want), nil
	})
}

func TestCheckNamesTwoBadNodes(t *testing.T) {
	f := newFleet(t, func(nodes []string) ending {
		if len(nodes) > 1 && slices.Contains(nodes, "two-4") {
			return ending{failure: "rank 1 (two-4, 10.0.0.2) is gone: its process or its machine has ended"}
		}
		return links(map[string]float64{"two-1": 0.2})(nodes)
	})
	start(t, f, &clock{}, &clock{})
	newNodes(t, "two", 8)
	c := ended(t, newCheck(t, "two", nil))
	if bad := found(c, "Fail"); !slices.Equal(bad, []string{"two-1", "two-4"}) || c.Status.BadNodes != "two-1, two-4" {
		t.Errorf("failed %v: %s", bad, c.Status.Message)
	}
	if n := rounds(f.all()); n != 2 {
		t.Errorf("%d rounds, want 2", n)
	}
	once(t, f.all())
}

func TestCheckAllSlowFailsFabric(t *testing.T) {
	f := newFleet(t, func([]string) ending { return ending{speed: 0.1, network: "Evenkeel"} })
	start(t, f, &clock{}, &clock{})
	newNodes(t, "fabric", 4)
	c := ended(t, newCheck(t, "fabric", func(s *evenkeel.NetworkCheckSpec) {
		least := resource.MustParse("800M")
		s.Thresholds.MinBusBandwidth = &least
	}))
	s := c.Status
	if s.Verdict != evenkeel.VerdictFail || len(found(c, "Fail")) != 0 || s.BadNodes != "" {
		t.Errorf("nodes were blamed: %+v", s)
	}
	if len(s.Fabrics) != 1 || s.Fabrics[0].Verdict != evenkeel.VerdictFail || s.Fabrics[0].Reason != "NoPairPassed" || s.Fabrics[0].MinBusBandwidth.String() != "800M" {
		t.Errorf("fabrics %+v", s.Fabrics)
	}
}

func TestCheckFallbackNetworkFails(t *testing.T) {
	f := newFleet(t, func([]string) ending { return ending{speed: 1, network: "Socket"} })
	start(t, f, &clock{}, &clock{})
	newNodes(t, "fallback", 4)
	c := ended(t, newCheck(t, "fallback", nil))
	if s := c.Status; s.Verdict != evenkeel.VerdictFail || len(found(c, "Fail")) != 0 || !strings.Contains(s.Message, "ran over Socket, not Evenkeel") {
		t.Errorf("%+v", s)
	}
}

func TestCheckMissingImageIsInconclusive(t *testing.T) {
	f := newFleet(t, func([]string) ending { return ending{waiting: "ImagePullBackOff"} })
	start(t, f, &clock{}, &clock{})
	newNodes(t, "image", 4)
	c := ended(t, newCheck(t, "image", func(s *evenkeel.NetworkCheckSpec) { s.Stages = []evenkeel.Stage{"Pairs"} }))
	s := c.Status
	if s.Verdict != evenkeel.VerdictInconclusive || len(found(c, "Inconclusive")) != 4 || !strings.Contains(s.Message, "ImagePullBackOff: the registry says no") {
		t.Errorf("%+v", s)
	}
}

func TestCheckRunTimeoutIsInconclusive(t *testing.T) {
	f := newFleet(t, func([]string) ending { return ending{running: true} })
	time := &clock{}
	start(t, f, time, &clock{})
	newNodes(t, "hang", 2)
	c := newCheck(t, "hang", func(s *evenkeel.NetworkCheckSpec) { s.Stages = []evenkeel.Stage{"Pairs"} })
	eventually(t, "the run's pods run", func(ctx context.Context) (bool, error) {
		var pods corev1.PodList
		err := admin.List(ctx, &pods, client.MatchingLabels{evenkeel.CheckKey: "hang"})
		return len(pods.Items) == 2 && !slices.ContainsFunc(pods.Items, func(p corev1.Pod) bool { return p.Status.Phase != corev1.PodRunning }), err
	})
	time.advance(301 * 1e9)
	c = ended(t, c)
	if s := c.Status; s.Verdict != evenkeel.VerdictInconclusive || !strings.Contains(s.Message, "did not end within 5m0s: its pods still run") {
		t.Errorf("%+v", s)
	}
}

// All nodes of a large cluster, whole, do not fit into the controller's memory.
func TestCheckReadsFewNodesAtATime(t *testing.T) {
	asked := recordReads(t)
	start(t, newFleet(t, links(nil)), &clock{}, &clock{})
	nodes := newNodes(t, "paged", 4)
	lists := func() []*url.URL {
		return asked.of(func(u *url.URL) bool { // those of caches have a resource version
			return u.Path == "/api/v1/nodes" && !u.Query().Has("watch") && !u.Query().Has("resourceVersion")
		})
	}
	ended(t, newCheck(t, "paged", nil))
	selected := lists()
	for _, u := range selected {
		if limit, err := strconv.Atoi(u.Query().Get("limit")); err != nil || limit > 100 {
			t.Errorf("a list of %q nodes", u.Query().Get("limit"))
		}
	}
	if len(selected) == 0 {
		t.Error("the lists are not counted")
	}
	ended(t, newCheck(t, "paged-named", func(s *evenkeel.NetworkCheckSpec) { s.Nodes = evenkeel.NodeSet{Names: nodes[:2]} }))
	if n := len(lists()) - len(selected); n != 0 {
		t.Errorf("%d lists of all nodes for a check that names two", n)
	}
}

func TestCheckNamesWhatSuspendsItsJobs(t *testing.T) {
	suspendJobs(t, "suspended")
	f := newFleet(t, links(nil))
	time := &clock{}
	start(t, f, time, &clock{})
	newNodes(t, "suspended", 2)
	c := newCheck(t, "suspended", func(s *evenkeel.NetworkCheckSpec) { s.Stages = []evenkeel.Stage{"Pairs"} })
	eventually(t, "its Job is there", func(ctx context.Context) (bool, error) {
		var jobs batchv1.JobList
		err := admin.List(ctx, &jobs, client.MatchingLabels{evenkeel.CheckKey: "suspended"})
		return len(jobs.Items) > 0, err
	})
	time.advance(301 * 1e9)
	c = ended(t, c)
	if s := c.Status; s.Verdict != evenkeel.VerdictInconclusive || !strings.Contains(s.Message, "is suspended") || !strings.Contains(s.Message, "manageJobsWithoutQueueName") || !strings.Contains(s.Message, namespace) {
		t.Errorf("%+v", s)
	}
}

func TestCheckUnreadableLog(t *testing.T) {
	f := newFleet(t, func(nodes []string) ending {
		e := links(nil)(nodes)
		e.silent = slices.Contains(nodes, "mute-1")
		return e
	})
	time := &clock{}
	start(t, f, time, &clock{})
	newNodes(t, "mute", 6)
	c := newCheck(t, "mute", func(s *evenkeel.NetworkCheckSpec) { s.Stages = []evenkeel.Stage{"Pairs"} })
	eventually(t, "only the run without a log is left", func(ctx context.Context) (bool, error) {
		var jobs batchv1.JobList
		err := admin.List(ctx, &jobs, client.MatchingLabels{evenkeel.CheckKey: c.Name})
		f.mu.Lock()
		defer f.mu.Unlock()
		return len(jobs.Items) == 1 && len(f.runs) == 3 && f.missed > 0, err
	})
	time.advance(301 * 1e9)
	c = ended(t, c)
	// The two other pairs passed. Later runs begin, by the clock put forward, when their time is over.
	if u := found(c, "Inconclusive"); !slices.Contains(u, "mute-1") || *c.Status.Summary.Passed != 4 || *c.Status.Summary.Failed != 0 || !strings.Contains(c.Status.Message, "has no log") {
		t.Errorf("%+v", c.Status)
	}
}

// A meeting is where requests wait for another one to come, for a while.
type meeting struct {
	mu   sync.Mutex
	came chan struct{} // of the one that waits
	met  atomic.Bool
}

func (m *meeting) join(ctx context.Context) {
	m.mu.Lock()
	if m.came != nil {
		close(m.came)
		m.came = nil
		m.mu.Unlock()
		m.met.Store(true)
		return
	}
	came := make(chan struct{})
	m.came = came
	m.mu.Unlock()
	select {
	case <-came:
	case <-time.After(time.Second):
	case <-ctx.Done():
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.came == came {
		m.came = nil
	}
}

// metLogs reads logs, two at a time.
type metLogs struct {
	*fleet
	meeting *meeting
}

func (l metLogs) Tail(ctx context.Context, namespace, pod string) ([]byte, error) {
	l.meeting.join(ctx)
	return l.fleet.Tail(ctx, namespace, pod)
}

// TestCheckRunsAreHandledInParallel: of a large check, hundreds of runs start and end at once, and a log comes from its node.
func TestCheckRunsAreHandledInParallel(t *testing.T) {
	var created, deleted, read meeting
	f := newFleet(t, links(nil))
	f.hold.Store(true)
	controllers{logs: metLogs{f, &read}, clock: &clock{}, calendar: &clock{}}.start(t, func(o *ctrl.Options) {
		o.NewClient = func(config *rest.Config, options client.Options) (client.Client, error) {
			c, err := client.NewWithWatch(config, options)
			if err != nil {
				return nil, err
			}
			return interceptor.NewClient(c, interceptor.Funcs{
				Create: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.CreateOption) error {
					if _, is := o.(*batchv1.Job); is {
						created.join(ctx)
					}
					return c.Create(ctx, o, opts...)
				},
				Delete: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.DeleteOption) error {
					if _, is := o.(*batchv1.Job); is {
						deleted.join(ctx)
					}
					return c.Delete(ctx, o, opts...)
				},
			}), nil
		}
	})
	newNodes(t, "parallel", 8)
	c := newCheck(t, "parallel", func(s *evenkeel.NetworkCheckSpec) { s.Stages = []evenkeel.Stage{"Local"} })
	eventually(t, "all runs have started", func(context.Context) (bool, error) { return len(f.all()) == 8, nil })
	f.hold.Store(false)
	c = ended(t, c)
	if *c.Status.Summary.Passed != 8 {
		t.Errorf("%+v", c.Status)
	}
	for what, m := range map[string]*meeting{"created": &created, "deleted": &deleted, "read": &read} {
		if !m.met.Load() {
			t.Errorf("no two runs were %s at a time", what)
		}
	}
}

func TestCheckTimeout(t *testing.T) {
	f := newFleet(t, func([]string) ending { return ending{running: true} })
	time := &clock{}
	start(t, f, time, &clock{})
	newNodes(t, "late", 4)
	c := newCheck(t, "late", func(s *evenkeel.NetworkCheckSpec) {
		long, hour := int32(86400), int32(3600)
		s.RunTimeoutSeconds, s.TimeoutSeconds = &long, &hour
	})
	eventually(t, "runs are there", func(context.Context) (bool, error) { return len(f.all()) > 0, nil })
	time.advance(3601 * 1e9)
	c = ended(t, c)
	if s := c.Status; s.Verdict != evenkeel.VerdictInconclusive || !strings.Contains(s.Message, "timeout of 3600 s expired") {
		t.Errorf("%+v", s)
	}
}

func TestCheckControllerRestart(t *testing.T) {
	var released atomic.Bool
	pairs := links(map[string]float64{"restart-3": 0.1})
	f := newFleet(t, func(nodes []string) ending {
		// The first pair by name ends at once, the others wait.
		if !released.Load() && !slices.Contains(nodes, "restart-0") {
			return ending{running: true}
		}
		return pairs(nodes)
	})
	clock := &clock{}
	stop := start(t, f, clock, clock)
	newNodes(t, "restart", 8)
	c := newCheck(t, "restart", func(s *evenkeel.NetworkCheckSpec) { s.Stages = []evenkeel.Stage{"Pairs"} })
	eventually(t, "one run is recorded and three run", func(ctx context.Context) (bool, error) {
		var jobs batchv1.JobList
		err := admin.List(ctx, &jobs, client.MatchingLabels{evenkeel.CheckKey: c.Name})
		return len(jobs.Items) == 3 && len(f.all()) == 4, err
	})
	stop()
	released.Store(true)
	start(t, f, clock, clock)
	c = ended(t, c)
	if bad := found(c, "Fail"); !slices.Equal(bad, []string{"restart-3"}) {
		t.Errorf("failed %v: %s", bad, c.Status.Message)
	}
	once(t, f.all())
	if runs := f.all(); int32(len(runs)) != *c.Status.Summary.Runs || rounds(runs) != 2 {
		t.Errorf("%d runs were made, %d are recorded, in %d rounds", len(runs), *c.Status.Summary.Runs, rounds(runs))
	}
}

// TestCheckLostAPICalls loses every seventh write before it is done, and of every other seventh the answer.
func TestCheckLostAPICalls(t *testing.T) {
	var calls atomic.Int64
	lose := func(do func() error) error {
		lost := apierrors.NewTimeoutError("lost by the test", 0)
		switch calls.Add(1) % 7 {
		case 0:
			return lost
		case 3:
			if err := do(); err != nil {
				return err
			}
			return lost
		}
		return do()
	}
	f := newFleet(t, links(map[string]float64{"lost-1": 0.1}))
	start(t, f, &clock{}, &clock{}, func(o *ctrl.Options) {
		o.NewClient = func(config *rest.Config, options client.Options) (client.Client, error) {
			c, err := client.NewWithWatch(config, options)
			if err != nil {
				return nil, err
			}
			return interceptor.NewClient(c, interceptor.Funcs{
				Create: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.CreateOption) error {
					return lose(func() error { return c.Create(ctx, o, opts...) })
				},
				Update: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.UpdateOption) error {
					return lose(func() error { return c.Update(ctx, o, opts...) })
				},
				Delete: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.DeleteOption) error {
					return lose(func() error { return c.Delete(ctx, o, opts...) })
				},
				SubResourceApply: func(ctx context.Context, c client.Client, sub string, o runtime.ApplyConfiguration, opts ...client.SubResourceApplyOption) error {
					return lose(func() error { return c.SubResource(sub).Apply(ctx, o, opts...) })
				},
			}), nil
		}
	})
	newNodes(t, "lost", 6)
	c := ended(t, newCheck(t, "lost", nil))
	if bad := found(c, "Fail"); !slices.Equal(bad, []string{"lost-1"}) || *c.Status.Summary.Passed != 5 {
		t.Errorf("failed %v: %+v", bad, c.Status)
	}
	once(t, f.all())
	if runs := f.all(); int32(len(runs)) != *c.Status.Summary.Runs {
		t.Errorf("%d runs were made, %d are recorded", len(runs), *c.Status.Summary.Runs)
	}
	if n := calls.Load(); n < 20 {
		t.Errorf("only %d writes went through here", n)
	}
}

func TestCheckDeletedNodeIsInconclusive(t *testing.T) {
	f := newFleet(t, func(nodes []string) ending {
		if slices.Contains(nodes, "gone-1") {
			return ending{running: true} // what a lost node's kubelet says last
		}
		return links(nil)(nodes)
	})
	start(t, f, &clock{}, &clock{})
	newNodes(t, "gone", 6)
	c := newCheck(t, "gone", func(s *evenkeel.NetworkCheckSpec) { s.Stages = []evenkeel.Stage{"Pairs"} })
	eventually(t, "the node's pair runs", func(ctx context.Context) (bool, error) {
		return slices.ContainsFunc(f.all(), func(r madeRun) bool { return slices.Contains(r.nodes, "gone-1") }), nil
	})
	if err := admin.Delete(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gone-1"}}); err != nil {
		t.Fatal(err)
	}
	c = ended(t, c)
	if u := found(c, "Inconclusive"); !slices.Equal(u, []string{"gone-1"}) || len(found(c, "Fail")) != 0 || *c.Status.Summary.Passed != 5 {
		t.Errorf("%+v", c.Status)
	}
	if !strings.Contains(c.Status.Message, "node gone-1 was deleted") {
		t.Errorf("message %q", c.Status.Message)
	}
}

func TestCheckUsesMPIJobs(t *testing.T) {
	f := newFleet(t, links(map[string]float64{"mpi-1": 0.1}))
	start(t, f, &clock{}, &clock{})
	newNodes(t, "mpi", 4)
	c := ended(t, newCheck(t, "mpi", func(s *evenkeel.NetworkCheckSpec) { s.Runner.Launcher = evenkeel.LauncherAuto }))
	if bad := found(c, "Fail"); c.Status.Launcher != evenkeel.LauncherMPIJob || !slices.Equal(bad, []string{"mpi-1"}) {
		t.Errorf("launcher %s, failed %v: %+v", c.Status.Launcher, bad, c.Status)
	}
	left := &unstructured.UnstructuredList{}
	left.SetGroupVersionKind(jobs.MPIJobKind.GroupVersion().WithKind("MPIJobList"))
	if err := admin.List(t.Context(), left, client.InNamespace(namespace)); err != nil || len(left.Items) > 0 {
		t.Errorf("%d MPIJobs are left (%v)", len(left.Items), err)
	}
	once(t, f.all())
}

func TestCheckMissingDriverIsInconclusive(t *testing.T) {
	log, err := os.ReadFile(filepath.Join("..", "..", "internal", "preflight", "ncclout", "testdata", "nccl-tests-no-driver.log"))
	if err != nil {
		t.Fatal(err)
	}
	f := newFleet(t, func([]string) ending { return ending{failure: "it ends with an error", log: string(log)} })
	start(t, f, &clock{}, &clock{})
	newNodes(t, "driver", 4)
	c := ended(t, newCheck(t, "driver", func(s *evenkeel.NetworkCheckSpec) {
		gpus := int32(1)
		s.Stages = []evenkeel.Stage{evenkeel.StagePairs}
		s.Runner = evenkeel.RunnerSpec{Type: evenkeel.RunnerNCCLTests, Image: "registry.example.com/nccl-tests:1", GPUsPerNode: &gpus}
	}))
	if s := c.Status; s.Verdict != evenkeel.VerdictInconclusive || s.BadNodes != "" || len(found(c, "Inconclusive")) != 4 || !strings.Contains(s.Message, "no usable GPU driver: ") {
		t.Errorf("%+v", s)
	}
}

func TestCheckNotRunnable(t *testing.T) {
	f := newFleet(t, links(nil))
	start(t, f, &clock{}, &clock{})
	newNodes(t, "refused", 2)
	for reason, change := range map[string]func(*evenkeel.NetworkCheck){
		"WrongNamespace": func(c *evenkeel.NetworkCheck) { c.Namespace = "default" },
		"NoProfile":      func(c *evenkeel.NetworkCheck) { c.Spec.ProfileName = "another" },
		"NoNodes":        func(c *evenkeel.NetworkCheck) { c.Spec.Nodes.Selector.MatchLabels["pool"] = "none" },
	} {
		c := &evenkeel.NetworkCheck{ObjectMeta: metav1.ObjectMeta{Name: ""}}
		c.GenerateName, c.Namespace = "refused-", namespace
		c.Spec.Nodes.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"pool": "refused"}}
		c.Spec.Runner.Type = evenkeel.RunnerBench
		change(c)
		if err := admin.Create(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		c = ended(t, c)
		if complete := meta.FindStatusCondition(c.Status.Conditions, evenkeel.ConditionComplete); c.Status.Verdict != evenkeel.VerdictInconclusive || complete.Reason != reason || c.Status.Message == "" {
			t.Errorf("%s: %+v", reason, c.Status)
		}
	}
}

func TestCheckForbiddenPodsAreInconclusive(t *testing.T) {
	none := corev1.ResourceList{"count/jobs.batch": resource.MustParse("0")}
	quota := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "none"}, Spec: corev1.ResourceQuotaSpec{Hard: none}}
	if err := admin.Create(t.Context(), quota); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := admin.Delete(context.Background(), quota); err != nil {
			t.Error(err)
		}
	}()
	// What the quota controller does.
	quota.Status = corev1.ResourceQuotaStatus{Hard: none, Used: none}
	if err := admin.Status().Update(t.Context(), quota); err != nil {
		t.Fatal(err)
	}
	f := newFleet(t, links(nil))
	eventually(t, "the quota counts", func(ctx context.Context) (bool, error) {
		job := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "probe"}}
		job.Spec.Template.Spec = corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, Containers: []corev1.Container{{Name: "c", Image: "c"}}}
		err := admin.Create(ctx, job, client.DryRunAll)
		return apierrors.IsForbidden(err), nil
	})
	start(t, f, &clock{}, &clock{})
	newNodes(t, "quota", 4)
	c := ended(t, newCheck(t, "quota", nil))
	if s := c.Status; s.Verdict != evenkeel.VerdictInconclusive || len(found(c, "Inconclusive")) != 4 || !strings.Contains(s.Message, "exceeded quota") {
		t.Errorf("%+v", s)
	}
}

func TestCheckWritesNothingAtRest(t *testing.T) {
	f := newFleet(t, links(map[string]float64{"rest-0": 0.1}))
	stop := start(t, f, &clock{}, &clock{})
	newNodes(t, "rest", 4)
	p := newPolicy(t, "rest", nil)
	carries(t, "rest-0", "False TooSlow|unhealthy|")
	for _, good := range []string{"rest-1", "rest-2", "rest-3"} {
		carries(t, good, "True Proven|healthy|")
	}
	waitPolicy(t, p, "no check runs", func() bool {
		return p.Status.RunningCheck == "" && p.Status.Healthy != nil && *p.Status.Healthy == 3 && *p.Status.Unhealthy == 1
	})
	stop()
	versions := func() map[string]string {
		all := map[string]string{}
		for _, list := range []client.ObjectList{&corev1.NodeList{}, &evenkeel.NetworkCheckList{}, &evenkeel.NetworkCheckPolicyList{}, &evenkeel.NodeNetworkHealthList{}, &corev1.ConfigMapList{}, &batchv1.JobList{}} {
			if err := admin.List(t.Context(), list); err != nil {
				t.Fatal(err)
			}
			if err := meta.EachListItem(list, func(o runtime.Object) error {
				object := o.(client.Object)
				all[fmt.Sprintf("%T %s", o, object.GetName())] = object.GetResourceVersion()
				return nil
			}); err != nil {
				t.Fatal(err)
			}
		}
		return all
	}
	before := versions()
	// A controller that starts reconciles everything. A check that it ran marks the end of that.
	start(t, f, &clock{}, &clock{})
	newNodes(t, "probe", 2)
	ended(t, newCheck(t, "probe", func(s *evenkeel.NetworkCheckSpec) { s.Stages = []evenkeel.Stage{"Capacity"} }))
	eventually(t, "the check's results have arrived", func(ctx context.Context) (bool, error) {
		err := admin.Get(ctx, client.ObjectKey{Name: "probe-1"}, &evenkeel.NodeNetworkHealth{})
		return err == nil, client.IgnoreNotFound(err)
	})
	after := versions()
	for name, version := range before {
		if after[name] != version {
			t.Errorf("%s was written: %s, then %q", name, version, after[name])
		}
	}
}

func TestCheckTTL(t *testing.T) {
	f := newFleet(t, links(nil))
	time := &clock{}
	start(t, f, time, &clock{})
	newNodes(t, "ttl", 2)
	c := ended(t, newCheck(t, "ttl", func(s *evenkeel.NetworkCheckSpec) {
		ttl := int32(1)
		s.TTLSecondsAfterFinished = &ttl
	}))
	eventually(t, "the check is gone", func(ctx context.Context) (bool, error) {
		err := admin.Get(ctx, client.ObjectKeyFromObject(c), c)
		return err != nil, client.IgnoreNotFound(err)
	})
}

// The profile's image is that of its checks, for as long as each of them runs.
func TestCheckImageOfProfile(t *testing.T) {
	profile := &evenkeel.NetworkProfile{ObjectMeta: metav1.ObjectMeta{Name: "with-image"}}
	profile.Spec.Plugin = evenkeel.PluginSpec{Image: pluginName, Delivery: evenkeel.DeliveryImageVolume}
	profile.Spec.Check.Image = "registry.example.com/bench:of-profile"
	if err := admin.Create(t.Context(), profile); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := admin.Delete(context.Background(), profile); err != nil {
			t.Error(err)
		}
	})
	f := newFleet(t, links(nil))
	start(t, f, &clock{}, &clock{})
	newNodes(t, "image", 2)
	images := func(check string) map[string]bool {
		var list batchv1.JobList
		if err := admin.List(t.Context(), &list, client.InNamespace(namespace), client.MatchingLabels{evenkeel.CheckKey: check}); err != nil {
			t.Fatal(err)
		}
		all := map[string]bool{}
		for _, j := range list.Items {
			all[j.Spec.Template.Spec.Containers[0].Image] = true
		}
		return all
	}
	runsWith := func(check, image string) {
		t.Helper()
		eventually(t, check+" runs with "+image, func(context.Context) (bool, error) {
			all := images(check)
			if len(all) > 0 && (len(all) > 1 || !all[image]) {
				t.Fatalf("%s runs with %v, want %s", check, slices.Collect(maps.Keys(all)), image)
			}
			return len(all) == 1, nil
		})
	}
	f.hold.Store(true)
	with := func(name, own string) *evenkeel.NetworkCheck {
		c := &evenkeel.NetworkCheck{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
		c.Spec.Nodes.Names, c.Spec.ProfileName = []string{"image-0", "image-1"}, profile.Name
		c.Spec.Runner = evenkeel.RunnerSpec{Type: evenkeel.RunnerBench, Launcher: evenkeel.LauncherIndexedJob, Image: own}
		c.Spec.Stages = []evenkeel.Stage{evenkeel.StageLocal, evenkeel.StagePairs}
		if err := admin.Create(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := admin.Delete(context.Background(), c); err != nil {
				t.Error(err)
			}
		})
		return c
	}
	named := with("image-named", "registry.example.com/bench:own")
	runsWith(named.Name, "registry.example.com/bench:own")
	unnamed := with("image-unnamed", "")
	runsWith(unnamed.Name, "registry.example.com/bench:of-profile")

	profile.Spec.Check.Image = "registry.example.com/bench:later"
	if err := admin.Update(t.Context(), profile); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the check names its report", func(ctx context.Context) (bool, error) {
		err := admin.Get(ctx, client.ObjectKeyFromObject(unnamed), unnamed)
		return unnamed.Status.ReportName != "", err
	})
	record, err := report.Read(t.Context(), admin, namespace, unnamed.Status.ReportName)
	if err != nil || record.Record.Image != "registry.example.com/bench:of-profile" {
		t.Errorf("the report has the image %q, %v", record.Record.Image, err)
	}
	f.hold.Store(false)
	var later bool
	err = wait.PollUntilContextTimeout(t.Context(), 5*time.Millisecond, waitTimeout, true, func(ctx context.Context) (bool, error) {
		later = later || images(unnamed.Name)["registry.example.com/bench:later"]
		err := admin.Get(ctx, client.ObjectKeyFromObject(unnamed), unnamed)
		return meta.IsStatusConditionTrue(unnamed.Status.Conditions, evenkeel.ConditionComplete), err
	})
	if err != nil || later {
		t.Errorf("a run of a check that had begun has the profile's later image: %t, %v", later, err)
	}
}
