package doctor

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/version"
	discoveryfake "k8s.io/client-go/discovery/fake"
	kubefake "k8s.io/client-go/kubernetes/fake"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	clienttesting "k8s.io/client-go/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

func node(name, kubelet, runtime string, capacity, allocatable string) corev1.Node {
	n := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	n.Status.NodeInfo = corev1.NodeSystemInfo{KubeletVersion: kubelet, ContainerRuntimeVersion: runtime}
	if capacity != "" {
		n.Status.Capacity = corev1.ResourceList{"rdma/hca": resource.MustParse(capacity)}
		n.Status.Allocatable = corev1.ResourceList{"rdma/hca": resource.MustParse(allocatable)}
	}
	return n
}

func processor(name, kind string) corev1.Node {
	n := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	n.Status.NodeInfo.Architecture = kind
	return n
}

func condition(kind string, status metav1.ConditionStatus, message string) []metav1.Condition {
	return []metav1.Condition{{Type: kind, Status: status, Message: message}}
}

func pod(name string, change func(*corev1.Pod)) corev1.Pod {
	p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: name, Annotations: map[string]string{evenkeel.InjectedKey: "1"}}}
	p.Status.Phase = corev1.PodRunning
	change(&p)
	return p
}

// chart are labels of what the chart installs by another name.
var chart = map[string]string{"helm.sh/chart": "evenkeel-0.1.0", "app.kubernetes.io/name": "renamed"}

func labelled(name, key, value string) corev1.Node {
	n := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if key != "" {
		n.Labels = map[string]string{key: value}
	}
	return n
}

func wanting(resource string) (p evenkeel.NetworkProfile) {
	p.Spec.Transport.RDMA.ResourceName = resource
	return p
}

// waits is a pod whose container waits for an image.
func waits(name, message string) corev1.Pod {
	return pod(name, func(p *corev1.Pod) {
		p.Status.Phase = corev1.PodPending
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{Image: "own/image", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff", Message: message}}}}
	})
}

// uses is a pod with the image, and what its plugin has reported.
func uses(name, image, status string) corev1.Pod {
	return pod(name, func(p *corev1.Pod) {
		p.Annotations[evenkeel.PluginStatusKey] = status
		p.Spec.Containers = []corev1.Container{{Image: image}}
	})
}

func TestDoctorFindings(t *testing.T) {
	annotated := func(value string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Annotations[evenkeel.PluginStatusKey] = value }
	}
	profile := func(mode evenkeel.TransportMode, conditions []metav1.Condition, rdmaNodes int32) evenkeel.NetworkProfile {
		p := evenkeel.NetworkProfile{ObjectMeta: metav1.ObjectMeta{Name: "default", Generation: 1}}
		p.Spec.Transport.Mode = mode
		p.Status = evenkeel.NetworkProfileStatus{ObservedGeneration: 1, Conditions: conditions, RDMANodes: &rdmaNodes}
		return p
	}
	gpu := node("gpu", "", "", "8", "8")
	gpu.Status.Allocatable["nvidia.com/gpu"] = resource.MustParse("8")
	ready := condition(evenkeel.ConditionReady, metav1.ConditionTrue, "fine")
	const reported = "Loaded 2026-11-23T07:00:00Z version 0.1.0, protocol "
	for name, test := range map[string]struct {
		findings []Finding
		want     []string // "Status check text"
	}{
		"old Kubernetes":    {[]Finding{kubernetesVersion("v1.29.4")}, []string{"Problem kubernetes v1.29.4"}},
		"Kubernetes 1.33":   {[]Finding{kubernetesVersion("v1.33.1-eks-1")}, []string{"OK kubernetes init container"}},
		"Kubernetes 1.36":   {[]Finding{kubernetesVersion("v1.36.3")}, []string{"OK kubernetes v1.36.3"}},
		"no version at all": {[]Finding{kubernetesVersion("latest")}, []string{"Unknown kubernetes latest"}},
		"mixed runtimes": {runtimes([]corev1.Node{node("b", "v1.36.0", "containerd://2.1.4", "", ""), node("a", "v1.36.0", "containerd://2.1.4", "", ""), node("old", "v1.30.0", "containerd://1.7.0", "", "")}),
			[]string{"OK runtime 2 nodes can mount images: kubelet v1.36.0, containerd://2.1.4 (a, b)", "Note runtime 1 node cannot mount images"}},
		"only old runtimes":     {runtimes([]corev1.Node{node("old", "v1.30.0", "docker://20.1", "", "")}), []string{"OK runtime 1 node cannot mount images"}},
		"one kind of processor": {processors([]corev1.Node{processor("a", "arm64"), processor("b", "arm64"), processor("new", "")}), nil},
		"two kinds of processors": {processors([]corev1.Node{processor("a", "arm64"), processor("b", "amd64"), processor("c", "arm64")}),
			[]string{"Note processors 1 node with amd64 (b); 2 nodes with arm64 (a, c)"}},
		"no RDMA": {rdma([]corev1.Node{node("a", "", "", "", "")}, nil), []string{"OK rdma no node offers"}},
		"RDMA here and there": {rdma([]corev1.Node{node("a", "", "", "8", "8"), node("b", "", "", "8", "0"), node("c", "", "", "", "")}, nil),
			[]string{"OK rdma 1 node with rdma/hca: a", "Problem rdma 1 node with rdma/hca, but none that works: b", "Note rdma 1 node without an RDMA device, as no device plugin offers one there: c"}},
		"no profile":        {profiles(nil), []string{"Problem profiles there is no NetworkProfile"}},
		"a good profile":    {profiles([]evenkeel.NetworkProfile{profile("TCP", ready, 0)}), []string{"OK profiles default: fine"}},
		"an unseen profile": {profiles([]evenkeel.NetworkProfile{profile("TCP", nil, 0)}), []string{"Problem profiles default: the controller has not looked at it"}},
		"nodes are too old": {profiles([]evenkeel.NetworkProfile{profile("TCP", condition(evenkeel.ConditionReady, metav1.ConditionFalse, "1 of 2 nodes"), 0)}), []string{"Problem profiles default: 1 of 2 nodes"}},
		"RDMA is required":  {profiles([]evenkeel.NetworkProfile{profile("RDMA", append(condition(evenkeel.ConditionRDMA, metav1.ConditionFalse, "none of 2 nodes"), ready...), 0)}), []string{"OK profiles", "Problem rdma default requires RDMA: none of 2 nodes"}},
		"servers of another version": {profiles([]evenkeel.NetworkProfile{profile("TCP", append(condition(evenkeel.ConditionImagesMatch, metav1.ConditionFalse, "tags 1 and 2"), ready...), 0)}),
			[]string{"OK profiles", "Problem versions default: tags 1 and 2"}},
		"servers of some version": {profiles([]evenkeel.NetworkProfile{profile("TCP", append(condition(evenkeel.ConditionImagesMatch, metav1.ConditionUnknown, "no tags"), ready...), 0)}),
			[]string{"OK profiles", "Note versions default: no tags"}},
		"plugins of one version": {versions([]corev1.Pod{pod("a", annotated(reported+"7, devices: x")), pod("b", annotated(reported+"7, devices: y")), pod("c", annotated("Failed 2026-11-23T07:00:00Z version"))}),
			[]string{"OK versions version 0.1.0, protocol 7: 2 pods"}},
		"plugins of two versions": {versions([]corev1.Pod{pod("a", annotated(reported+"7, devices: x")), pod("b", annotated(reported+"6, devices: y"))}),
			[]string{"Note versions version 0.1.0, protocol 6: 1 pod; version 0.1.0, protocol 7: 1 pod"}},
		"no plugin has said its version": {versions(nil), nil},
		"GPUs without GPUDirect": {gpuDirect([]corev1.Node{gpu}, []evenkeel.NetworkProfile{profile("Auto", condition(evenkeel.ConditionRDMA, metav1.ConditionTrue, ""), 1)}),
			[]string{"Note rdma default: mode Auto does without GPUDirect"}},
		"GPUs with GPUDirect": {gpuDirect([]corev1.Node{gpu}, []evenkeel.NetworkProfile{profile("RDMA", condition(evenkeel.ConditionRDMA, metav1.ConditionTrue, ""), 1)}), nil},
		"GPUs without RDMA":   {gpuDirect([]corev1.Node{gpu}, []evenkeel.NetworkProfile{profile("Auto", condition(evenkeel.ConditionRDMA, metav1.ConditionFalse, ""), 0), profile("TCP", nil, 0)}), nil},
		"RDMA without GPUs":   {gpuDirect([]corev1.Node{node("a", "", "", "8", "8")}, []evenkeel.NetworkProfile{profile("Auto", condition(evenkeel.ConditionRDMA, metav1.ConditionTrue, ""), 1)}), nil},
		"RDMA cards without devices": {rdma([]corev1.Node{labelled("bare", "", ""), labelled("card", "feature.node.kubernetes.io/pci-15b3.present", "true"), labelled("unloaded", "feature.node.kubernetes.io/custom-rdma.capable", "true")}, nil),
			[]string{"Note rdma 1 node without an RDMA device, as Node Feature Discovery finds a card there, but not its kernel modules: unloaded",
				"Note rdma 1 node without an RDMA device, as Node Feature Discovery finds a card there, but no device plugin offers it: card", "Note rdma 1 node without an RDMA device, as no device plugin offers one there: bare"}},
		"RDMA device plugin ended":           {rdma([]corev1.Node{node("a", "", "", "0", "0")}, nil), []string{"Note rdma 1 node on which a device plugin offered rdma/hca and has ended: a"}},
		"RDMA device plugin ended, in a job": {rdma([]corev1.Node{node("a", "", "", "0", "0")}, []evenkeel.NetworkProfile{wanting("rdma/hca")}), []string{"Problem rdma 1 node on which a device plugin offered rdma/hca and has ended: a"}},
		"RDMA on some":                       {profiles([]evenkeel.NetworkProfile{profile("Auto", append(condition(evenkeel.ConditionRDMA, metav1.ConditionFalse, "1 of 2 nodes"), ready...), 1)}), []string{"OK profiles", "Note rdma default: 1 of 2 nodes"}},
		"pods of every state": {plugin([]corev1.Pod{
			pod("good", annotated("Loaded 2026-11-23T07:00:00Z version 0.1.0")),
			pod("bad", annotated("Failed 2026-11-23T07:00:00Z EVENKEEL_FLOWS=many")),
			pod("silent", annotated(evenkeel.PluginNotReported)),
			pod("unseen", func(p *corev1.Pod) { p.Annotations = nil }),
		}), []string{"OK plugin NCCL uses the plugin in 1 pod", "Problem plugin running pods that neither webhook nor policy saw, and so without the plugin: 1 (ml/unseen)", "Problem plugin running pods in which the plugin refused to start, EVENKEEL_FLOWS=many: 1 (ml/bad)",
			"Note plugin running pods that have not reported"}},
		"images that cannot be pulled": {waitingForImages([]corev1.Pod{
			waits("a", `Back-off pulling image "registry.example.com/p:1": ErrImagePull: failed to resolve reference "registry.example.com/p:1": 401 Unauthorized`),
			waits("b", `Back-off pulling image "registry.example.com/p:1": ErrImagePull: failed to resolve reference "registry.example.com/p:1": 401 Unauthorized`),
			waits("c", `failed to pull image "mirror.example.com/p:1": dial tcp: lookup mirror.example.com: no such host`),
			waits("d", `failed to pull image "own.example.com/p:1": tls: failed to verify certificate: x509: certificate signed by unknown authority`),
			waits("e", `failed to pull image "gone.example.com/p:1": gone.example.com/p:1: not found`),
			waits("f", `failed to pull image "arm.example.com/p:1": no match for platform in manifest: not found`),
			waits("g", ""),
			pod("starts", func(p *corev1.Pod) {
				p.Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ContainerCreating"}}}}
			}),
		}), []string{"Problem registries arm.example.com: 1 pod waits for arm.example.com/p:1, as the image is not for the processor of the nodes: ml/f",
			"Problem registries gone.example.com: 1 pod waits for gone.example.com/p:1, as it does not have the image: ml/e", "Problem registries mirror.example.com: 1 pod waits for mirror.example.com/p:1, as nodes do not reach it: ml/c",
			"Problem registries own.example.com: 1 pod waits for own.example.com/p:1, as nodes do not trust its certificate: ml/d", "Problem registries docker.io: 1 pod waits for own/image, as the API does not say why: ml/g",
			"Problem registries registry.example.com: 2 pods wait for registry.example.com/p:1, as it refuses the credentials, or the image does not exist: ml/a, ml/b"}},
		"images with an old glibc": {glibc([]corev1.Pod{
			uses("old", "registry.example.com/nccl:11.0-ubuntu18.04", evenkeel.PluginNotReported), uses("loaded", "registry.example.com/misnamed:ubuntu16.04", reported+"7, devices: x"), uses("new", "registry.example.com/nccl:12.4-ubuntu22.04", evenkeel.PluginNotReported),
		}, map[string][]string{"registry.example.com/nccl:11.0-ubuntu18.04": {"n1"}, "docker.io/library/train:centos7": {"n1", "n2"}}),
			[]string{"Problem glibc the name of image registry.example.com/nccl:11.0-ubuntu18.04 says ubuntu18.04, whose glibc is before 2.28 and cannot load the plugin; 1 running pod with it: ml/old",
				"Note glibc names of images on nodes with accelerators say a distribution whose glibc is before 2.28: if jobs of NCCL use them, they cannot load the plugin: docker.io/library/train:centos7 (2 nodes)", "Unknown glibc the API does not show"}},
		"no image with an old glibc": {glibc(nil, nil), []string{"Unknown glibc the API does not show"}},
	} {
		if len(test.findings) != len(test.want) {
			t.Errorf("%s: %+v, want %q", name, test.findings, test.want)
			continue
		}
		for i, want := range test.want {
			f, words := test.findings[i], strings.SplitN(want, " ", 3)
			if string(f.Status) != words[0] || f.Check != words[1] || len(words) == 3 && !strings.Contains(f.Message, words[2]) || f.Status == Problem && f.Do == "" || strings.Contains(f.Message+f.Do, "\n") {
				t.Errorf("%s: %+v, want %q", name, f, want)
			}
		}
	}
}

func TestDoctorRegistryOfImage(t *testing.T) {
	for image, want := range map[string]string{"registry.example.com/a/b@sha256:0": "registry.example.com", "localhost:5000/a:1": "localhost:5000", "evenkeel/plugin:1": "docker.io", "plugin": "docker.io"} {
		if got := registry(image); got != want {
			t.Errorf("%s: %s, want %s", image, got, want)
		}
	}
}

func TestDoctorCertificate(t *testing.T) {
	if _, err := trustedUntil([]byte("nothing")); err == nil || !strings.Contains(err.Error(), "no CA") {
		t.Errorf("%v", err)
	}
	if until, err := trustedUntil(nil); err == nil || !until.Equal(time.Time{}) {
		t.Errorf("%v %v", until, err)
	}
}

// dryRuns is a cluster that answers so when an object is created in a dry run.
func dryRuns(t *testing.T, answer func(client.Object) error) client.Client {
	return fake.NewClientBuilder().WithInterceptorFuncs(interceptor.Funcs{
		Create: func(_ context.Context, _ client.WithWatch, object client.Object, options ...client.CreateOption) error {
			var all client.CreateOptions
			all.ApplyOptions(options)
			if len(all.DryRun) == 0 {
				t.Error("it is no dry run")
			}
			return answer(object)
		},
	}).Build()
}

// TestDoctorAdmission has every answer that the API server may give to the probe.
func TestDoctorAdmission(t *testing.T) {
	group := schema.GroupResource{Group: "batch", Resource: "jobs"}
	for name, test := range map[string]struct {
		answer error
		want   Status
		text   string
	}{
		"it answers":      {apierrors.NewForbidden(group, "", errors.New(`admission webhook denied the request: no NetworkProfile is named "x"`)), OK, "the webhook answers"},
		"it is gone":      {nil, Problem, "no webhook looks at annotated jobs"},
		"it is away":      {apierrors.NewInternalError(errors.New(`failed calling webhook "workloads.evenkeel.dev": connection refused`)), Problem, "connection refused"},
		"not permitted":   {apierrors.NewForbidden(group, "", errors.New("User cannot create resource")), Unknown, "cannot create"},
		"another is away": {apierrors.NewInternalError(errors.New(`failed calling webhook "validate.example.com": connection refused`)), Problem, "not by Evenkeel"},
		"another objects": {apierrors.NewForbidden(group, "", errors.New("denied by policy")), Unknown, "denied by policy"},
	} {
		cluster := dryRuns(t, func(client.Object) error { return test.answer })
		findings, err := (&Doctor{Client: cluster}).admission(t.Context(), nil)
		if err != nil || len(findings) != 1 || findings[0].Status != test.want || !strings.Contains(findings[0].Message, test.text) {
			t.Errorf("%s: %+v %v", name, findings, err)
		}
	}
}

// TestDoctorMutatingPolicies has clusters whose API server injects by itself, and one that cannot.
func TestDoctorMutatingPolicies(t *testing.T) {
	group := schema.GroupResource{Resource: "pods"}
	for name, test := range map[string]struct {
		answer error
		want   Status
		text   string
	}{
		"they refuse":   {apierrors.NewForbidden(group, "", errors.New(`denied request: annotation evenkeel.dev/profile: no NetworkProfile is named "x"`)), OK, "there is no webhook"},
		"they are gone": {nil, Problem, "no policy looks at annotated pods"},
		"not permitted": {apierrors.NewForbidden(group, "", errors.New("User cannot create resource")), Unknown, "cannot create"},
	} {
		cluster := dryRuns(t, func(object client.Object) error {
			if job, ok := object.(*batchv1.Job); ok { // what the policy about jobs does
				job.Spec.Template.Annotations = map[string]string{evenkeel.ProfileKey: job.Annotations[evenkeel.ProfileKey]}
				return nil
			}
			return test.answer
		})
		findings, err := (&Doctor{Client: cluster}).admission(t.Context(), nil)
		if err != nil || len(findings) != 1 || findings[0].Status != test.want || !strings.Contains(findings[0].Message, test.text) {
			t.Errorf("%s: %+v %v", name, findings, err)
		}
	}
	old := fake.NewClientBuilder().WithRESTMapper(meta.NewDefaultRESTMapper(nil)).Build()
	findings, err := (&Doctor{Client: old}).mutatingPolicies(t.Context(), nil)
	if err != nil || len(findings) != 1 || !strings.Contains(findings[0].Message, "serves no MutatingAdmissionPolicy v1") {
		t.Errorf("%+v %v", findings, err)
	}
}

// answers is an API server that says its version, and what you may do.
func answers(may bool) *kubefake.Clientset {
	c := kubefake.NewClientset()
	c.Discovery().(*discoveryfake.FakeDiscovery).FakedServerVersion = &version.Info{GitVersion: "v1.36.3"}
	c.PrependReactor("create", "selfsubjectaccessreviews", func(action clienttesting.Action) (bool, runtime.Object, error) {
		review := action.(clienttesting.CreateAction).GetObject().(*authorizationv1.SelfSubjectAccessReview).DeepCopy()
		review.Status.Allowed = may || review.Spec.ResourceAttributes.Resource == "namespaces"
		return true, review, nil
	})
	return c
}

// clusterOf has these objects, and answers so.
func clusterOf(t *testing.T, answer interceptor.Funcs, objects ...client.Object) client.Client {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), evenkeel.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	return fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).WithInterceptorFuncs(answer).Build()
}

func lines(findings []Finding) string {
	var all strings.Builder
	for _, f := range findings {
		fmt.Fprintf(&all, "%s %s %s; do: %s\n", f.Status, f.Check, f.Message, f.Do)
	}
	return all.String()
}

func wantLines(t *testing.T, findings []Finding, want ...string) {
	t.Helper()
	text := lines(findings)
	if got := strings.Count(text, "\n"); got != len(findings) {
		t.Errorf("%d lines for %d findings: %s", got, len(findings), text)
	}
	for _, want := range want {
		if !strings.Contains(text, want) {
			t.Errorf("%q is missing in\n%s", want, text)
		}
	}
}

// TestDoctorBeforeInstalling has a cluster without Evenkeel's kinds, and somebody who may not install.
func TestDoctorBeforeInstalling(t *testing.T) {
	gpu := node("gpu", "v1.36.0", "containerd://2.1.4", "", "")
	gpu.Status.Allocatable = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("8")}
	gpu.Status.Images = []corev1.ContainerImage{{Names: []string{"nvcr.io/train@sha256:0", "nvcr.io/train:cuda11-ubuntu18.04"}}, {Names: []string{"docker.io/library/busybox:1"}}, {Names: []string{"<none>@<none>", "localhost/mine:1"}}}
	set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "network", Name: "rdma-shared-dp-ds"}, Status: appsv1.DaemonSetStatus{DesiredNumberScheduled: 3}}
	strict := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "strict", Labels: map[string]string{enforceKey: "restricted"}}}
	bare := clusterOf(t, interceptor.Funcs{
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			if _, ok := list.(*evenkeel.NetworkProfileList); ok {
				return &meta.NoKindMatchError{GroupKind: evenkeel.GroupVersion.WithKind("NetworkProfile").GroupKind()}
			}
			return c.List(ctx, list, options...)
		},
	}, &gpu, set, strict)
	findings, err := (&Doctor{Client: bare, Clientset: answers(false), Namespace: "evenkeel-system"}).Examine(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	wantLines(t, findings, "OK kubernetes v1.36.3", "Note installation Evenkeel is not installed", "Note permissions you may not create these, which the chart has: customresourcedefinitions, clusterroles",
		"OK runtime 1 node can mount images", "OK rdma no node offers", "Problem rdma the device plugin network/rdma-shared-dp-ds is ready on 0 of 3 nodes", "OK kueue Kueue is not installed",
		"OK registries of 1 node, so many have images from these registries: docker.io (1), nvcr.io (1)", "OK security 1 namespace with pod standard restricted", "Note glibc names of images on nodes", "nvcr.io/train:cuda11-ubuntu18.04 (1 node)")
	if text := lines(findings); strings.Contains(text, "namespaces, custom") || strings.Contains(text, " admission ") || strings.Contains(text, "localhost") {
		t.Error(text)
	}
	findings, err = (&Doctor{Client: bare, Clientset: answers(true)}).Examine(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	wantLines(t, findings, "OK permissions you may create all")
}

// TestDoctorWithoutPermissions has somebody who may see nothing. Each thing is a line, and nothing is said about what was not seen.
func TestDoctorWithoutPermissions(t *testing.T) {
	no := func(of string) error {
		return apierrors.NewForbidden(schema.GroupResource{Resource: of}, "", errors.New("User \"me\" cannot look"))
	}
	closed := clusterOf(t, interceptor.Funcs{
		List: func(_ context.Context, _ client.WithWatch, list client.ObjectList, _ ...client.ListOption) error {
			return no(fmt.Sprintf("%T", list))
		},
		Get: func(context.Context, client.WithWatch, client.ObjectKey, client.Object, ...client.GetOption) error {
			return no("object")
		},
		Create: func(context.Context, client.WithWatch, client.Object, ...client.CreateOption) error {
			return no("jobs")
		},
	})
	findings, err := (&Doctor{Client: closed, Clientset: answers(false), Namespace: "evenkeel-system"}).Examine(t.Context())
	if err != nil || Sick(findings) {
		t.Fatalf("%s %v", lines(findings), err)
	}
	wantLines(t, findings, "OK kubernetes", "Unknown nodes you may not look", "Unknown networkprofiles you may not look", "Unknown pods you may not look", "Unknown operator you may not look",
		"Unknown admission a job could not be tried", "Unknown certificate you may not look", "Unknown registries you may not look", "Unknown security you may not look")
	for _, wrong := range []string{"no node offers", "there is no NetworkProfile", "NCCL uses the plugin in"} {
		if text := lines(findings); strings.Contains(text, wrong) {
			t.Errorf("%q was not seen: %s", wrong, text)
		}
	}
}

// TestDoctorGoesOn: what does not answer is a line too. Only an end of the whole examination is an error, with what is known by then.
func TestDoctorGoesOn(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	pods := 0
	slow := clusterOf(t, interceptor.Funcs{
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			if _, ok := list.(*corev1.PodList); ok {
				pods++
				return apierrors.NewTimeoutError("etcd is\nbusy", 1)
			}
			return c.List(ctx, list, options...)
		},
	}, &evenkeel.NetworkProfile{ObjectMeta: metav1.ObjectMeta{Name: "default"}})
	d := &Doctor{Client: slow, Clientset: answers(true), Namespace: "evenkeel-system"}
	findings, err := d.Examine(ctx)
	if err != nil || pods == 0 {
		t.Fatalf("%d %v", pods, err)
	}
	wantLines(t, findings, "Unknown pods the API server took too long", "etcd is busy", "Problem profiles default: the controller has not looked at it", "Problem operator namespace evenkeel-system has no Deployment")
	cancel()
	if findings, err = d.Examine(ctx); err == nil || !strings.Contains(err.Error(), "incomplete") {
		t.Errorf("%v", err)
	}
	wantLines(t, findings, "OK kubernetes")
}

// TestDoctorReadsInPages has a large cluster: no list is without a limit, and one that does not end is cut off.
func TestDoctorReadsInPages(t *testing.T) {
	const size, most = 3, 1000
	pods, pageOfPods := 0, 0
	var fleet []corev1.Node
	for i := range 2*size + 1 {
		fleet = append(fleet, node(fmt.Sprintf("n%d", i), "v1.36.0", "containerd://2.1.4", "", ""))
	}
	large := clusterOf(t, interceptor.Funcs{
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			var all client.ListOptions
			all.ApplyOptions(options)
			switch list := list.(type) {
			case *corev1.NodeList:
				from := 0
				if all.Continue != "" {
					from = int(all.Continue[0] - '0')
				}
				to := min(from+size, len(fleet))
				list.Items, list.Continue = append(list.Items[:0], fleet[from:to]...), ""
				if to < len(fleet) {
					list.Continue = fmt.Sprint(to)
				}
			case *corev1.PodList:
				list.Items, list.Continue, pageOfPods = nil, "more", int(all.Limit)
				pods += pageOfPods
				for range all.Limit {
					list.Items = append(list.Items, pod("endless", func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }))
				}
			default:
				return c.List(ctx, list, options...)
			}
			if all.Limit == 0 || all.Limit > most {
				t.Errorf("%T: %d objects at a time", list, all.Limit)
			}
			return nil
		},
	})
	findings, err := (&Doctor{Client: large, Clientset: answers(true), Namespace: "evenkeel-system"}).Examine(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	wantLines(t, findings, "OK runtime 7 nodes can mount images: kubelet v1.36.0, containerd://2.1.4 (n0, n1, n2, n3, n4, n5, n6)", "Note pods the cluster has more than 20000 pods with a profile")
	// Those of jobs and those of checks.
	if pods > 2*(maxPods+pageOfPods) {
		t.Errorf("it read %d pods", pods)
	}
}

// TestDoctorPullSecrets: the same in many namespaces is one line, and so is what may not be read.
func TestDoctorPullSecrets(t *testing.T) {
	profile := &evenkeel.NetworkProfile{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
	profile.Spec.Plugin.Image = "registry.example.com/plugin:1"
	profile.Spec.ImagePullSecrets = []string{"pull"}
	operator := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "evenkeel-system", Name: "evenkeel-controller", Labels: chart}}
	operator.Spec.Template.Spec = corev1.PodSpec{Containers: []corev1.Container{{Image: "registry.example.com/operator:1"}}, ImagePullSecrets: []corev1.LocalObjectReference{{Name: "pull"}}}
	objects := []client.Object{profile, operator}
	secret := func(namespace, key, data string) {
		objects = append(objects, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "pull"}, Data: map[string][]byte{key: []byte(data)}})
	}
	for i := range 9 {
		p := pod("p", func(p *corev1.Pod) {
			p.Namespace, p.Labels, p.Spec.NodeName = fmt.Sprintf("ml-%d", i), map[string]string{evenkeel.ProfileKey: "default"}, fmt.Sprint("n", i%2)
			p.Spec.InitContainers = []corev1.Container{{Name: "evenkeel-install", Image: "registry.example.com/plugin:1"}}
		})
		objects = append(objects, &p)
	}
	secret("ml-0", corev1.DockerConfigJsonKey, `{"auths":{"https://registry.example.com/v2/":{"auth":"x"}}}`)
	secret("ml-1", corev1.DockerConfigJsonKey, `{"auths":{"*.example.com":{"auth":"x"}}}`)
	secret("ml-2", corev1.DockerConfigKey, `{"registry.example.com":{"auth":"x"}}`)
	secret("ml-3", corev1.DockerConfigJsonKey, `{"auths":{"elsewhere.example.com":{"auth":"x"}}}`)
	secret("ml-4", "password", "x")
	secret("evenkeel-system", corev1.DockerConfigJsonKey, `{"auths":{"elsewhere.example.com":{"auth":"x"}}}`)
	cluster := clusterOf(t, interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, object client.Object, options ...client.GetOption) error {
			if key.Namespace == "ml-5" || key.Namespace == "ml-6" {
				return apierrors.NewForbidden(schema.GroupResource{Resource: "secrets"}, key.Name, errors.New("no"))
			}
			return c.Get(ctx, key, object, options...)
		},
	}, objects...)
	findings, err := (&Doctor{Client: cluster, Clientset: answers(true), Namespace: "evenkeel-system"}).Examine(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	wantLines(t, findings, "OK registries profile default pulls from registry.example.com with pull. 2 nodes with an image from there",
		"OK registries Secret pull of profile default is for registry.example.com, in 3 namespaces: ml-0, ml-1, ml-2;",
		"Problem registries Secret pull of profile default is for elsewhere.example.com, but the image comes from registry.example.com, in 1 namespace: ml-3;",
		"Problem registries Secret pull of profile default is not of the type kubernetes.io/dockerconfigjson, in 1 namespace: ml-4;",
		"Unknown registries Secret pull of profile default is one that you may not read, in 2 namespaces: ml-5, ml-6;",
		"Problem registries Secret pull of profile default does not exist, in 2 namespaces: ml-7, ml-8;",
		"Problem registries Secret pull of Evenkeel's Deployments is for elsewhere.example.com, but the image comes from registry.example.com, in 1 namespace: evenkeel-system;")
}

// TestDoctorSecurity has namespaces that refuse IPC_LOCK, and a profile that adds it.
func TestDoctorSecurity(t *testing.T) {
	namespace := func(name, level, team string) *corev1.Namespace {
		return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{enforceKey: level, "team": team}}}
	}
	cluster := clusterOf(t, interceptor.Funcs{}, namespace("a", "baseline", "ml"), namespace("b", "restricted", "ml"), namespace("c", "privileged", "ml"), namespace("d", "restricted", "web"))
	locking := func(name string, mode evenkeel.TransportMode) evenkeel.NetworkProfile {
		p := evenkeel.NetworkProfile{ObjectMeta: metav1.ObjectMeta{Name: name}}
		p.Spec.Transport.Mode, p.Spec.Transport.RDMA.MemoryLock = mode, evenkeel.MemoryLockCapability
		p.Spec.NamespaceSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"team": "ml"}}
		return p
	}
	used := pod("p", func(p *corev1.Pod) { p.Namespace, p.Labels = "b", map[string]string{evenkeel.ProfileKey: "used"} })
	all := locking("all", evenkeel.TransportAuto)
	all.Spec.NamespaceSelector = nil
	findings, err := (&Doctor{Client: cluster}).podSecurity(t.Context(), &state{pods: []corev1.Pod{used}, profiles: []evenkeel.NetworkProfile{locking("used", evenkeel.TransportRDMA), locking("tcp", evenkeel.TransportTCP), all}})
	if err != nil {
		t.Fatal(err)
	}
	wantLines(t, findings, "OK security 1 namespace with pod standard baseline", "OK security 2 namespaces with pod standard restricted", "Problem security 2 namespaces may use profile used, but Pod Security rejects its capability IPC_LOCK there: a, b;",
		"Note security 3 namespaces may use profile all, but Pod Security rejects its capability IPC_LOCK there: a, b, d;")
	if strings.Contains(lines(findings), "profile tcp") {
		t.Error("a profile without RDMA locks nothing")
	}
}

// TestDoctorOpenShift has a cluster with SecurityContextConstraints.
func TestDoctorOpenShift(t *testing.T) {
	openshift := schema.GroupVersion{Group: "security.openshift.io", Version: "v1"}
	mapper := meta.NewDefaultRESTMapper([]schema.GroupVersion{openshift})
	mapper.Add(openshift.WithKind("SecurityContextConstraints"), meta.RESTScopeRoot)
	d := &Doctor{Client: fake.NewClientBuilder().WithRESTMapper(mapper).Build()}
	findings, err := d.constraints(t.Context(), &state{})
	if err != nil || len(findings) != 1 || findings[0].Do != "install with --set podSecurityContext=null" {
		t.Errorf("%+v %v", findings, err)
	}
	locking := evenkeel.NetworkProfile{ObjectMeta: metav1.ObjectMeta{Name: "rdma"}}
	locking.Spec.Transport.RDMA.MemoryLock = evenkeel.MemoryLockCapability
	if findings, err = d.constraints(t.Context(), &state{installed: true, profiles: []evenkeel.NetworkProfile{locking}}); err != nil {
		t.Fatal(err)
	}
	wantLines(t, findings, "OK security OpenShift's", "Note security profile rdma adds the capability IPC_LOCK")
}

// TestDoctorDeployments: what keeps pods of the operator away is in the line.
func TestDoctorDeployments(t *testing.T) {
	deployment := func(name string, replicas, available int32, refusal string) *appsv1.Deployment {
		d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "evenkeel-system", Name: name, Labels: chart}}
		d.Spec.Replicas, d.Status.AvailableReplicas = &replicas, available
		if refusal != "" {
			d.Status.Conditions = []appsv1.DeploymentCondition{{Type: appsv1.DeploymentReplicaFailure, Status: corev1.ConditionTrue, Message: refusal}}
		}
		return d
	}
	cluster := clusterOf(t, interceptor.Funcs{}, deployment("a", 2, 2, ""), deployment("b", 2, 1, ""), deployment("c", 1, 0, "unable to validate against any security context constraint"), deployment("d", 1, 0, `violates PodSecurity "baseline:latest": host namespaces`))
	findings, err := (&Doctor{Client: cluster, Namespace: "evenkeel-system"}).deployments(t.Context(), &state{})
	if err != nil {
		t.Fatal(err)
	}
	wantLines(t, findings, "OK operator a: 2 of 2", "Note operator b: 1 of 2", "Problem operator c: 0 of 1", "do: on OpenShift", "Problem operator d: 0 of 1", "violates PodSecurity", "do: webhook.hostNetwork needs")
}
