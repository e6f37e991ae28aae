package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/version"
	discoveryfake "k8s.io/client-go/discovery/fake"
	kubefake "k8s.io/client-go/kubernetes/fake"
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
		"RDMA on some":        {profiles([]evenkeel.NetworkProfile{profile("Auto", append(condition(evenkeel.ConditionRDMA, metav1.ConditionFalse, "1 of 2 nodes"), ready...), 1)}), []string{"OK profiles", "Note rdma default: 1 of 2 nodes"}},
		"pods of every state": {plugin([]corev1.Pod{
			pod("good", annotated("Loaded 2026-11-23T07:00:00Z version 0.1.0")),
			pod("bad", annotated("Failed 2026-11-23T07:00:00Z EVENKEEL_FLOWS=many")),
			pod("silent", annotated(evenkeel.PluginNotReported)),
			pod("unseen", func(p *corev1.Pod) { p.Annotations = nil }),
			pod("pulling", func(p *corev1.Pod) {
				p.Status.Phase = corev1.PodPending
				p.Status.InitContainerStatuses = []corev1.ContainerStatus{{Image: "registry.example.com/p@sha256:0", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff"}}}}
			}),
		}), []string{"OK plugin NCCL uses the plugin in 1 pod", "Problem plugin running pods that neither webhook nor policy saw, and so without the plugin: 1 (ml/unseen)", "Problem plugin running pods in which the plugin refused to start, EVENKEEL_FLOWS=many: 1 (ml/bad)",
			"Problem plugin pods that wait for an image: 1 (ml/pulling (registry.example.com", "Note plugin running pods that have not reported", "Unknown glibc the API does not show"}},
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

// TestBundleRedacts: whatever looks like a secret is gone, wherever it is.
func TestBundleRedacts(t *testing.T) {
	object := map[string]any{}
	text := `{"metadata":{"name":"x","managedFields":[{}],"annotations":{"kubectl.kubernetes.io/last-applied-configuration":"hidden-1","evenkeel.dev/profile":"default","evenkeel.dev/environment":"hidden-2"}},
		"spec":{"environment":[{"name":"EVENKEEL_JOB_KEY","value":"hidden-3"},{"name":"EVENKEEL_FLOWS","value":"8"}],
		"template":{"spec":{"containers":[{"name":"key","env":[{"name":"WANDB_API_TOKEN","value":"hidden-4"},{"name":"DB_PASSWORD","value":"hidden-5"}]}]}}}}`
	if err := json.Unmarshal([]byte(text), &object); err != nil {
		t.Fatal(err)
	}
	redact(object)
	after := fmt.Sprint(object)
	if strings.Contains(after, "hidden") || strings.Contains(after, "managedFields") || !strings.Contains(after, "value:8") || !strings.Contains(after, "default") {
		t.Error(after)
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

// TestDoctorBeforeInstalling has a cluster without Evenkeel's kinds, and one whose nodes may not be listed.
func TestDoctorBeforeInstalling(t *testing.T) {
	versions := kubefake.NewClientset()
	versions.Discovery().(*discoveryfake.FakeDiscovery).FakedServerVersion = &version.Info{GitVersion: "v1.36.3"}
	bare := fake.NewClientBuilder().WithInterceptorFuncs(interceptor.Funcs{
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			switch list.(type) {
			case *evenkeel.NetworkProfileList:
				return &meta.NoKindMatchError{GroupKind: evenkeel.GroupVersion.WithKind("NetworkProfile").GroupKind()}
			case *corev1.NodeList:
				return apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "", errors.New("no"))
			}
			return c.List(ctx, list, options...)
		},
	}).Build()
	findings, err := (&Doctor{Client: bare, Clientset: versions, Namespace: "evenkeel-system"}).Examine(t.Context())
	if err != nil || Sick(findings) {
		t.Fatalf("%+v %v", findings, err)
	}
	text := fmt.Sprint(findings)
	for _, want := range []string{"v1.36.3", "Evenkeel is not installed", "you may not list nodes", "Kueue is not installed"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is missing in %s", want, text)
		}
	}
}
