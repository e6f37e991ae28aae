// Package reductionservice creates the reduction servers of jobs to which the workload webhook assigned some. It keeps them while
// the job runs, and records an Event when one is lost.
//
// The job has a label with the name of its servers, and its pod templates have their addresses. All objects of the servers are
// owned by the ReductionService of that name, and that by the job. So all of them are deleted with the job.
package reductionservice

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/inject"
	"evenkeel.dev/evenkeel/operator/internal/jobkey"
	"evenkeel.dev/evenkeel/operator/internal/kube/events"
	"evenkeel.dev/evenkeel/operator/internal/kube/labelledjobs"
	"evenkeel.dev/evenkeel/operator/internal/kube/statusapply"
	"evenkeel.dev/evenkeel/operator/internal/nodedrain"
	access "evenkeel.dev/evenkeel/operator/internal/profile"
	"evenkeel.dev/evenkeel/operator/internal/reduction"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

const (
	fieldOwner = client.FieldOwner("evenkeel-reductionservice")
	// rejectedRetry is the interval of attempts for a job that could not have servers: its profile may have been corrected.
	rejectedRetry = time.Minute
	// keyRetry is the interval at which a key that somebody deleted is made again, while servers that need it are not ready.
	keyRetry = time.Minute
)

// Reconciler makes and watches reduction servers.
type Reconciler struct {
	// Image is the image of the servers.
	Image string
	// Clock is replaced in tests. KindPoll is how often the cluster is asked for kinds of jobs that it does not serve yet.
	Clock    clock.PassiveClock
	KindPoll time.Duration

	client client.Client
	live   client.Reader
	jobs   *labelledjobs.Jobs
	// watched caches jobs with servers, and the servers' pods. The manager's cache has other Jobs and pods.
	watched cache.Cache
}

// SetupWithManager starts the controller with the manager.
func (c *Reconciler) SetupWithManager(mgr manager.Manager) error {
	c.client, c.live = mgr.GetClient(), mgr.GetAPIReader()
	servers := cache.ByObject{Label: labelledjobs.Exists(evenkeel.ReductionServerKey)}
	byObject := map[client.Object]cache.ByObject{&corev1.Pod{}: servers}
	for _, object := range owned {
		byObject[object] = servers
	}
	jobs, err := labelledjobs.New(mgr, evenkeel.ReductionClientKey, byObject)
	if err != nil {
		return err
	}
	c.jobs, c.watched = jobs, jobs.Cache
	// Reading a kind requires that it is watched.
	for _, object := range []client.Object{&evenkeel.NetworkProfile{}, &corev1.Node{}} {
		if _, err := mgr.GetCache().GetInformer(context.Background(), object); err != nil {
			return fmt.Errorf("watch %T: %w", object, err)
		}
	}
	controller := builder.ControllerManagedBy(mgr).Named("reductionservice").
		For(&evenkeel.ReductionService{}, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&corev1.Node{}, handler.EnqueueRequestsFromMapFunc(c.servicesOn), builder.WithPredicates(drainChanged)).
		WatchesRawSource(source.Kind[client.Object](c.watched, &corev1.Pod{}, labelledjobs.Named(evenkeel.ReductionServerKey)))
	for _, object := range owned {
		kind, err := mgr.GetClient().GroupVersionKindFor(object)
		if err != nil {
			return err
		}
		metadata := &metav1.PartialObjectMetadata{}
		metadata.SetGroupVersionKind(kind)
		controller = controller.WatchesRawSource(source.Kind[client.Object](c.watched, metadata, labelledjobs.Named(evenkeel.ReductionServerKey), lostOrChanged))
	}
	built, err := controller.Build(c)
	if err != nil {
		return err
	}
	return mgr.Add(manager.RunnableFunc(func(ctx context.Context) error {
		c.jobs.Watch(ctx, mgr, c.KindPoll, func(job *unstructured.Unstructured) error {
			return built.Watch(source.Kind[client.Object](c.watched, job, labelledjobs.Named(evenkeel.ReductionClientKey)))
		})
		return nil
	}))
}

// owned are the kinds of objects of a service that are made again when somebody deletes them. Secrets are too, but may not be read.
var owned = []client.Object{&corev1.Service{}, &appsv1.StatefulSet{}, &policyv1.PodDisruptionBudget{}, &networkingv1.NetworkPolicy{}}

// lostOrChanged passes what somebody may have done to the servers' objects. Changes of their status are many, and no concern.
var lostOrChanged = predicate.Funcs{
	CreateFunc: func(event.CreateEvent) bool { return false },
	UpdateFunc: func(e event.UpdateEvent) bool {
		generation := e.ObjectNew.GetGeneration() // a Service has none
		return generation == 0 || generation != e.ObjectOld.GetGeneration()
	},
}

// drainChanged passes nodes that somebody begins or ceases to drain.
var drainChanged = predicate.Funcs{
	CreateFunc: func(event.CreateEvent) bool { return false },
	DeleteFunc: func(event.DeleteEvent) bool { return false },
	UpdateFunc: func(e event.UpdateEvent) bool {
		return nodedrain.Of(e.ObjectOld.(*corev1.Node)) != nodedrain.Of(e.ObjectNew.(*corev1.Node))
	},
}

// servicesOn returns the services with a server on the node.
func (c *Reconciler) servicesOn(ctx context.Context, node client.Object) []reconcile.Request {
	var pods corev1.PodList
	if err := c.watched.List(ctx, &pods); err != nil {
		return nil // the cache is closing
	}
	var requests []reconcile.Request
	for _, p := range pods.Items {
		if p.Spec.NodeName == node.GetName() {
			requests = append(requests, reconcile.Request{NamespacedName: types.NamespacedName{Namespace: p.Namespace, Name: p.Labels[evenkeel.ReductionServerKey]}})
		}
	}
	return requests
}

// Reconcile creates or updates the servers of one job.
func (c *Reconciler) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	service := &evenkeel.ReductionService{}
	// Read from the API server: with a stale status, a lost server would be reported twice.
	err := c.live.Get(ctx, request.NamespacedName, service)
	if client.IgnoreNotFound(err) != nil {
		return reconcile.Result{}, fmt.Errorf("read ReductionService %s: %w", request, err)
	}
	exists := err == nil
	if exists && service.DeletionTimestamp != nil {
		return reconcile.Result{}, nil // garbage collection deletes what it owns
	}
	job, err := c.jobs.Find(ctx, request.Namespace, request.Name, service.OwnerReferences)
	if err != nil || job == nil {
		return reconcile.Result{}, err // the job was deleted, or is not listed yet
	}
	if !exists {
		return c.createService(ctx, request, job)
	}
	return c.reconcileServers(ctx, service, job)
}

// createService creates the service of a job. One that runs in another cluster has its servers there.
func (c *Reconciler) createService(ctx context.Context, name reconcile.Request, job *unstructured.Unstructured) (reconcile.Result, error) {
	if workload.Finished(job) || workload.RunsElsewhere(job) || job.GetDeletionTimestamp() != nil {
		return reconcile.Result{}, nil
	}
	service, refused, err := c.service(ctx, name.Name, job)
	if err != nil {
		return reconcile.Result{}, err
	}
	if refused != "" {
		return reconcile.Result{RequeueAfter: rejectedRetry}, c.recordEvent(ctx, job, corev1.EventTypeWarning, ReasonRefused, "no reduction servers: "+refused)
	}
	switch err := c.client.Create(ctx, service); {
	case err == nil, apierrors.IsAlreadyExists(err), apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return reconcile.Result{}, nil
	case apierrors.IsInvalid(err):
		return reconcile.Result{}, c.recordEvent(ctx, job, corev1.EventTypeWarning, ReasonRefused, "no reduction servers: "+err.Error())
	default:
		return reconcile.Result{}, fmt.Errorf("create ReductionService %s: %w", name, err)
	}
}

// service returns the service that the webhook assigned to the job. Users can forge labels and annotations, so they are checked
// against the profile; refused says what is wrong.
func (c *Reconciler) service(ctx context.Context, name string, job *unstructured.Unstructured) (service *evenkeel.ReductionService, refused string, err error) {
	templates, err := workload.Templates(job)
	switch {
	case err != nil:
		return nil, err.Error(), nil
	case len(templates) == 0:
		return nil, "the job has no pod template", nil
	}
	first := templates[0]
	// What the webhook saw and a user cannot have forged: the profile that the job asked for, and that its namespace may use it.
	if asked, has := job.GetAnnotations()[evenkeel.ProfileKey], first.Label(evenkeel.ProfileKey); asked != has {
		return nil, fmt.Sprintf("annotation %s of the job is %q, and its %s has %q", evenkeel.ProfileKey, asked, first.Path, has), nil
	}
	profile := &evenkeel.NetworkProfile{}
	if err := c.client.Get(ctx, client.ObjectKey{Name: first.Label(evenkeel.ProfileKey)}, profile); apierrors.IsNotFound(err) {
		return nil, fmt.Sprintf("NetworkProfile %q does not exist", first.Label(evenkeel.ProfileKey)), nil
	} else if err != nil {
		return nil, "", fmt.Errorf("read NetworkProfile %s: %w", first.Label(evenkeel.ProfileKey), err)
	}
	if why, err := access.Refusal(ctx, c.live, profile, job.GetNamespace()); err != nil || why != "" {
		return nil, why, err
	}
	addresses := first.Annotations()[evenkeel.ReductionServersKey]
	replicas := int32(strings.Count(addresses, ",") + 1)
	switch most := reduction.MaxServers(profile); {
	case addresses != strings.Join(reduction.Endpoints(name, job.GetNamespace(), int(replicas)), ","):
		return nil, fmt.Sprintf("annotation %s of %s was not written by Evenkeel", evenkeel.ReductionServersKey, first.Path), nil
	case int(replicas) > most:
		return nil, fmt.Sprintf("%d are more than the %d that NetworkProfile %s allows", replicas, most, profile.Name), nil
	}
	var nodes corev1.NodeList
	if err := c.client.List(ctx, &nodes); err != nil {
		return nil, "", fmt.Errorf("list nodes: %w", err)
	}
	no := false
	service = &evenkeel.ReductionService{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: job.GetNamespace(), Name: name,
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: job.GetAPIVersion(), Kind: job.GetKind(), Name: job.GetName(), UID: job.GetUID(),
				Controller: &no, BlockOwnerDeletion: &no, // the job's controller is another one
			}},
		},
		Spec: evenkeel.ReductionServiceSpec{
			WorkloadRef: evenkeel.WorkloadReference{APIGroup: job.GroupVersionKind().Group, Kind: job.GetKind(), Name: job.GetName(), UID: job.GetUID()},
			Replicas:    &replicas, Image: cmp.Or(profile.Spec.Reduction.Image, c.Image), ImagePullSecrets: profile.Spec.ImagePullSecrets, PriorityClassName: first.PriorityClass(),
			Server: profile.Spec.Reduction.Server,
		},
	}
	users, err := inject.UsersKey(first.Annotations()[evenkeel.JobKeyKey])
	if err != nil {
		return nil, err.Error(), nil
	}
	if users != nil {
		service.Spec.KeySecretName = users.Secret
	}
	reduction.SetTransport(service, profile, nodes.Items)
	if t := service.Spec.Transport; t.Mode == evenkeel.TransportRDMA && t.RDMA.ResourceName == "" {
		return nil, fmt.Sprintf("NetworkProfile %s requires RDMA and has no device to assign", profile.Name), nil
	}
	return service, "", nil
}

// reconcileServers creates the servers, or scales them to zero, and writes the status.
func (c *Reconciler) reconcileServers(ctx context.Context, service *evenkeel.ReductionService, job *unstructured.Unstructured) (reconcile.Result, error) {
	running := *service.Spec.Replicas
	if suspended, _ := workload.Suspended(job); suspended || workload.Finished(job) {
		running = 0
	}
	var pods corev1.PodList
	if err := c.watched.List(ctx, &pods, client.InNamespace(service.Namespace), client.MatchingLabels{evenkeel.ReductionServerKey: service.Name}); err != nil {
		return reconcile.Result{}, fmt.Errorf("list the servers of ReductionService %s/%s: %w", service.Namespace, service.Name, err)
	}
	var nodes corev1.NodeList
	if err := c.client.List(ctx, &nodes); err != nil {
		return reconcile.Result{}, fmt.Errorf("list nodes: %w", err)
	}
	now := c.Clock.Now()
	status, pending := observeStatus(service, job, pods.Items, nodes.Items, now)
	waiting := running > 0 && !meta.IsStatusConditionTrue(status.Conditions, evenkeel.ConditionAvailable)
	if waiting && service.Spec.KeySecretName == "" {
		if err := c.makeKey(ctx, service, job); err != nil {
			return reconcile.Result{}, err
		}
	}
	evictable, eviction := evictableAt(service, status, now)
	for _, object := range reduction.Objects(service, reduction.Run{Servers: running, Evictable: evictable, HostNetwork: usesHostNetwork(job)}) {
		if err := c.applyObject(ctx, object); err != nil {
			return reconcile.Result{}, fmt.Errorf("apply %s %s/%s: %w", object.GetObjectKind().GroupVersionKind().Kind, service.Namespace, service.Name, err)
		}
	}
	// Events first: if the status cannot be written, they are recorded again rather than never.
	for _, n := range pending {
		if err := events.Write(ctx, c.client, events.Again(reference(job), n.severity, n.reason, n.message, n.since, now)); err != nil {
			return reconcile.Result{}, err
		}
	}
	again := eviction
	if waiting && (again == 0 || keyRetry < again) {
		again = keyRetry
	}
	return reconcile.Result{RequeueAfter: again}, statusapply.Apply(ctx, c.client, fieldOwner, service, &service.Status, status)
}

// usesHostNetwork reports whether the job has pods in the network of their nodes.
func usesHostNetwork(job *unstructured.Unstructured) bool {
	templates, err := workload.Templates(job)
	return err == nil && slices.ContainsFunc(templates, func(t workload.Template) bool {
		spec, err := t.PodSpec()
		return err == nil && spec.HostNetwork
	})
}

// makeKey creates the job's key, if there is none. The controller cannot read it.
func (c *Reconciler) makeKey(ctx context.Context, service *evenkeel.ReductionService, job *unstructured.Unstructured) error {
	key, err := jobkey.New()
	if err != nil {
		return err
	}
	err = c.client.Create(ctx, reduction.Key(service, key))
	switch {
	case err == nil && len(service.Status.Conditions) > 0:
		now := c.Clock.Now()
		return events.Write(ctx, c.client, events.Again(reference(job), corev1.EventTypeWarning, ReasonKeyReplaced, fmt.Sprintf(
			"Secret %s with the key of the reduction servers was deleted, and has been made again: restart the job, as servers refuse processes that have the old key", service.Name), now, now))
	case err == nil, apierrors.IsAlreadyExists(err), apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return nil
	case apierrors.IsForbidden(err):
		return fmt.Errorf("create Secret %s/%s: %w", service.Namespace, service.Name, err)
	default: // the error's text might contain the key
		return fmt.Errorf("create Secret %s/%s: %s", service.Namespace, service.Name, apierrors.ReasonForError(err))
	}
}

func (c *Reconciler) applyObject(ctx context.Context, object client.Object) error {
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
	if err != nil {
		return err
	}
	delete(fields, "status")
	err = c.client.Apply(ctx, client.ApplyConfigurationFromUnstructured(&unstructured.Unstructured{Object: fields}), fieldOwner, client.ForceOwnership)
	if apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		return nil
	}
	return err
}

func (c *Reconciler) recordEvent(ctx context.Context, job *unstructured.Unstructured, severity, reason, message string) error {
	return events.Write(ctx, c.client, events.New(reference(job), severity, reason, message, c.Clock.Now()))
}

func reference(job *unstructured.Unstructured) corev1.ObjectReference {
	return corev1.ObjectReference{APIVersion: job.GetAPIVersion(), Kind: job.GetKind(), Namespace: job.GetNamespace(), Name: job.GetName(), UID: job.GetUID()}
}
