// Package networkcheck runs NetworkChecks: it starts the runs that package preflight plans, records their results, and
// cleans up.
//
// The state of a check is in the record of its report and in its Jobs. A result is recorded before its Job is deleted.
// The record is written with a precondition, and read again when that fails. Names of Jobs follow from the planned run.
// So no run happens twice, whenever the controller stops.
package networkcheck

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/accelerator"
	"evenkeel.dev/evenkeel/operator/internal/inject"
	"evenkeel.dev/evenkeel/operator/internal/kube/debounce"
	"evenkeel.dev/evenkeel/operator/internal/metrics"
	"evenkeel.dev/evenkeel/operator/internal/nodeos"
	"evenkeel.dev/evenkeel/operator/internal/nodeuse"
	"evenkeel.dev/evenkeel/operator/internal/preflight"
	"evenkeel.dev/evenkeel/operator/internal/preflight/jobs"
	"evenkeel.dev/evenkeel/operator/internal/preflight/pairing"
	"evenkeel.dev/evenkeel/operator/internal/preflight/report"
)

const (
	fieldOwner = client.FieldOwner("evenkeel-networkcheck")
	// expectedNetwork has to carry every run. It is the name that the plugin reports to NCCL.
	expectedNetwork = "Evenkeel"
	// concurrentChecks is the number of checks that are reconciled at a time; each waits for the API server only.
	concurrentChecks = 4
	// concurrentRequests is the number of requests at a time for the runs of one check: of a large one, hundreds start and
	// end at once.
	concurrentRequests = 16
	// debounceDelay is how long ended runs are collected, so that their results are recorded with one write.
	debounceDelay = 300 * time.Millisecond
	// writeGrace is how long after a check's timeout its report is tried to be written.
	writeGrace = time.Minute
	// overdueAfter is how long after its timeout a check is ended whose objects cannot be read or written.
	overdueAfter = 5 * time.Minute
	// A short maximum, so that checks continue soon after an outage of the API server.
	firstRetry, lastRetry = 5 * time.Millisecond, 15 * time.Second
)

// Reconciler runs the NetworkChecks of one namespace.
type Reconciler struct {
	// Namespace is the one whose checks run: its administrators may run images on any node. Checks in other namespaces end
	// with the reason WrongNamespace.
	Namespace string
	// BenchImage, NCCLTestsImage and RCCLTestsImage are the images of the runners for checks that name none.
	BenchImage, NCCLTestsImage, RCCLTestsImage string
	// ImagePullSecrets are the names of the Secrets to pull the runner's image with.
	ImagePullSecrets []string
	// PriorityClass is the priority class of the checks' pods. If empty, the cluster's default applies.
	PriorityClass string
	// Use reports which nodes are in use.
	Use *nodeuse.Tracker
	// Logs reads the logs with the results.
	Logs LogReader
	// Clock is replaced in tests. Poll is the interval at which the pods of running checks are read.
	Clock clock.PassiveClock
	Poll  time.Duration
	// Delays scales how long ended runs are collected.
	Delays debounce.Scale

	client  client.Client
	live    client.Reader
	reports reportCache
	// selecting is held while the nodes of a check are in memory.
	selecting sync.Mutex
}

// Cached restricts the cache to Jobs of checks, in the one namespace.
func Cached(namespace string) map[client.Object]cache.ByObject {
	ours, err := labels.NewRequirement(evenkeel.CheckKey, selection.Exists, nil)
	if err != nil {
		panic(err) // the key is a constant
	}
	return map[client.Object]cache.ByObject{&batchv1.Job{}: {
		Namespaces: map[string]cache.Config{namespace: {LabelSelector: labels.NewSelector().Add(*ours)}},
	}}
}

// SetupWithManager starts the controller with the manager.
func (c *Reconciler) SetupWithManager(mgr manager.Manager) error {
	c.client, c.live = mgr.GetClient(), mgr.GetAPIReader()
	// These are watched too: reading kinds that are not watched is an error.
	for _, object := range []client.Object{&corev1.Node{}, &evenkeel.NetworkProfile{}, &evenkeel.NodeNetworkHealth{}, &evenkeel.NetworkCheckPolicy{}} {
		if _, err := mgr.GetCache().GetInformer(context.Background(), object); err != nil {
			return fmt.Errorf("watch %T: %w", object, err)
		}
	}
	return builder.ControllerManagedBy(mgr).Named("networkcheck").
		For(&evenkeel.NetworkCheck{}).
		Watches(&batchv1.Job{}, debounce.Handler(c.Delays.Of(debounceDelay), handler.EnqueueRequestForOwner(mgr.GetScheme(), mgr.GetRESTMapper(), &evenkeel.NetworkCheck{}, handler.OnlyControllerOwner()))).
		WatchesRawSource(c.Use.Source(nil)). // no requests: the pods of runs are polled anyway
		WithOptions(controller.Options{
			MaxConcurrentReconciles: concurrentChecks,
			RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](firstRetry, lastRetry),
		}).
		Complete(c)
}

// Reconcile advances a check as far as possible now.
func (c *Reconciler) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	object := &evenkeel.NetworkCheck{}
	if err := c.client.Get(ctx, request.NamespacedName, object); err != nil {
		object.Namespace, object.Name = request.Namespace, request.Name
		c.reports.drop(object)
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if object.DeletionTimestamp != nil {
		return reconcile.Result{}, nil // garbage collection deletes what it owns
	}
	if meta.IsStatusConditionTrue(object.Status.Conditions, evenkeel.ConditionComplete) {
		return c.deleteExpired(ctx, object)
	}
	if object.Namespace != c.Namespace {
		return reconcile.Result{}, c.setNotRunnable(ctx, object, "WrongNamespace", fmt.Sprintf("checks run in namespace %s: create this one there", c.Namespace))
	}
	nodes := 0
	if n := object.Status.Summary.Nodes; n != nil {
		nodes = int(*n)
	}
	check := jobs.Check{Object: object, Options: object.Spec.WithDefaultsFor(nodes), ImagePullSecrets: c.ImagePullSecrets, PriorityClass: c.PriorityClass}
	result, err := c.advance(ctx, check)
	overdue := object.CreationTimestamp.Add(time.Duration(*check.Options.TimeoutSeconds)*time.Second + overdueAfter)
	if err != nil && !c.Clock.Now().Before(overdue) {
		c.reports.drop(object)
		return reconcile.Result{}, c.setNotRunnable(ctx, object, "CannotContinue", err.Error())
	}
	return result, err
}

// advance advances a check that runs.
func (c *Reconciler) advance(ctx context.Context, check jobs.Check) (reconcile.Result, error) {
	report, err := c.loadReport(ctx, &check)
	if err != nil || report == nil {
		return reconcile.Result{}, err
	}
	return c.reconcileRuns(ctx, check, report)
}

// deleteExpired deletes a check that has ended, after its ttlSecondsAfterFinished.
func (c *Reconciler) deleteExpired(ctx context.Context, object *evenkeel.NetworkCheck) (reconcile.Result, error) {
	if object.Spec.TTLSecondsAfterFinished == nil || object.Status.CompletionTime == nil {
		return reconcile.Result{}, nil
	}
	left := object.Status.CompletionTime.Add(time.Duration(*object.Spec.TTLSecondsAfterFinished) * time.Second).Sub(c.Clock.Now())
	if left > 0 {
		return reconcile.Result{RequeueAfter: left}, nil
	}
	if err := c.client.Delete(ctx, object, client.Preconditions{UID: &object.UID}); client.IgnoreNotFound(err) != nil {
		return reconcile.Result{}, fmt.Errorf("delete NetworkCheck %s: %w", object.Name, err)
	}
	return reconcile.Result{}, nil
}

// loadReport returns the check's report, which it creates if there is none. It is nil if the check cannot be run; the
// status then says why. The reports of running checks are kept in memory until a write says that somebody else changed
// them.
func (c *Reconciler) loadReport(ctx context.Context, check *jobs.Check) (*report.Report, error) {
	r := c.reports.get(check.Object)
	if r == nil {
		var err error
		r, err = report.Read(ctx, c.live, check.Object.Namespace, check.ReportName())
		var unreadable *report.UnreadableError
		switch {
		case apierrors.IsNotFound(err):
			if r, err = c.createReport(ctx, check); err != nil || r == nil {
				return nil, err
			}
		case errors.As(err, &unreadable):
			return nil, c.setNotRunnable(ctx, check.Object, "RecordUnreadable", err.Error())
		case err != nil:
			return nil, fmt.Errorf("NetworkCheck %s: %w", check.Object.Name, err)
		}
		if owner := r.Owner(); owner == nil || owner.UID != check.Object.UID {
			return nil, c.setNotRunnable(ctx, check.Object, "ReportNameTaken", fmt.Sprintf("the report needs the name of ConfigMap %s, which belongs to another object", r.Name()))
		}
		c.reports.put(check.Object, r)
	}
	r.Record.SetRunner(&check.Options.Runner)
	if check.Options.Runner.Image == "" {
		installed, _ := c.defaultImage(check.Options.Runner.Type)
		check.Options.Runner.Image = cmp.Or(r.Record.Image, installed)
	}
	var err error
	check.Plugin, err = inject.FromPod(map[string]string{evenkeel.ProfileKey: check.Options.ProfileName}, r.Record.Plugin)
	if err != nil {
		return nil, c.setNotRunnable(ctx, check.Object, "RecordUnreadable", fmt.Sprintf("ConfigMap %s was changed: %v", r.Name(), err))
	}
	return r, nil
}

// defaultImage is the image of a runner for checks that name none, and the chart's value for it.
func (c *Reconciler) defaultImage(runner evenkeel.RunnerType) (image, value string) {
	switch runner {
	case evenkeel.RunnerNCCLTests:
		return c.NCCLTestsImage, "preflight.ncclTestsImage"
	case evenkeel.RunnerRCCLTests:
		return c.RCCLTestsImage, "preflight.rcclTestsImage"
	}
	return c.BenchImage, "preflight.benchImage"
}

// installedGPURunners are the runners that use GPUs and that the installation has an image of.
func (c *Reconciler) installedGPURunners() []evenkeel.RunnerType {
	return slices.DeleteFunc([]evenkeel.RunnerType{evenkeel.RunnerNCCLTests, evenkeel.RunnerRCCLTests}, func(r evenkeel.RunnerType) bool {
		image, _ := c.defaultImage(r)
		return image == ""
	})
}

// imageOf is the image of the runs: the check's own, else the profile's, else the installation's.
func (c *Reconciler) imageOf(runner evenkeel.RunnerSpec, profile *evenkeel.NetworkProfile) string {
	installed, _ := c.defaultImage(runner.Type)
	ofProfile := ""
	if runner.Type == evenkeel.RunnerBench {
		ofProfile = profile.Spec.Check.Image
	}
	return cmp.Or(runner.Image, ofProfile, installed)
}

// createReport selects the nodes, pins the plugin and records both.
func (c *Reconciler) createReport(ctx context.Context, check *jobs.Check) (*report.Report, error) {
	profile := &evenkeel.NetworkProfile{}
	err := c.client.Get(ctx, client.ObjectKey{Name: check.Options.ProfileName}, profile)
	if apierrors.IsNotFound(err) {
		// The cache may be behind: the profile may have been applied together with the check.
		err = c.live.Get(ctx, client.ObjectKey{Name: check.Options.ProfileName}, profile)
	}
	switch {
	case apierrors.IsNotFound(err):
		return nil, c.setNotRunnable(ctx, check.Object, "NoProfile", fmt.Sprintf("there is no NetworkProfile named %q", check.Options.ProfileName))
	case err != nil:
		return nil, fmt.Errorf("read NetworkProfile %s: %w", check.Options.ProfileName, err)
	}
	check.Plugin = inject.Resolve(profile, "").InClear() // a check sends nothing of anybody's
	nodes, err := c.selectNodes(ctx, check)
	if err != nil {
		return nil, err
	}
	runner := &check.Options.Runner
	runner.Type, runner.GPUsPerNode = preflight.ChooseRunner(check.Options, c.installedGPURunners(), nodes)
	image := c.imageOf(*runner, profile)
	if image == "" {
		_, value := c.defaultImage(check.Options.Runner.Type)
		return nil, c.setNotRunnable(ctx, check.Object, "NoImage", "spec.runner.image is not set, and Evenkeel was installed without "+value)
	}
	runner.Image = image
	launcher, err := c.resolveLauncher(ctx, check.Object.Namespace, *runner)
	if err != nil {
		return nil, err
	}
	if launcher == "" {
		why := "the cluster serves no MPIJob (kubeflow.org/v2beta1): install the mpi-operator, or set runner.launcher to IndexedJob"
		if tests, ok := jobs.GPURunners[runner.Type]; ok {
			why += "; the image then needs the programs in " + tests.WithoutMPIRun
		}
		return nil, c.setNotRunnable(ctx, check.Object, "NoMPIJob", why)
	}
	if why := rdmaProblem(check, profile, launcher); why != "" {
		return nil, c.setNotRunnable(ctx, check.Object, "NoRDMA", why)
	}
	if len(nodes) == 0 {
		return nil, c.setNotRunnable(ctx, check.Object, "NoNodes", "no node matches spec.nodes")
	}
	record := &preflight.Record{Started: c.Clock.Now().UTC().Truncate(time.Second), Launcher: launcher, Image: image, Plugin: check.Plugin.Annotations(), Nodes: nodes, Runner: runner.Type, GPUsPerNode: runner.GPUsPerNode}
	if profile.Spec.Transport.Mode == evenkeel.TransportRDMA && check.Options.Runner.Type == evenkeel.RunnerBench {
		record.Transport = preflight.TransportRDMA
	}
	if record.Pools, err = c.describePools(ctx, check, record); err != nil {
		return nil, err
	}
	r, err := report.Create(ctx, c.client, c.live, check.Meta(check.ReportName()), record)
	if isPermanent(err) {
		return nil, c.setNotRunnable(ctx, check.Object, reasonNotWritten, err.Error())
	}
	if err != nil {
		return nil, fmt.Errorf("NetworkCheck %s: %w", check.Object.Name, err)
	}
	c.recordEvent(ctx, check.Object, corev1.EventTypeNormal, eventStarted, fmt.Sprintf("%d nodes selected; runs of %s are started by %s and use the plugin of NetworkProfile %s", len(nodes), runner.Type, launcher, profile.Name))
	return r, nil
}

// rdmaProblem explains why stage RDMA cannot run, if it was requested; empty if it can.
func rdmaProblem(check *jobs.Check, profile *evenkeel.NetworkProfile, launcher evenkeel.Launcher) string {
	device := check.Plugin.RDMA
	switch {
	case !slices.Contains(check.Options.Stages, evenkeel.StageRDMA):
		return ""
	case device == nil:
		why := "its transport.mode is TCP"
		if c := meta.FindStatusCondition(profile.Status.Conditions, evenkeel.ConditionRDMA); c != nil {
			why = c.Message
		}
		return fmt.Sprintf("stage RDMA: jobs of NetworkProfile %s get no RDMA device: %s", profile.Name, why)
	case device.LockMemory && launcher == evenkeel.LauncherMPIJob:
		return fmt.Sprintf("stage RDMA: NetworkProfile %s lets containers lock memory by a capability, which is effective for root only, and MPIJobs do not run as root: set runner.launcher to IndexedJob", profile.Name)
	}
	return ""
}

// resolveLauncher resolves Auto. It returns "" if the cluster lacks the launcher that was requested, or that the image
// is for: nccl-tests and rccl-tests of other images may be linked with an MPI that needs mpirun. The installation's
// image of rccl-tests has no mpirun.
func (c *Reconciler) resolveLauncher(ctx context.Context, namespace string, runner evenkeel.RunnerSpec) (evenkeel.Launcher, error) {
	installed, _ := c.defaultImage(runner.Type)
	switch {
	case runner.Launcher == evenkeel.LauncherIndexedJob:
		return runner.Launcher, nil
	case runner.Launcher == evenkeel.LauncherAuto && runner.Type == evenkeel.RunnerRCCLTests && runner.Image == installed:
		return evenkeel.LauncherIndexedJob, nil
	}
	// A mapper remembers kinds that the cluster has not served since the mpi-operator was removed.
	_, err := c.listMPIJobs(ctx, client.InNamespace(namespace), client.Limit(1))
	switch {
	case err == nil:
		return evenkeel.LauncherMPIJob, nil
	case !isUnserved(err):
		return "", fmt.Errorf("discover MPIJob: %w", err)
	case runner.Launcher == evenkeel.LauncherMPIJob, runner.Type.UsesGPUs() && runner.Image != installed:
		return "", nil
	}
	return evenkeel.LauncherIndexedJob, nil
}

// isUnserved reports whether the API server serves no such kind, or has ceased to.
func isUnserved(err error) bool {
	return meta.IsNoMatchError(err) || apierrors.IsNotFound(err)
}

// selectNodes lists the check's nodes and, for stage Capacity, the findings about each. It reads from the API server,
// since the cache has only a part of each node. One check at a time does: all nodes of a large cluster take a good part
// of the memory.
func (c *Reconciler) selectNodes(ctx context.Context, check *jobs.Check) ([]preflight.Node, error) {
	c.selecting.Lock()
	defer c.selecting.Unlock()
	names := check.Object.Spec.Nodes.Names
	list, err := c.readNodes(ctx, check.Object.Spec.Nodes)
	if err != nil {
		return nil, err
	}
	dra, err := c.listDRA(ctx, list, check.Options.Stages)
	if err != nil {
		return nil, err
	}
	found := map[string]bool{}
	var nodes []preflight.Node
	tolerations := jobs.Tolerations(check.Options.Runner.Tolerations)
	for i := range list {
		node := &list[i]
		if names == nil && nodeos.IsWindows(node) {
			continue
		}
		found[node.Name] = true
		n := preflight.Node{Name: node.Name, UID: node.UID, Pool: node.Labels[check.Options.PoolLabel]}
		if slices.Contains(check.Options.Stages, evenkeel.StageCapacity) {
			n.Verdict, n.Reason, n.Message = preflight.Capacity(node, tolerations, dra[node.Name])
		}
		if user := c.Use.User(node.Name); user != "" && n.Verdict == "" && check.Options.BusyNodes == evenkeel.BusyNodesSkip {
			n.Verdict, n.Reason, n.Message = evenkeel.VerdictInconclusive, preflight.ReasonInUse, inUseMessage(node.Name, user)
		}
		if device := check.Plugin.RDMA; device != nil {
			offered := node.Status.Allocatable[corev1.ResourceName(device.Resource)]
			n.RDMA = offered.Sign() > 0
		}
		n.GPUs = map[evenkeel.RunnerType]int32{}
		for runner, tests := range jobs.GPURunners {
			n.GPUs[runner] = int32(accelerator.WholeGPUs(node, tests.GPU))
		}
		nodes = append(nodes, n)
	}
	for _, name := range names {
		if !found[name] {
			nodes = append(nodes, preflight.Node{Name: name, Verdict: evenkeel.VerdictInconclusive, Reason: preflight.ReasonNodeNotFound, Message: "there is no node of this name"})
		}
	}
	slices.SortFunc(nodes, func(a, b preflight.Node) int {
		return strings.Compare(a.Name, b.Name)
	})
	return nodes, nil
}

func inUseMessage(node, user string) string {
	return fmt.Sprintf("pod %s uses accelerators of %s", user, node)
}

// listDRA returns the GPUs that ResourceSlices offer, if a node offers none in another way.
func (c *Reconciler) listDRA(ctx context.Context, nodes []corev1.Node, stages []evenkeel.Stage) (map[string]accelerator.DRA, error) {
	if !slices.Contains(stages, evenkeel.StageCapacity) || !slices.ContainsFunc(nodes, func(n corev1.Node) bool { return !accelerator.OffersResource(&n) }) {
		return nil, nil
	}
	return accelerator.ListDRA(ctx, c.live)
}

// OptionsOf converts the spec of a check for package preflight.
func OptionsOf(object *evenkeel.NetworkCheck) preflight.Options {
	spec := object.Spec.WithDefaults()
	o := preflight.Options{Stages: spec.Stages, Network: expectedNetwork}
	if spec.Rails != nil {
		o.Rails = int(*spec.Rails)
	}
	hash := fnv.New64a()
	_, _ = hash.Write([]byte(object.UID)) // a hash never fails to write
	o.Seed = hash.Sum64()
	t := spec.Thresholds
	if t.MinBusBandwidth != nil {
		o.Thresholds.MinBusBW = t.MinBusBandwidth.AsApproximateFloat64() / 1e9
	}
	if t.MinPercentOfMedian != nil {
		o.Thresholds.MinPercentOfMedian = float64(*t.MinPercentOfMedian)
	}
	o.Thresholds.PoolMinBusBW = map[string]float64{}
	for _, pool := range t.Pools {
		o.Thresholds.PoolMinBusBW[pool.Name] = pool.MinBusBandwidth.AsApproximateFloat64() / 1e9
	}
	return o
}

// reconcileRuns records the runs that have ended, starts the next ones, and finishes the check if there are none.
func (c *Reconciler) reconcileRuns(ctx context.Context, check jobs.Check, r *report.Report) (reconcile.Result, error) {
	options, record := OptionsOf(check.Object), r.Record
	sized := check.Object.Spec.WithDefaultsFor(len(record.Nodes))
	check.Options.MaxConcurrentNodes, check.Options.TimeoutSeconds = sized.MaxConcurrentNodes, sized.TimeoutSeconds
	deadline := record.Started.Add(time.Duration(*check.Options.TimeoutSeconds) * time.Second)
	if record.Ended == "" && !c.Clock.Now().Before(deadline) {
		record.Ended = fmt.Sprintf("the check's timeout of %d s expired", *check.Options.TimeoutSeconds)
	}
	existing, err := c.listJobs(ctx, check, record.Launcher)
	if err != nil {
		return reconcile.Result{}, err
	}
	decision := preflight.Decide(options, record)
	running, done, err := c.collectResults(ctx, check, decision.Pending, existing, r)
	if err != nil {
		return reconcile.Result{}, err
	}
	if err := c.deleteObjects(ctx, done...); err != nil {
		return reconcile.Result{}, err
	}
	decision = preflight.Decide(options, record)
	if len(decision.Pending) == 0 {
		return reconcile.Result{}, c.finish(ctx, check, r, decision)
	}
	refused, err := c.startRuns(ctx, check, r, decision.Pending, running)
	if err != nil {
		return reconcile.Result{}, err
	}
	if refused {
		return reconcile.Result{RequeueAfter: time.Millisecond}, c.saveReport(ctx, check, r)
	}
	if err := c.updateProgress(ctx, check, record, decision); err != nil {
		return reconcile.Result{}, err
	}
	return reconcile.Result{RequeueAfter: min(c.Poll, max(time.Millisecond, deadline.Sub(c.Clock.Now())))}, nil
}

// collectResults records the results of ended runs. It returns the runs that are still running, and the Jobs to delete.
func (c *Reconciler) collectResults(ctx context.Context, check jobs.Check, works []preflight.PlannedRun, existing map[string]runJob, r *report.Report) (running []preflight.PlannedRun, done []client.Object, err error) {
	var pods map[string][]corev1.Pod
	if len(existing) > 0 {
		if pods, err = c.listPods(ctx, check); err != nil {
			return nil, nil, err
		}
	}
	type started struct {
		preflight.PlannedRun
		job    runJob
		result *preflight.Measurement
	}
	var runs []started
	for _, w := range works {
		if j, there := existing[check.RunName(w)]; there {
			runs = append(runs, started{PlannedRun: w, job: j})
			delete(existing, j.GetName())
		}
	}
	var requests errgroup.Group
	requests.SetLimit(concurrentRequests)
	for i := range runs {
		requests.Go(func() (err error) {
			s := &runs[i]
			if s.result, err = c.readResult(ctx, check, r.Record, s.PlannedRun, s.job, pods[s.job.GetName()]); err != nil {
				// The other runs continue; this one has its timeout.
				log.FromContext(ctx).Info("cannot read a result yet", "run", s.job.GetName(), "reason", err.Error())
			}
			return nil
		})
	}
	_ = requests.Wait() // none returns an error
	for _, s := range runs {
		if s.result == nil {
			running = append(running, s.PlannedRun)
			continue
		}
		if r.Record.Add(s.PlannedRun, *s.result) {
			metrics.RunEnded(s.Stage, s.result.Outcome)
		}
		done = append(done, s.job.Object)
	}
	for _, j := range existing {
		done = append(done, j.Object)
	}
	return running, done, c.saveReport(ctx, check, r)
}

// saveReport writes what was added to the record. A record that can never be written ends the check: it concludes with
// what it knows. After another error the report is read again.
func (c *Reconciler) saveReport(ctx context.Context, check jobs.Check, r *report.Report) error {
	if c.reports.unwritable(check.Object) {
		return nil
	}
	err := r.Save(ctx, c.client)
	if err == nil {
		return nil
	}
	if c.gaveUp(check, r, err) {
		c.reports.setUnwritable(check.Object)
		r.Record.Ended = cmp.Or(r.Record.Ended, err.Error())
		return nil
	}
	c.reports.drop(check.Object)
	return fmt.Errorf("NetworkCheck %s: %w", check.Object.Name, err)
}

// gaveUp reports whether the report will not be written any more after this error: it would fail again, or the check's
// time is over.
func (c *Reconciler) gaveUp(check jobs.Check, r *report.Report, err error) bool {
	late := r.Record.Started.Add(time.Duration(*check.Options.TimeoutSeconds)*time.Second + writeGrace)
	return isPermanent(err) || !c.Clock.Now().Before(late)
}

// isPermanent reports whether a write of the report would fail again, as it is too large, forbidden by a quota, or
// deleted.
func isPermanent(err error) bool {
	return apierrors.IsInvalid(err) || apierrors.IsForbidden(err) || apierrors.IsRequestEntityTooLargeError(err) || apierrors.IsNotFound(err)
}

// startRuns starts as many of the pending runs as the limit allows, none on a node of another run. It reports whether
// runs were recorded as faults instead: those on nodes that somebody else uses, and those that the API server refused
// permanently, such as by a policy of the cluster.
func (c *Reconciler) startRuns(ctx context.Context, check jobs.Check, r *report.Report, works, running []preflight.PlannedRun) (refused bool, err error) {
	busy, names := map[string]bool{}, map[string]bool{}
	occupy := func(w preflight.PlannedRun) {
		names[w.Name()] = true
		for _, n := range w.Nodes {
			busy[n] = true
		}
	}
	for _, w := range running {
		occupy(w)
	}
	var next []preflight.PlannedRun
	for _, w := range works {
		if names[w.Name()] || slices.ContainsFunc(w.Nodes, func(n string) bool { return busy[n] }) {
			continue
		}
		// A run that is larger than the limit, such as one of a whole pool, runs alone.
		if len(busy) > 0 && len(busy)+len(w.Nodes) > int(*check.Options.MaxConcurrentNodes) {
			break
		}
		if m := c.inUse(check, w, time.Time{}); m != nil {
			if r.Record.Add(w, *m) {
				refused = true
				metrics.RunEnded(w.Stage, m.Outcome)
			}
			continue
		}
		occupy(w)
		next = append(next, w)
	}
	if len(running) == 0 && len(next) > 0 {
		if err := c.client.Create(ctx, check.Service()); err != nil && !apierrors.IsAlreadyExists(err) {
			return refused, fmt.Errorf("create the Service of NetworkCheck %s: %w", check.Object.Name, err)
		}
	}
	problems := make([]error, len(next))
	var requests errgroup.Group
	requests.SetLimit(concurrentRequests)
	for i, w := range next {
		requests.Go(func() error {
			problems[i] = c.createRun(ctx, check, r.Record.Launcher, w)
			return nil
		})
	}
	_ = requests.Wait() // each has its problem
	for i, problem := range problems {
		switch {
		case apierrors.IsInvalid(problem), apierrors.IsForbidden(problem), r.Record.Launcher == evenkeel.LauncherMPIJob && isUnserved(problem):
			if r.Record.Add(next[i], faultMeasurement(problem.Error())) {
				refused = true
				metrics.RunEnded(next[i].Stage, pairing.Fault)
			}
		case problem != nil:
			err = errors.Join(err, problem)
		}
	}
	return refused, err
}

// finish writes the report, deletes the remaining objects, and sets the final status.
func (c *Reconciler) finish(ctx context.Context, check jobs.Check, r *report.Report, decision preflight.Decision) error {
	left, err := c.listJobs(ctx, check, r.Record.Launcher)
	if err != nil {
		return err
	}
	objects := []client.Object{&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: check.Object.Namespace, Name: check.ServiceName()}}}
	for _, j := range left {
		objects = append(objects, j.Object)
	}
	if err := c.deleteObjects(ctx, objects...); err != nil {
		return err
	}
	record := r.Record
	// Only once, so that a status that could not be written is the same at the next attempt.
	if record.Finished.IsZero() {
		files := preflight.Report(check.Object.Name, record, decision)
		record.Finished, r.Markdown, r.Pairs = c.Clock.Now().UTC().Truncate(time.Second), files.Markdown, files.SVG
		var err error
		if !c.reports.unwritable(check.Object) {
			err = r.Finish(ctx, c.client)
		}
		switch {
		case err == nil:
		case c.gaveUp(check, r, err):
			c.reports.setUnwritable(check.Object)
		default:
			c.reports.drop(check.Object)
			return fmt.Errorf("NetworkCheck %s: %w", check.Object.Name, err)
		}
	}
	status := finalStatus(check.Object, record, decision)
	status.ReportName = r.Name()
	if c.reports.unwritable(check.Object) {
		setCondition(status, check.Object, evenkeel.ConditionComplete, metav1.ConditionTrue, reasonNotWritten, status.Message, record.Finished)
	}
	if err := c.setFinalStatus(ctx, check.Object, status); err != nil {
		return err
	}
	c.reports.drop(check.Object)
	return nil
}
