package integration

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/reduction"
	"evenkeel.dev/evenkeel/operator/test/apiserver"
)

// reducing is an annotated job that asks for reduction servers, with the profile.
func reducing(t *testing.T, kind, namespace, profile, asked string) (*unstructured.Unstructured, [][]string) {
	t.Helper()
	job, templates := newJob(kind, namespace, profile)
	if asked != "" {
		annotations := job.GetAnnotations()
		annotations[evenkeel.ReductionKey] = asked
		job.SetAnnotations(annotations)
	}
	createJob(t, job)
	return job, templates
}

// waitService waits until the job's ReductionService is as wanted, and returns it.
func waitService(t *testing.T, job *unstructured.Unstructured, what string, wanted func(*evenkeel.ReductionService) bool) *evenkeel.ReductionService {
	t.Helper()
	name := job.GetLabels()[evenkeel.ReductionClientKey]
	if name == "" {
		t.Fatalf("the %s has no label that names its servers: %v", job.GetKind(), job.GetLabels())
	}
	service := &evenkeel.ReductionService{}
	eventually(t, "ReductionService "+name+" "+what, func(ctx context.Context) (bool, error) {
		err := admin.Get(ctx, client.ObjectKey{Namespace: job.GetNamespace(), Name: name}, service)
		return err == nil && wanted(service), client.IgnoreNotFound(err)
	})
	return service
}

func reason(service *evenkeel.ReductionService) string {
	if c := meta.FindStatusCondition(service.Status.Conditions, evenkeel.ConditionAvailable); c != nil {
		return c.Reason
	}
	return ""
}

func is(want string) func(*evenkeel.ReductionService) bool {
	return func(s *evenkeel.ReductionService) bool { return reason(s) == want }
}

// part reads what the service is made of.
func part[T any, P interface {
	*T
	client.Object
}](t *testing.T, service *evenkeel.ReductionService) P {
	t.Helper()
	object := P(new(T))
	if err := admin.Get(t.Context(), client.ObjectKeyFromObject(service), object); err != nil {
		t.Fatalf("%T: %v", object, err)
	}
	return object
}

// A kubelet and a StatefulSet's controller are not here: startServers makes the pods as they would.
func startServers(t *testing.T, service *evenkeel.ReductionService) []*corev1.Pod {
	t.Helper()
	set := part[appsv1.StatefulSet](t, service)
	var pods []*corev1.Pod
	for i := range int(*set.Spec.Replicas) {
		pod := &corev1.Pod{ObjectMeta: *set.Spec.Template.ObjectMeta.DeepCopy(), Spec: *set.Spec.Template.Spec.DeepCopy()}
		pod.Namespace, pod.Name = set.Namespace, strings.Split(service.Status.Endpoints[i], ".")[0]
		createPod(t, pod)
		setReady(t, pod, corev1.ConditionTrue)
		pods = append(pods, pod)
	}
	return pods
}

func setReady(t *testing.T, pod *corev1.Pod, status corev1.ConditionStatus) {
	t.Helper()
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: status}}
	if status == corev1.ConditionFalse {
		pod.Status.ContainerStatuses = []corev1.ContainerStatus{{
			Name: "reduction-server", LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 137, Reason: "OOMKilled"}},
		}}
	}
	if err := admin.Status().Update(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
}

// end ends a PyTorchJob, as the training-operator does.
func end(t *testing.T, job *unstructured.Unstructured) {
	t.Helper()
	patch := `{"status": {"conditions": [{"type": "Running", "status": "False"}, {"type": "Succeeded", "status": "True"}]}}`
	if err := admin.Status().Patch(t.Context(), job.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(patch))); err != nil {
		t.Fatal(err)
	}
}

// replicas waits until the StatefulSet has so many.
func replicas(t *testing.T, service *evenkeel.ReductionService, want int32) {
	t.Helper()
	eventually(t, "the StatefulSet is scaled", func(ctx context.Context) (bool, error) {
		set := &appsv1.StatefulSet{}
		err := admin.Get(ctx, client.ObjectKeyFromObject(service), set)
		return err == nil && *set.Spec.Replicas == want, err
	})
}

func TestReductionServersAreCreated(t *testing.T) {
	for _, kind := range []string{"PyTorchJob", "Job"} {
		t.Run(kind, func(t *testing.T) {
			ns := newNamespace(t, nil)
			job, templates := reducing(t, kind, ns, "default", "2")
			service := waitService(t, job, "has a status", is(evenkeel.ReasonStarting))

			if o := service.OwnerReferences; len(o) != 1 || o[0].UID != job.GetUID() || o[0].Kind != kind {
				t.Errorf("the service does not go with its job: %+v", o)
			}
			for _, object := range []client.Object{
				part[appsv1.StatefulSet](t, service), part[corev1.Service](t, service), part[corev1.Secret](t, service),
				part[policyv1.PodDisruptionBudget](t, service), part[networkingv1.NetworkPolicy](t, service),
			} {
				if o := metav1.GetControllerOf(object); o == nil || o.UID != service.UID {
					t.Errorf("%T does not go with the service: %+v", object, object.GetOwnerReferences())
				}
			}
			if e := service.Status.Endpoints; len(e) != 2 || e[1] != service.Name+"-1."+service.Name+"."+ns+".svc:7470" {
				t.Errorf("endpoints %v", e)
			}
			for _, path := range templates {
				pod := createPod(t, podOf(t, job, path))
				c := &pod.Spec.Containers[0]
				if got, want := variable(c, "EVENKEEL_REDUCTION_SERVERS"), strings.Join(service.Status.Endpoints, ","); got != want {
					t.Errorf("%v: EVENKEEL_REDUCTION_SERVERS is %q, want %q", path, got, want)
				}
				if variable(c, "NCCL_COLLNET_ENABLE") != "1" || variable(c, "EVENKEEL_JOB") != ns+"/train" || variable(c, "EVENKEEL_JOB_KEY") != "" || variable(c, "MINE") != "kept" {
					t.Errorf("%v: environment %v", path, c.Env)
				}
				if !slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Secret != nil && v.Secret.SecretName == service.Name }) {
					t.Errorf("%v: volumes %+v lack the key", path, pod.Spec.Volumes)
				}
				if pod.Labels[evenkeel.ReductionClientKey] != service.Name {
					t.Errorf("%v: labels %v: no policy would let it in", path, pod.Labels)
				}
				// Injected twice, it is the same.
				again := pod.DeepCopy()
				again.ObjectMeta = metav1.ObjectMeta{GenerateName: "again-", Namespace: ns, Labels: pod.Labels, Annotations: pod.Annotations}
				createPod(t, again)
				if before, after := asJSON(t, pod.Spec), asJSON(t, again.Spec); before != after {
					t.Errorf("%v: injected twice:\n%s\nonce:\n%s", path, after, before)
				}
			}

			startServers(t, service)
			service = waitService(t, job, "is complete", is(evenkeel.ReasonAllReady))
			if *service.Status.ReadyReplicas != 2 {
				t.Errorf("%d servers are ready", *service.Status.ReadyReplicas)
			}
			eventually(t, "the Event is recorded", hasEvent(ns, job, "EvenkeelReductionReady", "all 2"))
		})
	}
}

func TestReductionServersFitRestrictedStandard(t *testing.T) {
	ns := newNamespace(t, map[string]string{"pod-security.kubernetes.io/enforce": "restricted"})
	job, _ := reducing(t, "PyTorchJob", ns, "default", "1")
	startServers(t, waitService(t, job, "has a status", is(evenkeel.ReasonStarting)))
}

// A quota that wants a limit of the CPU refuses the servers, which have none. The status says where to look, and a LimitRange helps.
func TestReductionServersUnderQuotaOfCPULimits(t *testing.T) {
	ns := newNamespace(t, nil)
	hard := corev1.ResourceList{corev1.ResourceLimitsCPU: resource.MustParse("1000")}
	quota := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "limits", Namespace: ns}, Spec: corev1.ResourceQuotaSpec{Hard: hard}}
	if err := admin.Create(t.Context(), quota); err != nil {
		t.Fatal(err)
	}
	// The controller of quotas would do this.
	quota.Status = corev1.ResourceQuotaStatus{Hard: hard, Used: corev1.ResourceList{corev1.ResourceLimitsCPU: resource.MustParse("0")}}
	if err := admin.Status().Update(t.Context(), quota); err != nil {
		t.Fatal(err)
	}
	job, _ := reducing(t, "PyTorchJob", ns, "default", "1")
	service := waitService(t, job, "has a status", is(evenkeel.ReasonStarting))
	if c := meta.FindStatusCondition(service.Status.Conditions, evenkeel.ConditionAvailable); !strings.Contains(c.Message, "the Events of StatefulSet "+service.Name+" say why") {
		t.Errorf("%+v", c)
	}
	set := part[appsv1.StatefulSet](t, service)
	create := func(ctx context.Context) error {
		pod := &corev1.Pod{ObjectMeta: *set.Spec.Template.ObjectMeta.DeepCopy(), Spec: *set.Spec.Template.Spec.DeepCopy()}
		pod.Namespace, pod.Name = ns, service.Name+"-0"
		return dryRun(ctx, pod)
	}
	eventually(t, "the quota refuses the server", func(ctx context.Context) (bool, error) {
		err := create(ctx)
		return err != nil && strings.Contains(err.Error(), "must specify limits.cpu"), nil
	})
	limits := &corev1.LimitRange{ObjectMeta: metav1.ObjectMeta{Name: "limits", Namespace: ns}}
	limits.Spec.Limits = []corev1.LimitRangeItem{{Type: corev1.LimitTypeContainer, Default: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("64")}}}
	if err := admin.Create(t.Context(), limits); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the LimitRange gives it a limit", func(ctx context.Context) (bool, error) { return create(ctx) == nil, nil })
}

// hasEvent reports whether there is an Event about the job whose message has the part.
func hasEvent(namespace string, job *unstructured.Unstructured, reason, part string) func(context.Context) (bool, error) {
	return func(ctx context.Context) (bool, error) {
		var events corev1.EventList
		err := admin.List(ctx, &events, client.InNamespace(namespace))
		return slices.ContainsFunc(events.Items, func(e corev1.Event) bool {
			return e.Reason == reason && e.InvolvedObject.UID == job.GetUID() && strings.Contains(e.Message, part)
		}), err
	}
}

func asJSON(t *testing.T, object any) string {
	t.Helper()
	text, err := json.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestReductionServerLostEvent(t *testing.T) {
	ns := newNamespace(t, nil)
	job, _ := reducing(t, "PyTorchJob", ns, "default", "3")
	pods := startServers(t, waitService(t, job, "has a status", is(evenkeel.ReasonStarting)))
	waitService(t, job, "is complete", is(evenkeel.ReasonAllReady))

	setReady(t, pods[1], corev1.ConditionFalse)
	service := waitService(t, job, "has lost one", is(evenkeel.ReasonServerLost))
	if lost := service.Status.LostServers; !slices.Equal(lost, []string{pods[1].Name}) {
		t.Errorf("lost %v, want %s", lost, pods[1].Name)
	}
	eventually(t, "the Event names the server", hasEvent(ns, job, "EvenkeelReductionServerLost", pods[1].Name+" was lost at"))
	eventually(t, "the Event has the cause", hasEvent(ns, job, "EvenkeelReductionServerLost", "ended with status 137 (OOMKilled)"))

	grace := int64(0)
	if err := admin.Delete(t.Context(), pods[2], &client.DeleteOptions{GracePeriodSeconds: &grace}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the Event about the other server is recorded", hasEvent(ns, job, "EvenkeelReductionServerLost", pods[2].Name+" was lost at"))
	waitService(t, job, "has lost two", func(s *evenkeel.ReductionService) bool { return len(s.Status.LostServers) == 2 })

	setReady(t, pods[1], corev1.ConditionTrue)
	pods[2].ResourceVersion, pods[2].UID = "", ""
	createPod(t, pods[2])
	setReady(t, pods[2], corev1.ConditionTrue)
	service = waitService(t, job, "is complete again", is(evenkeel.ReasonAllReady))
	if len(service.Status.LostServers) != 0 {
		t.Errorf("still lost: %v", service.Status.LostServers)
	}
}

func TestReductionServersEndWithJob(t *testing.T) {
	ns := newNamespace(t, nil)
	job, _ := reducing(t, "PyTorchJob", ns, "default", "2")
	service := waitService(t, job, "has a status", is(evenkeel.ReasonStarting))
	replicas(t, service, 2)
	end(t, job)
	replicas(t, service, 0)
	waitService(t, job, "says why", is(evenkeel.ReasonJobFinished))
}

func TestReductionSuspendedJobHasNoServers(t *testing.T) {
	ns := newNamespace(t, nil)
	job, _ := reducing(t, "Job", ns, "default", "2")
	service := waitService(t, job, "has a status", is(evenkeel.ReasonStarting))
	suspend := func(value string) {
		t.Helper()
		if err := admin.Patch(t.Context(), job.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(`{"spec": {"suspend": `+value+`}}`))); err != nil {
			t.Fatal(err)
		}
	}
	suspend("true")
	replicas(t, service, 0)
	waitService(t, job, "says why", is(evenkeel.ReasonJobSuspended))
	suspend("false")
	replicas(t, service, 2)
	waitService(t, job, "starts again", is(evenkeel.ReasonStarting))
}

// The unit test of package reduction has the table. Here one job gets servers, one declines, and two are refused.
func TestReductionServerCount(t *testing.T) {
	newProfile(t, "sized", evenkeel.NetworkProfileSpec{Reduction: evenkeel.ReductionSpec{
		Mode: evenkeel.ReductionAlways, Sizing: evenkeel.SizingSpec{WorkerBandwidth: resource.MustParse("25G"), ServerBandwidth: resource.MustParse("12500M")},
	}})
	ns := newNamespace(t, nil)
	job, _ := reducing(t, "PyTorchJob", ns, "sized", "")
	// A master and a worker, each twice as fast as a server.
	if s := waitService(t, job, "exists", func(*evenkeel.ReductionService) bool { return true }); *s.Spec.Replicas != 4 {
		t.Errorf("%d servers, want 4", *s.Spec.Replicas)
	}
	asking := func(profile, asked string) *unstructured.Unstructured {
		job, _ := newJob("PyTorchJob", ns, profile)
		annotations := job.GetAnnotations()
		if annotations == nil {
			annotations = map[string]string{}
		}
		annotations[evenkeel.ReductionKey] = asked
		job.SetAnnotations(annotations)
		job.SetName("asking")
		return job
	}
	declined := asking("sized", "Off")
	if err := dryRun(t.Context(), declined); err != nil || declined.GetLabels()[evenkeel.ReductionClientKey] != "" {
		t.Errorf("a job that shall have no servers: %v, labels %v", err, declined.GetLabels())
	}
	refused(t, dryRun(t.Context(), asking("sized", "17")), "annotation evenkeel.dev/reduction")
	refused(t, dryRun(t.Context(), asking("", "2")), "evenkeel.dev/reduction: 2 needs a profile")
}

func TestReductionProfileSettings(t *testing.T) {
	cpu, memory := resource.MustParse("7"), resource.MustParse("3Gi")
	newProfile(t, "shaped", evenkeel.NetworkProfileSpec{Reduction: evenkeel.ReductionSpec{Server: evenkeel.ReductionServerSpec{
		CPU: &cpu, Memory: &memory, NodeSelector: map[string]string{"pool": "cpu"}, Tolerations: []corev1.Toleration{{Key: "cpu", Operator: corev1.TolerationOpExists}},
		Placement: evenkeel.PlacementSpec{Mode: evenkeel.PlacementNearWorkers, TopologyKey: "rack"},
	}}})
	job, _ := reducing(t, "PyTorchJob", newNamespace(t, nil), "shaped", "1")
	spec := part[appsv1.StatefulSet](t, waitService(t, job, "has a status", is(evenkeel.ReasonStarting))).Spec.Template.Spec
	args := strings.Join(spec.Containers[0].Args, " ")
	if !strings.Contains(args, "--threads=7") || !strings.Contains(args, "--memory=3221225472") || spec.Containers[0].Image != reductionImage {
		t.Errorf("image %s, arguments %s", spec.Containers[0].Image, args)
	}
	if limit := spec.Containers[0].Resources.Limits.Memory().Value(); limit <= memory.Value() {
		t.Errorf("a limit of %d leaves nothing beside the buffers", limit)
	}
	near := spec.Affinity.PodAffinity.PreferredDuringSchedulingIgnoredDuringExecution
	if spec.NodeSelector["pool"] != "cpu" || len(spec.Tolerations) != 1 || near[0].PodAffinityTerm.TopologyKey != "rack" {
		t.Errorf("%v, %v, %+v", spec.NodeSelector, spec.Tolerations, near)
	}
}

func TestReductionJobsOfOneNameShareNothing(t *testing.T) {
	first, _ := reducing(t, "PyTorchJob", newNamespace(t, nil), "default", "1")
	second, _ := reducing(t, "PyTorchJob", newNamespace(t, nil), "default", "1")
	// Deleted and created again at once: objects of the old job may still exist.
	if err := admin.Delete(t.Context(), first.DeepCopy()); err != nil {
		t.Fatal(err)
	}
	third, _ := reducing(t, "PyTorchJob", first.GetNamespace(), "default", "1")
	keys := map[string]bool{}
	for _, job := range []*unstructured.Unstructured{second, third} {
		service := waitService(t, job, "has a status", is(evenkeel.ReasonStarting))
		key := string(part[corev1.Secret](t, service).Data["job-key"])
		if _, err := hex.DecodeString(key); err != nil || len(key) != 64 {
			t.Errorf("a key of %d characters, want 64 hexadecimal digits: %v", len(key), err)
		}
		keys[service.Name+key] = true
	}
	if len(keys) != 2 || first.GetLabels()[evenkeel.ReductionClientKey] == third.GetLabels()[evenkeel.ReductionClientKey] {
		t.Error("two jobs have the same servers")
	}
}

// The key is in its Secret, and nowhere else: no object, no Event, no log.
func TestReductionKeyIsSecret(t *testing.T) {
	ns := newNamespace(t, nil)
	job, templates := reducing(t, "PyTorchJob", ns, "default", "1")
	service := waitService(t, job, "has a status", is(evenkeel.ReasonStarting))
	startServers(t, service)
	createPod(t, podOf(t, job, templates[0]))
	service = waitService(t, job, "is complete", is(evenkeel.ReasonAllReady))
	secret := part[corev1.Secret](t, service)
	if secret.Immutable == nil || !*secret.Immutable {
		t.Error("the key can be changed under a running job")
	}
	key := string(secret.Data["job-key"])
	var pods corev1.PodList
	var events corev1.EventList
	for _, list := range []client.ObjectList{&pods, &events} {
		if err := admin.List(t.Context(), list, client.InNamespace(ns)); err != nil {
			t.Fatal(err)
		}
	}
	for where, text := range map[string]string{
		"the job": asJSON(t, job.Object), "the service": asJSON(t, service), "the StatefulSet": asJSON(t, part[appsv1.StatefulSet](t, service)),
		"pods": asJSON(t, pods.Items), "Events": asJSON(t, events.Items),
		"the controller's log": install.controller.output.String(), "the webhook's log": install.webhook.output.String(),
	} {
		if strings.Contains(text, key) || strings.Contains(text, key[:16]) {
			t.Errorf("the key is in %s", where)
		}
	}
}

// A restarted controller finds its objects, restores missing ones, and creates no other key.
func TestReductionControllerRestart(t *testing.T) {
	job, _ := reducing(t, "PyTorchJob", newNamespace(t, nil), "default", "2")
	service := waitService(t, job, "has a status", is(evenkeel.ReasonStarting))
	startServers(t, service)
	waitService(t, job, "is complete", is(evenkeel.ReasonAllReady))
	key, set := part[corev1.Secret](t, service), part[appsv1.StatefulSet](t, service)

	if err := install.controller.stop(); err != nil {
		t.Fatal(err)
	}
	if err := admin.Delete(t.Context(), part[networkingv1.NetworkPolicy](t, service)); err != nil {
		t.Fatal(err)
	}
	var err error
	if install.controller, err = install.startController(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the policy is back", func(ctx context.Context) (bool, error) {
		err := admin.Get(ctx, client.ObjectKeyFromObject(service), &networkingv1.NetworkPolicy{})
		return err == nil, client.IgnoreNotFound(err)
	})
	if after := part[corev1.Secret](t, service); after.UID != key.UID || string(after.Data["job-key"]) != string(key.Data["job-key"]) {
		t.Error("the key is another")
	}
	if after := part[appsv1.StatefulSet](t, service); after.ResourceVersion != set.ResourceVersion {
		t.Error("the StatefulSet was written, although nothing had changed")
	}
	end(t, job)
	replicas(t, service, 0)
}

// A label and annotations that a user wrote buy nothing that the profile does not allow.
func TestReductionForgedAnnotationsAreRefused(t *testing.T) {
	ns := newNamespace(t, nil)
	newProfile(t, "of-another-team", evenkeel.NetworkProfileSpec{NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"team": "other"}}})
	for _, test := range []struct{ want, profile, asked, addresses string }{
		{"not written by Evenkeel", "default", "default", "somewhere:1"},
		{"more than the 16", "default", "default", strings.Join(reduction.Endpoints("forged", ns, 17), ",")},
		{"is not for namespace " + ns, "of-another-team", "of-another-team", strings.Join(reduction.Endpoints("forged", ns, 1), ",")},
		{"annotation evenkeel.dev/profile of the job is", "default", "", strings.Join(reduction.Endpoints("forged", ns, 1), ",")},
	} {
		want, addresses := test.want, test.addresses
		job, templates := newJob("PyTorchJob", ns, "")
		job.SetLabels(map[string]string{evenkeel.ReductionClientKey: "forged"})
		for _, path := range templates {
			set := func(value string, fields ...string) {
				t.Helper()
				if err := unstructured.SetNestedField(job.Object, value, append(slices.Clone(path), fields...)...); err != nil {
					t.Fatal(err)
				}
			}
			set(addresses, "metadata", "annotations", evenkeel.ReductionServersKey)
			set(test.profile, "metadata", "labels", evenkeel.ProfileKey)
		}
		// Without the annotation, the webhook does not see the job. It may be added later.
		createJob(t, job)
		if test.asked != "" {
			patch := fmt.Sprintf(`{"metadata": {"annotations": {"evenkeel.dev/profile": %q}}}`, test.asked)
			if err := admin.Patch(t.Context(), job, client.RawPatch("application/merge-patch+json", []byte(patch))); err != nil {
				t.Fatal(err)
			}
		}
		eventually(t, "the refusal is recorded", hasEvent(ns, job, "EvenkeelReductionRefused", want))
		if err := admin.Delete(t.Context(), job); err != nil {
			t.Fatal(err)
		}
	}
	var services evenkeel.ReductionServiceList
	if err := admin.List(t.Context(), &services, client.InNamespace(ns)); err != nil || len(services.Items) != 0 {
		t.Errorf("%d services (%v) for what was forged", len(services.Items), err)
	}
}

// What the controller may make in other namespaces is what reduction servers need, and nothing else.
func TestReductionGuardLimitsController(t *testing.T) {
	waitProfile(t, "default", func(p *evenkeel.NetworkProfile) bool { return ready(p) != nil })
	ns := newNamespace(t, nil)
	job, _ := reducing(t, "PyTorchJob", ns, "default", "1")
	service := waitService(t, job, "has a status", is(evenkeel.ReasonStarting))
	controller, err := client.New(apiserver.As(config, systemNamespace, "evenkeel-controller"), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	good := part[appsv1.StatefulSet](t, service)
	copied := func(change func(*appsv1.StatefulSet)) *appsv1.StatefulSet {
		set := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "other", Labels: map[string]string{evenkeel.ReductionServerKey: "other"}, OwnerReferences: good.OwnerReferences}, Spec: *good.Spec.DeepCopy()}
		set.OwnerReferences = []metav1.OwnerReference{good.OwnerReferences[0]}
		set.OwnerReferences[0].Name = "other"
		set.Spec.Template.Spec.Volumes[0].Secret.SecretName = "other"
		set.Spec.ServiceName, set.Spec.Selector.MatchLabels, set.Spec.Template.Labels = "other", map[string]string{evenkeel.ReductionServerKey: "other"}, map[string]string{evenkeel.ReductionServerKey: "other"}
		if change != nil {
			change(set)
		}
		return set
	}
	// Whatever is refused below is refused for what was changed.
	if err := controller.Create(t.Context(), copied(nil), client.DryRunAll); err != nil {
		t.Fatal(err)
	}
	secret := func(change func(*corev1.Secret)) *corev1.Secret {
		s := &corev1.Secret{ObjectMeta: copied(nil).ObjectMeta, Type: corev1.SecretTypeOpaque}
		change(s)
		return s
	}
	yes := true
	object := func(change func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container)) client.Object {
		return copied(func(s *appsv1.StatefulSet) { change(s, &s.Spec.Template.Spec, &s.Spec.Template.Spec.Containers[0]) })
	}
	of := func(change func(meta *metav1.ObjectMeta)) metav1.ObjectMeta {
		meta := copied(nil).ObjectMeta
		if change != nil {
			change(&meta)
		}
		return meta
	}
	servers := map[string]string{evenkeel.ReductionServerKey: "other"}
	headless := func(change func(s *corev1.ServiceSpec)) *corev1.Service {
		s := &corev1.Service{ObjectMeta: of(nil), Spec: corev1.ServiceSpec{ClusterIP: "None", Selector: servers, Ports: []corev1.ServicePort{{Port: reduction.Port}}}}
		if change != nil {
			change(&s.Spec)
		}
		return s
	}
	key := func(change func(s *corev1.Secret)) *corev1.Secret {
		return secret(func(s *corev1.Secret) {
			s.Immutable, s.Data = &yes, map[string][]byte{"job-key": []byte("x")}
			if change != nil {
				change(s)
			}
		})
	}
	budget := func(selector map[string]string) *policyv1.PodDisruptionBudget {
		none := intstr.FromInt32(0)
		return &policyv1.PodDisruptionBudget{ObjectMeta: of(nil), Spec: policyv1.PodDisruptionBudgetSpec{MaxUnavailable: &none, Selector: &metav1.LabelSelector{MatchLabels: selector}}}
	}
	network := func(selector map[string]string) *networkingv1.NetworkPolicy {
		return &networkingv1.NetworkPolicy{ObjectMeta: of(nil), Spec: networkingv1.NetworkPolicySpec{PodSelector: metav1.LabelSelector{MatchLabels: selector}, Ingress: []networkingv1.NetworkPolicyIngressRule{{}}}}
	}
	users := object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
		p.Volumes[0].Secret.SecretName = "theirs"
	})
	for _, good := range []client.Object{headless(nil), key(nil), budget(servers), network(servers), users} {
		if err := controller.Create(t.Context(), good, client.DryRunAll); err != nil {
			t.Fatalf("%T: %v", good, err)
		}
	}
	for name, object := range map[string]client.Object{
		"no label": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) { s.Labels = nil }),
		"another's label": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			s.Labels[evenkeel.ReductionServerKey] = "train"
		}),
		"a label of its own": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) { s.Labels["app"] = "database" }),
		"an annotation": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			s.Annotations = map[string]string{"a": "b"}
		}),
		"a finalizer": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			s.Finalizers = []string{"example.com/a"}
		}),
		"no owner": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) { s.OwnerReferences = nil }),
		"two owners": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			s.OwnerReferences = append(s.OwnerReferences, metav1.OwnerReference{APIVersion: "v1", Kind: "Pod", Name: "other", UID: "x"})
		}),
		"a service account": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) { p.ServiceAccountName = "admin" }),
		"a token": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			p.AutomountServiceAccountToken = &yes
		}),
		"the host's files": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			p.Volumes[0].VolumeSource = corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/"}}
		}),
		"another's Secret": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			p.Volumes[0].Secret.SecretName, p.Volumes[0].Secret.Items = "database", nil
		}),
		"another entry of another's Secret": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			p.Volumes[0].Secret.SecretName, p.Volumes[0].Secret.Items[0].Key = "database", "password"
		}),
		"two entries of another's Secret": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			p.Volumes[0].Secret.SecretName = "database"
			p.Volumes[0].Secret.Items = append(p.Volumes[0].Secret.Items, corev1.KeyToPath{Key: "password", Path: "password"})
		}),
		"another's Secret in a variable": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			c.Env = append(c.Env, corev1.EnvVar{Name: "EVENKEEL_A", ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: "database"}, Key: "password"}}})
		}),
		"another's Secret in all variables": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			c.EnvFrom = []corev1.EnvFromSource{{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "database"}}}}
		}),
		"a volume of the node's credentials": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			p.Volumes = append(p.Volumes, corev1.Volume{Name: "b", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "t"}}}}}})
		}),
		"another's claim": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			s.Spec.VolumeClaimTemplates = []corev1.PersistentVolumeClaim{{ObjectMeta: metav1.ObjectMeta{Name: "data"}, Spec: corev1.PersistentVolumeClaimSpec{VolumeName: "database", AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}}}}}
		}),
		"a port of the host": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) { c.Ports[0].HostPort = 22 }),
		"a node":             object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) { p.NodeName = "control-plane" }),
		"other files of /proc": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			unmasked, no := corev1.UnmaskedProcMount, false
			c.SecurityContext.ProcMount, p.HostUsers = &unmasked, &no
		}),
		"one process namespace": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) { p.ShareProcessNamespace = &yes }),
		"another image": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			c.Image = "registry.example.com/miner:1"
		}),
		"an image of a longer name": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			c.Image = strings.Replace(c.Image, "@", "-miner@", 1)
		}),
		"a hook": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			c.Lifecycle = &corev1.Lifecycle{PostStart: &corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: []string{"sh"}}}}
		}),
		"another program":                object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) { c.Command = []string{"sh"} }),
		"another command of the program": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) { c.Args[0] = "version" }),
		"a probe of another host": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			c.LivenessProbe.HTTPGet.Host = "169.254.169.254"
		}),
		"a probe that runs a program": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			c.LivenessProbe.ProbeHandler = corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"sh"}}}
		}),
		"a second container": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			p.Containers = append(p.Containers, *c.DeepCopy())
			p.Containers[1].Name = "b"
		}),
		"an init container": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			p.InitContainers = append(p.InitContainers, *c.DeepCopy())
			p.InitContainers[0].Name, p.InitContainers[0].ReadinessProbe, p.InitContainers[0].LivenessProbe = "b", nil, nil
		}),
		"a runtime class": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			name := "privileged"
			p.RuntimeClassName = &name
		}),
		"a priority above nodes' own pods": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			p.PriorityClassName = "system-node-critical"
		}),
		"the host's network":   object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) { p.HostNetwork = true }),
		"the host's processes": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) { p.HostPID = true }),
		"the host's IPC":       object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) { p.HostIPC = true }),
		"other names": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			p.HostAliases = []corev1.HostAlias{{IP: "10.0.0.1", Hostnames: []string{"registry"}}}
		}),
		"an annotation of the pods": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			s.Spec.Template.Annotations = map[string]string{"sidecar.istio.io/inject": "true"}
		}),
		"a label of the pods": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			s.Spec.Template.Labels["app"] = "database"
		}),
		"privileges": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			c.SecurityContext = &corev1.SecurityContext{Privileged: &yes}
		}),
		"root": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			p.SecurityContext = &corev1.PodSecurityContext{RunAsUser: new(int64)}
		}),
		"a system call filter of its own": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			p.SecurityContext.SeccompProfile.Type = corev1.SeccompProfileTypeUnconfined
		}),
		"a setting of the kernel": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			p.SecurityContext.Sysctls = []corev1.Sysctl{{Name: "kernel.shm_rmid_forced", Value: "1"}}
		}),
		"a capability that no device needs": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			c.SecurityContext.Capabilities.Add = []corev1.Capability{"IPC_LOCK", "SYS_ADMIN"}
		}),
		"the capabilities of containers": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			c.SecurityContext.Capabilities = nil
		}),
		"more servers than any job has": object(func(s *appsv1.StatefulSet, p *corev1.PodSpec, c *corev1.Container) {
			many := int32(65)
			s.Spec.Replicas = &many
		}),
		"a Service for everybody": headless(func(s *corev1.ServiceSpec) { s.ClusterIP, s.Type = "", corev1.ServiceTypeLoadBalancer }),
		"addresses of others":     headless(func(s *corev1.ServiceSpec) { s.ExternalIPs = []string{"10.0.0.1"} }),
		"another name": headless(func(s *corev1.ServiceSpec) {
			*s = corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "example.com"}
		}),
		"a Service of others' pods":       headless(func(s *corev1.ServiceSpec) { s.Selector = map[string]string{"app": "database"} }),
		"a Service without a selector":    headless(func(s *corev1.ServiceSpec) { s.Selector = nil }),
		"a Service's other port":          headless(func(s *corev1.ServiceSpec) { s.Ports[0].Port = 443 }),
		"a PodDisruptionBudget of all":    budget(nil),
		"a PodDisruptionBudget of others": budget(map[string]string{"app": "database"}),
		"a NetworkPolicy of all":          network(nil),
		"a NetworkPolicy of others":       network(map[string]string{"app": "database"}),
		"a Secret with something else":    key(func(s *corev1.Secret) { s.Data["password"] = []byte("x") }),
		"a Secret without the label":      secret(func(s *corev1.Secret) { s.Labels = nil }),
		"a token for an account": secret(func(s *corev1.Secret) {
			s.Type, s.Annotations = corev1.SecretTypeServiceAccountToken, map[string]string{corev1.ServiceAccountNameKey: "default"}
		}),
		"a Service of its own": &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "other"}, Spec: corev1.ServiceSpec{ClusterIP: "None"}},
	} {
		t.Run(name, func(t *testing.T) {
			refused(t, controller.Create(t.Context(), object, client.DryRunAll), "'evenkeel-reduction' denied")
		})
	}
	others := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "users"}, Spec: corev1.ServiceSpec{ClusterIP: "None"}}
	if err := admin.Create(t.Context(), others); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]string{
		"a finalizer":   `{"metadata": {"finalizers": ["example.com/a"]}}`,
		"no owner":      `{"metadata": {"ownerReferences": null}}`,
		"another image": `{"spec": {"template": {"spec": {"containers": [{"name": "reduction-server", "image": "miner:1"}]}}}}`,
	} {
		t.Run("changing/"+name, func(t *testing.T) {
			refused(t, controller.Patch(t.Context(), good.DeepCopy(), client.RawPatch("application/strategic-merge-patch+json", []byte(change)), client.DryRunAll), "'evenkeel-reduction' denied")
		})
	}
	taken := client.RawPatch("application/merge-patch+json", []byte(`{"metadata": {"labels": {"evenkeel.dev/reduction-server": "users"},
	  "ownerReferences": [{"apiVersion": "evenkeel.dev/v1alpha1", "kind": "ReductionService", "name": "users", "uid": "x"}]}}`))
	refused(t, controller.Patch(t.Context(), others, taken), "only what it created")
}

func TestReductionServiceValidation(t *testing.T) {
	good := func(change func(*evenkeel.ReductionService)) *evenkeel.ReductionService {
		two := int32(2)
		s := &evenkeel.ReductionService{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "x-reduce-0"}, Spec: evenkeel.ReductionServiceSpec{
			WorkloadRef: evenkeel.WorkloadReference{APIGroup: "batch", Kind: "Job", Name: "x", UID: "u"}, Replicas: &two, Image: "i:1",
		}}
		if change != nil {
			change(s)
		}
		return s
	}
	zero, many := int32(0), int32(65)
	for want, bad := range map[string]*evenkeel.ReductionService{
		"spec.replicas in body should be greater": good(func(s *evenkeel.ReductionService) { s.Spec.Replicas = &zero }),
		"spec.replicas in body should be less":    good(func(s *evenkeel.ReductionService) { s.Spec.Replicas = &many }),
		"spec.image":                              good(func(s *evenkeel.ReductionService) { s.Spec.Image = "" }),
		"spec.workloadRef.apiGroup":               good(func(s *evenkeel.ReductionService) { s.Spec.WorkloadRef.APIGroup = "" }),
		"spec.workloadRef.uid":                    good(func(s *evenkeel.ReductionService) { s.Spec.WorkloadRef.UID = "" }),
		"spec.server.placement.mode":              good(func(s *evenkeel.ReductionService) { s.Spec.Server.Placement.Mode = "Anywhere" }),
		"at most 52":                              good(func(s *evenkeel.ReductionService) { s.Name = strings.Repeat("x", 53) }),
		"a letter first":                          good(func(s *evenkeel.ReductionService) { s.Name = "0x" }),
	} {
		t.Run(want, func(t *testing.T) { refused(t, dryRun(t.Context(), bad), want) })
	}
	fixed := good(nil)
	if err := admin.Create(t.Context(), fixed); err != nil {
		t.Fatal(err)
	}
	remove(t, fixed)
	fixed = fixed.DeepCopy()
	*fixed.Spec.Replicas = 3
	refused(t, admin.Update(t.Context(), fixed), "fixed when it is created")

	more, two := int32(17), int32(2)
	for want, spec := range map[string]evenkeel.ReductionSpec{
		"spec.reduction.mode":                      {Mode: "Sometimes"},
		"servers is larger than maxServers":        {Servers: &more},
		"servers is larger than maxServers ":       {Servers: &more, MaxServers: &two},
		"spec.reduction.sizing.serverBandwidth":    {Sizing: evenkeel.SizingSpec{WorkerBandwidth: resource.MustParse("1G")}},
		"spec.reduction.maxServers in body should": {MaxServers: &zero},
	} {
		t.Run(want, func(t *testing.T) {
			p := &evenkeel.NetworkProfile{ObjectMeta: metav1.ObjectMeta{Name: "bad"}, Spec: evenkeel.NetworkProfileSpec{Plugin: evenkeel.PluginSpec{Image: image}, Reduction: spec}}
			refused(t, dryRun(t.Context(), p), strings.TrimSpace(want))
		})
	}
}

func TestSampleReduction(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "config", "samples", "reduction.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	ns, kinds := newNamespace(t, nil), 0
	for document := range strings.SplitSeq(string(text), "\n---\n") {
		object := &unstructured.Unstructured{}
		if err := yaml.UnmarshalStrict([]byte(document), &object.Object); err != nil {
			t.Fatal(err)
		}
		kinds++
		if object.GetKind() == "NetworkProfile" {
			p := &evenkeel.NetworkProfile{}
			if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(object.Object, p, true); err != nil {
				t.Fatal(err)
			}
			newProfile(t, p.Name, p.Spec)
			continue
		}
		object.SetNamespace(ns)
		if err := admin.Create(t.Context(), object, client.FieldValidation("Strict")); err != nil {
			t.Fatal(err)
		}
		service := waitService(t, object, "exists", func(*evenkeel.ReductionService) bool { return true })
		if *service.Spec.Replicas != 4 {
			t.Errorf("%d servers; the sample says that it gets 4", *service.Spec.Replicas)
		}
	}
	if kinds != 2 {
		t.Errorf("%d objects, want a profile and a job", kinds)
	}
}

// TestEventGuardLimitsController has Events in others' names.
func TestEventGuardLimitsController(t *testing.T) {
	ns := newNamespace(t, nil)
	controller, err := client.New(apiserver.As(config, systemNamespace, "evenkeel-controller"), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	event := func(reason, component string) *corev1.Event {
		return &corev1.Event{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "a-", Namespace: ns}, InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: ns, Name: "a"},
			Reason: reason, Source: corev1.EventSource{Component: component}, Type: "Normal", Message: "text",
		}
	}
	if err := controller.Create(t.Context(), event("EvenkeelSkipped", "evenkeel"), client.DryRunAll); err != nil {
		t.Error(err)
	}
	refused(t, controller.Create(t.Context(), event("Killing", "evenkeel"), client.DryRunAll), "'evenkeel-events' denied")
	refused(t, controller.Create(t.Context(), event("EvenkeelSkipped", "kubelet"), client.DryRunAll), "'evenkeel-events' denied")
}
