package integration

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"testing"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/test/apiserver"
)

const library = "/opt/evenkeel/plugin/libnccl-net-evenkeel.so"

// imageVolumes is the first version of Kubernetes whose API server keeps image volumes without a feature gate.
const imageVolumes = "1.35"

// needsDelivery skips a test where the API server does not keep what the delivery puts into pods.
func needsDelivery(t *testing.T, delivery evenkeel.Delivery) {
	t.Helper()
	if delivery == evenkeel.DeliveryImageVolume {
		apiserver.Needs(t, imageVolumes, "image volumes by default")
	}
}

func TestInjectPinsProfileOnce(t *testing.T) {
	delivery := evenkeel.DeliveryImageVolume
	if !apiserver.AtLeast(t, imageVolumes) {
		delivery = evenkeel.DeliveryInitContainer
	}
	later := strings.Replace(image, zeros, strings.Repeat("1", 64), 1)
	for _, kind := range []string{"PyTorchJob", "Job"} {
		t.Run(kind, func(t *testing.T) {
			ns, flows := newNamespace(t, nil), int32(7)
			profile := newProfile(t, "pinned", evenkeel.NetworkProfileSpec{
				Plugin:    evenkeel.PluginSpec{Delivery: delivery},
				Transport: evenkeel.TransportSpec{TCP: evenkeel.TCPSpec{FlowsPerPeer: &flows}},

				ImagePullSecrets: []string{"registry"},
			})
			job, templates := newJob(kind, ns, profile.Name)
			createJob(t, job)
			for _, path := range templates {
				content, _, _ := unstructured.NestedMap(job.Object, append(path, "metadata")...)
				labels, _, _ := unstructured.NestedStringMap(content, "labels")
				annotations, _, _ := unstructured.NestedStringMap(content, "annotations")
				if labels[evenkeel.ProfileKey] != profile.Name || labels["app"] != "train" {
					t.Errorf("%v: labels %v", path, labels)
				}
				if annotations[evenkeel.PluginImageKey] != image || annotations[evenkeel.DeliveryKey] != string(delivery) {
					t.Errorf("%v: annotations %v", path, annotations)
				}
			}

			before := profile.DeepCopy()
			profile.Spec.Plugin.Image = later
			if err := admin.Patch(t.Context(), profile, client.MergeFrom(before)); err != nil {
				t.Fatal(err)
			}
			for _, path := range templates {
				pod := createPod(t, podOf(t, job, path))
				c := &pod.Spec.Containers[0]
				var pulled []string
				for _, v := range pod.Spec.Volumes {
					if v.Image != nil {
						pulled = append(pulled, v.Image.Reference)
					}
				}
				for _, c := range pod.Spec.InitContainers {
					pulled = append(pulled, c.Image)
				}
				if len(pod.Spec.Volumes) != 1 || !slices.Equal(pulled, []string{image}) {
					t.Errorf("%v: %q in volumes %+v, want the image the job was created with", path, pulled, pod.Spec.Volumes)
				}
				if s := pod.Spec.ImagePullSecrets; len(s) != 1 || s[0].Name != "registry" {
					t.Errorf("%v: it pulls with %v", path, s)
				}
				if variable(c, "NCCL_NET_PLUGIN") != library || variable(c, "EVENKEEL_FLOWS") != "7" || variable(c, "MINE") != "kept" {
					t.Errorf("%v: environment %v", path, c.Env)
				}
			}
		})
	}
}

func TestInjectDeliveries(t *testing.T) {
	for _, test := range []struct {
		delivery        evenkeel.Delivery
		library         string
		volumes, copies int
	}{
		{evenkeel.DeliveryImageVolume, library, 1, 0},
		{evenkeel.DeliveryInitContainer, library, 1, 1},
		{evenkeel.DeliveryPreinstalled, "/plugin/libnccl-net-evenkeel.so", 0, 0},
	} {
		t.Run(string(test.delivery), func(t *testing.T) {
			needsDelivery(t, test.delivery)
			// The restricted standard is the strictest that a namespace can ask for.
			ns := newNamespace(t, map[string]string{"pod-security.kubernetes.io/enforce": "restricted"})
			pod := labelledPod(ns)
			pod.Annotations[evenkeel.DeliveryKey] = string(test.delivery)
			yes, no, user := true, false, int64(1000)
			pod.Spec.SecurityContext = &corev1.PodSecurityContext{RunAsNonRoot: &yes, RunAsUser: &user, SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}}
			pod.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{AllowPrivilegeEscalation: &no, Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}}
			createPod(t, pod)
			c := &pod.Spec.Containers[0]
			if variable(c, "NCCL_NET_PLUGIN") != test.library {
				t.Errorf("NCCL_NET_PLUGIN is %q, want %q", variable(c, "NCCL_NET_PLUGIN"), test.library)
			}
			if len(pod.Spec.Volumes) != test.volumes || len(c.VolumeMounts) != test.volumes || len(pod.Spec.InitContainers) != test.copies {
				t.Errorf("%d volumes, %d mounts, %d init containers", len(pod.Spec.Volumes), len(c.VolumeMounts), len(pod.Spec.InitContainers))
			}
			if pod.Annotations[evenkeel.InjectedKey] == "" {
				t.Error("the pod does not say that it was injected")
			}
			terms := pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
			if e := terms[0].MatchExpressions; len(terms) != 1 || len(e) != 1 || e[0].Key != evenkeel.HealthKey || e[0].Operator != corev1.NodeSelectorOpNotIn {
				t.Errorf("it does not avoid nodes that failed a check: %+v", terms)
			}
		})
	}
}

// TestInjectKindsOfPods has pods that the API server judges by more than their containers.
func TestInjectKindsOfPods(t *testing.T) {
	yes, no, user := true, false, int64(1000)
	for name, change := range map[string]func(*corev1.PodSpec){
		"user namespace": func(s *corev1.PodSpec) { s.HostUsers = &no },
		"host network":   func(s *corev1.PodSpec) { s.HostNetwork, s.DNSPolicy = true, corev1.DNSClusterFirstWithHostNet },
		"read-only root": func(s *corev1.PodSpec) {
			s.Containers[0].SecurityContext = &corev1.SecurityContext{ReadOnlyRootFilesystem: &yes, RunAsUser: &user}
		},
	} {
		for _, delivery := range []evenkeel.Delivery{evenkeel.DeliveryImageVolume, evenkeel.DeliveryInitContainer} {
			t.Run(name+" by "+string(delivery), func(t *testing.T) {
				needsDelivery(t, delivery)
				if name == "user namespace" {
					apiserver.Needs(t, "1.33", "user namespaces by default")
				}
				pod := labelledPod(newNamespace(t, nil))
				pod.Annotations[evenkeel.DeliveryKey] = string(delivery)
				pod.Annotations[evenkeel.RDMAResourceKey], pod.Annotations[evenkeel.MemoryLockKey], pod.Annotations[evenkeel.RDMANetworksKey] = "rdma/hca=1", "Capability", "rail0"
				change(&pod.Spec)
				before := pod.DeepCopy()
				createPod(t, pod)
				c := &pod.Spec.Containers[0]
				if variable(c, "NCCL_NET_PLUGIN") != library || len(c.VolumeMounts) != 1 {
					t.Errorf("environment %v, mounts %v", c.Env, c.VolumeMounts)
				}
				if pod.Spec.HostNetwork != before.Spec.HostNetwork || !equality.Semantic.DeepEqual(pod.Spec.HostUsers, before.Spec.HostUsers) {
					t.Errorf("%+v", pod.Spec)
				}
				locks := c.SecurityContext != nil && c.SecurityContext.Capabilities != nil
				if skipped := pod.Annotations[evenkeel.SkippedKey]; locks != (name != "user namespace") || (pod.Annotations[evenkeel.NetworksKey] != "") != (name != "host network") || (skipped == "") != (name == "read-only root") {
					t.Errorf("capability %t, annotations %v", locks, pod.Annotations)
				}
				if len(pod.Spec.InitContainers) > 0 && !*pod.Spec.InitContainers[0].SecurityContext.ReadOnlyRootFilesystem {
					t.Error("the init container writes its root file system")
				}
			})
		}
	}
}

func TestInjectWindowsPod(t *testing.T) {
	pod := labelledPod(newNamespace(t, nil))
	pod.Spec.OS = &corev1.PodOS{Name: corev1.Windows}
	before := pod.DeepCopy()
	createPod(t, pod)
	if c := &pod.Spec.Containers[0]; len(c.Env) > 0 || len(pod.Spec.InitContainers) > 0 || pod.Spec.Affinity != nil || len(pod.Spec.Volumes) > len(before.Spec.Volumes) {
		t.Errorf("%+v", pod.Spec)
	}
	eventually(t, "an Event says why", func(context.Context) (bool, error) {
		return strings.Contains(said(t, pod, "EvenkeelSkipped"), "NCCL does not run on Windows"), nil
	})
}

// TestInjectKeepsQOSClass asks the API server for the class, in a namespace whose quota requires limits of every container.
func TestInjectKeepsQOSClass(t *testing.T) {
	ns := newNamespace(t, nil)
	hard := corev1.ResourceList{corev1.ResourceLimitsCPU: resource.MustParse("10"), corev1.ResourceLimitsMemory: resource.MustParse("10Gi")}
	quota := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "limits", Namespace: ns}, Spec: corev1.ResourceQuotaSpec{Hard: hard}}
	if err := admin.Create(t.Context(), quota); err != nil {
		t.Fatal(err)
	}
	// The controller of quotas would do this.
	quota.Status = corev1.ResourceQuotaStatus{Hard: hard, Used: corev1.ResourceList{corev1.ResourceLimitsCPU: resource.MustParse("0"), corev1.ResourceLimitsMemory: resource.MustParse("0")}}
	if err := admin.Status().Update(t.Context(), quota); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the quota is enforced", func(ctx context.Context) (bool, error) {
		err := dryRun(ctx, plainPod(ns))
		return err != nil && strings.Contains(err.Error(), "must specify limits.cpu"), nil
	})
	two := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("2"), corev1.ResourceMemory: resource.MustParse("2Gi")}
	one := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1"), corev1.ResourceMemory: resource.MustParse("1Gi")}
	for class, resources := range map[corev1.PodQOSClass]corev1.ResourceRequirements{
		corev1.PodQOSGuaranteed: {Limits: two},
		corev1.PodQOSBurstable:  {Requests: one, Limits: two},
	} {
		pod := labelledPod(ns)
		pod.Spec.Containers[0].Resources = resources
		if createPod(t, pod); pod.Status.QOSClass != class || len(pod.Spec.InitContainers) != 1 {
			t.Errorf("a %s pod is %s with %+v", class, pod.Status.QOSClass, pod.Spec.InitContainers)
		}
	}
	if pod := createPod(t, labelledPod(newNamespace(t, nil))); pod.Status.QOSClass != corev1.PodQOSBestEffort {
		t.Errorf("a BestEffort pod is %s with %+v", pod.Status.QOSClass, pod.Spec.InitContainers)
	}
}

func TestInjectOnlyAnnotatedJobs(t *testing.T) {
	ns := newNamespace(t, nil)
	pod := createPod(t, plainPod(ns))
	if len(pod.Spec.Volumes)+len(pod.Spec.InitContainers)+len(pod.Spec.Containers[0].Env) != 0 || pod.Annotations[evenkeel.InjectedKey] != "" {
		t.Errorf("a pod without the label was changed: %+v", pod)
	}
	for _, kind := range []string{"PyTorchJob", "Job"} {
		job, templates := newJob(kind, ns, "")
		createJob(t, job)
		text, err := json.Marshal(job.Object)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(text), "evenkeel.dev/") {
			t.Errorf("a %s without the annotation was changed: %s", kind, text)
		}
		if len(podOf(t, job, templates[0]).Spec.Volumes) != 0 {
			t.Errorf("a %s without the annotation got a volume", kind)
		}
	}
}

func TestInjectPutsInitContainerBack(t *testing.T) {
	newProfile(t, "put-back", evenkeel.NetworkProfileSpec{Plugin: evenkeel.PluginSpec{Delivery: evenkeel.DeliveryInitContainer}})
	keepsInitContainer(t, asking("put-back"))
	keepsInitContainer(t, labelledPod)
}

// asking makes pods that ask for the profile themselves.
func asking(profile string) func(namespace string) *corev1.Pod {
	return func(namespace string) *corev1.Pod {
		pod := plainPod(namespace)
		pod.Annotations = map[string]string{evenkeel.ProfileKey: profile}
		return pod
	}
}

// keepsInitContainer has another webhook replace the init containers of a pod.
func keepsInitContainer(t *testing.T, newPod func(namespace string) *corev1.Pod) {
	t.Helper()
	ns := newNamespace(t, nil)
	laterWebhook(t, ns, admissionregistrationv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"pods"}},
		`[{"op": "add", "path": "/spec/initContainers", "value": [{"name": "theirs", "image": "registry.example.com/mesh:1"}]}]`)
	eventually(t, "the other webhook is called", func(ctx context.Context) (bool, error) {
		pod := newPod(ns)
		if err := dryRun(ctx, pod); err != nil || !slices.ContainsFunc(pod.Spec.InitContainers, func(c corev1.Container) bool { return c.Name == "theirs" }) {
			return false, err
		}
		if c := pod.Spec.InitContainers; len(c) != 2 || c[0].Name != "evenkeel-install" || len(c[0].VolumeMounts) == 0 || c[0].VolumeMounts[0].Name != "evenkeel" {
			t.Errorf("init containers %+v", c)
		}
		return true, nil
	})
}

// TestInjectIsIdempotent has another webhook change the pod after ours, so that the API server calls ours again.
func TestInjectIsIdempotent(t *testing.T) {
	ns := newNamespace(t, nil)
	laterWebhook(t, ns, admissionregistrationv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"pods"}},
		`[{"op": "add", "path": "/spec/containers/-", "value": {"name": "mesh", "image": "registry.example.com/mesh:1"}}]`)

	alone := createPod(t, labelledPod(newNamespace(t, nil)))
	var both *corev1.Pod
	eventually(t, "the other webhook is called", func(ctx context.Context) (bool, error) {
		both = labelledPod(ns)
		err := admin.Create(ctx, both)
		return err == nil && len(both.Spec.Containers) == 2, err
	})
	if !equality.Semantic.DeepEqual(both.Spec.InitContainers, alone.Spec.InitContainers) || !equality.Semantic.DeepEqual(both.Spec.Volumes, alone.Spec.Volumes) {
		t.Errorf("called twice, it added other things than called once:\n%+v\n%+v", both.Spec, alone.Spec)
	}
	if !equality.Semantic.DeepEqual(both.Spec.Containers[0], alone.Spec.Containers[0]) {
		t.Errorf("called twice:\n%+v\ncalled once:\n%+v", both.Spec.Containers[0], alone.Spec.Containers[0])
	}

	// A pod that is made from an injected one, as some tools do, is injected already.
	again := alone.DeepCopy()
	again.ObjectMeta = metav1.ObjectMeta{GenerateName: "again-", Namespace: alone.Namespace, Labels: alone.Labels, Annotations: alone.Annotations}
	createPod(t, again)
	if !equality.Semantic.DeepEqual(again.Spec.Containers, alone.Spec.Containers) || !equality.Semantic.DeepEqual(again.Spec.InitContainers, alone.Spec.InitContainers) {
		t.Errorf("a copy of an injected pod was injected again: %+v", again.Spec)
	}
}

func TestInjectRefusals(t *testing.T) {
	ns := newNamespace(t, nil)
	newProfile(t, "for-others", evenkeel.NetworkProfileSpec{NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"team": "others"}}})
	for _, kind := range []string{"PyTorchJob", "Job"} {
		job, _ := newJob(kind, ns, "defualt")
		refused(t, admin.Create(t.Context(), job), `no NetworkProfile is named "defualt"`, "there are: default, for-others")
	}
	job, _ := newJob("PyTorchJob", ns, "for-others")
	refused(t, admin.Create(t.Context(), job), "not for namespace "+ns, "team=others")
	chosen, _ := newJob("PyTorchJob", newNamespace(t, map[string]string{"team": "others"}), "for-others")
	createJob(t, chosen)

	job, _ = newJob("PyTorchJob", ns, "default")
	job.SetAnnotations(map[string]string{evenkeel.ProfileKey: "default", evenkeel.ContainersKey: "trainer"})
	refused(t, admin.Create(t.Context(), job), "trainer", "which has pytorch")

	bare := plainPod(ns)
	bare.Labels = map[string]string{evenkeel.ProfileKey: "default"}
	refused(t, admin.Create(t.Context(), bare), "put the annotation evenkeel.dev/profile: default on the job")
	forged := labelledPod(ns)
	forged.Annotations[evenkeel.PluginImageKey] = "registry.example.com/evil:latest"
	refused(t, admin.Create(t.Context(), forged), "pinned by digest")
}

func TestInjectKeepsUserValues(t *testing.T) {
	ns := newNamespace(t, nil)
	job, templates := newJob("PyTorchJob", ns, "default")
	createJob(t, job)
	pod := podOf(t, job, templates[0])
	pod.Spec.Containers[0].Env = append(pod.Spec.Containers[0].Env, corev1.EnvVar{Name: "NCCL_NET_PLUGIN", Value: "mine"})
	createPod(t, pod)
	if got := variable(&pod.Spec.Containers[0], "NCCL_NET_PLUGIN"); got != "mine" {
		t.Errorf("NCCL_NET_PLUGIN is %q, the user wrote mine", got)
	}
	eventually(t, "Events on the pod and on its job say so", func(ctx context.Context) (bool, error) {
		var events corev1.EventList
		err := admin.List(ctx, &events, client.InNamespace(ns))
		about := func(name string) bool {
			return slices.ContainsFunc(events.Items, func(e corev1.Event) bool {
				return e.Reason == "EvenkeelSkipped" && e.InvolvedObject.Name == name && strings.Contains(e.Message, "sets NCCL_NET_PLUGIN itself")
			})
		}
		return about(pod.Name) && about(job.GetName()), err
	})
}

func TestInjectUpdateKeepsProfile(t *testing.T) {
	ns := newNamespace(t, nil)
	job, templates := newJob("PyTorchJob", ns, newProfile(t, "updated", evenkeel.NetworkProfileSpec{}).Name)
	createJob(t, job)
	before := podOf(t, job, templates[0])
	user, warnings := newUser(t)
	job.SetLabels(map[string]string{"mine": "yes"})
	if err := user.Update(t.Context(), job); err != nil || len(warnings.take()) > 0 {
		t.Fatalf("an update of something else: error %v, warnings %v", err, warnings.take())
	}
	job.SetAnnotations(map[string]string{evenkeel.ProfileKey: "another"})
	if err := user.Update(t.Context(), job); err != nil {
		t.Fatalf("an update is no reason to refuse: %v", err)
	}
	if all := warnings.take(); len(all) != 1 || !strings.Contains(all[0], "another has no effect on an existing job") {
		t.Errorf("the warnings are %q", all)
	}
	if after := podOf(t, job, templates[0]); !equality.Semantic.DeepEqual(before.Annotations, after.Annotations) || !equality.Semantic.DeepEqual(before.Labels, after.Labels) {
		t.Errorf("the templates changed:\n%v\n%v", before.ObjectMeta, after.ObjectMeta)
	}
}

// TestInjectProfileAppliedWithJob creates jobs in the same moment as what they name.
func TestInjectProfileAppliedWithJob(t *testing.T) {
	ns := newNamespace(t, nil)
	for _, name := range []string{"together-1", "together-2", "together-3"} {
		profile := &evenkeel.NetworkProfile{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: evenkeel.NetworkProfileSpec{Plugin: evenkeel.PluginSpec{Image: image}}}
		remove(t, profile)
		job, _ := newJob("PyTorchJob", ns, name)
		job.SetName(name)
		for _, object := range []client.Object{profile, job} {
			if err := admin.Create(t.Context(), object); err != nil {
				t.Fatal(err)
			}
		}
	}
}
