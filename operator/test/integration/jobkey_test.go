package integration

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/test/apiserver"
)

const encryptedProfile = "encrypted"

// encryptedJob is an annotated job of a profile that requires encryption. Secret is the one that its user brings; empty: none.
func encryptedJob(t *testing.T, kind, namespace, profile, secret string) (*unstructured.Unstructured, [][]string) {
	t.Helper()
	job, templates := newJob(kind, namespace, profile)
	if secret != "" {
		annotations := job.GetAnnotations()
		annotations[evenkeel.JobKeyKey] = secret
		job.SetAnnotations(annotations)
	}
	createJob(t, job)
	return job, templates
}

func newEncryptedProfile(t *testing.T, name string, change func(*evenkeel.NetworkProfileSpec)) {
	t.Helper()
	spec := evenkeel.NetworkProfileSpec{Transport: evenkeel.TransportSpec{Encryption: evenkeel.EncryptionRequired}}
	if change != nil {
		change(&spec)
	}
	newProfile(t, name, spec)
}

// keyOf waits for the Secret that Evenkeel makes for the job.
func keyOf(t *testing.T, job *unstructured.Unstructured) *corev1.Secret {
	t.Helper()
	name := job.GetLabels()[evenkeel.JobKeyKey]
	if name == "" {
		t.Fatalf("the %s has no label that names its key: %v", job.GetKind(), job.GetLabels())
	}
	secret := &corev1.Secret{}
	eventually(t, "Secret "+name+" is there", func(ctx context.Context) (bool, error) {
		err := admin.Get(ctx, client.ObjectKey{Namespace: job.GetNamespace(), Name: name}, secret)
		return err == nil, client.IgnoreNotFound(err)
	})
	return secret
}

// mountsKey reports whether the container, which has the key's path in a variable, mounts this Secret and no other container does.
func mountsKey(pod *corev1.Pod, secret string) bool {
	volume := ""
	for _, v := range pod.Spec.Volumes {
		if v.Secret != nil && v.Secret.SecretName == secret {
			volume = v.Name
		}
	}
	if volume == "" {
		return false
	}
	for i, c := range append(pod.Spec.Containers, pod.Spec.InitContainers...) {
		has := variable(&c, "EVENKEEL_JOB_KEY_FILE") == "/var/run/secrets/evenkeel.dev/job-key"
		mounted := false
		for _, m := range c.VolumeMounts {
			mounted = mounted || m.Name == volume && m.MountPath == "/var/run/secrets/evenkeel.dev" && m.ReadOnly
		}
		if has != mounted || mounted != (i == 0) {
			return false
		}
	}
	return true
}

func TestEncryptionMakesJobKey(t *testing.T) {
	newEncryptedProfile(t, encryptedProfile, nil)
	for _, kind := range []string{"PyTorchJob", "Job"} {
		t.Run(kind, func(t *testing.T) {
			ns := newNamespace(t, nil)
			job, templates := encryptedJob(t, kind, ns, encryptedProfile, "")
			secret := keyOf(t, job)
			if key, err := hex.DecodeString(string(secret.Data["job-key"])); err != nil || len(key) != 32 || len(secret.Data) != 1 {
				t.Errorf("a key of %d bytes beside %d entries: %v", len(key), len(secret.Data), err)
			}
			if o := secret.OwnerReferences; len(o) != 1 || o[0].UID != job.GetUID() || o[0].Kind != kind {
				t.Errorf("the key does not go with its job: %+v", o)
			}
			for _, path := range templates {
				pod := podOf(t, job, path)
				pod.Spec.Containers = append(pod.Spec.Containers, corev1.Container{Name: "istio-proxy", Image: "x"})
				pod = createPod(t, pod)
				c := &pod.Spec.Containers[0]
				if !mountsKey(pod, secret.Name) {
					t.Errorf("%v: volumes %+v, containers %+v", path, pod.Spec.Volumes, pod.Spec.Containers)
				}
				if variable(c, "EVENKEEL_ENCRYPTION") != "required" || variable(c, "EVENKEEL_RDMA_NETWORK") != "untrusted" || variable(c, "NCCL_NET") != "Evenkeel" {
					t.Errorf("%v: environment %v", path, c.Env)
				}
			}
			// Nobody can change it under the job.
			changed := secret.DeepCopy()
			changed.Data["job-key"] = []byte(strings.Repeat("0", 64))
			if err := admin.Update(t.Context(), changed); err == nil {
				t.Error("the key can be changed")
			}
		})
	}
}

// A job without encryption gets no key, and a copy of an encrypted job gets its own.
func TestEncryptionJobKeysAreNotShared(t *testing.T) {
	newEncryptedProfile(t, encryptedProfile, nil)
	ns := newNamespace(t, nil)
	first, _ := encryptedJob(t, "PyTorchJob", ns, encryptedProfile, "")
	key := keyOf(t, first)
	copied := first.DeepCopy()
	copied.SetName("copied")
	copied.SetResourceVersion("")
	copied.SetUID("")
	createJob(t, copied)
	if other := keyOf(t, copied); other.Name == key.Name || string(other.Data["job-key"]) == string(key.Data["job-key"]) {
		t.Error("a copied job has the key of the first")
	}
	clear := first.DeepCopy()
	clear.SetName("clear")
	clear.SetResourceVersion("")
	clear.SetUID("")
	clear.SetAnnotations(map[string]string{evenkeel.ProfileKey: "default"})
	createJob(t, clear)
	pod := createPod(t, podOf(t, clear, []string{"spec", "pytorchReplicaSpecs", "Worker", "template"}))
	if clear.GetLabels()[evenkeel.JobKeyKey] != "" || pod.Labels[evenkeel.JobKeyKey] != "" || variable(&pod.Spec.Containers[0], "EVENKEEL_ENCRYPTION") != "" || variable(&pod.Spec.Containers[0], "EVENKEEL_JOB_KEY_FILE") != "" {
		t.Errorf("a job in clear has labels %v, and its pod %v", clear.GetLabels(), pod.Spec.Containers[0].Env)
	}
}

// The user's Secret is mounted, in the reduction servers too, and none is made.
func TestEncryptionWithUsersKey(t *testing.T) {
	newEncryptedProfile(t, encryptedProfile, nil)
	ns := newNamespace(t, nil)
	job, templates := newJob("PyTorchJob", ns, encryptedProfile)
	job.SetAnnotations(map[string]string{evenkeel.ProfileKey: encryptedProfile, evenkeel.JobKeyKey: "theirs", evenkeel.ReductionKey: "2"})
	createJob(t, job)
	service := waitService(t, job, "has a status", is(evenkeel.ReasonStarting))
	startServers(t, service)
	waitService(t, job, "is complete", is(evenkeel.ReasonAllReady))
	for _, pod := range []*corev1.Pod{createPod(t, podOf(t, job, templates[0])), serverOf(t, service)} {
		if !mountsKey(pod, "theirs") || variable(&pod.Spec.Containers[0], "EVENKEEL_ENCRYPTION") != "required" {
			t.Errorf("%s: volumes %+v, variables %v", pod.Name, pod.Spec.Volumes, pod.Spec.Containers[0].Env)
		}
	}
	var secrets corev1.SecretList
	if err := admin.List(t.Context(), &secrets, client.InNamespace(ns)); err != nil || len(secrets.Items) != 0 {
		t.Errorf("%d Secrets were made: %v", len(secrets.Items), err)
	}
	user, warnings := newUser(t)
	if err := admin.Get(t.Context(), client.ObjectKeyFromObject(job), job); err != nil {
		t.Fatal(err)
	}
	job.SetAnnotations(map[string]string{evenkeel.ProfileKey: encryptedProfile, evenkeel.JobKeyKey: "another", evenkeel.ReductionKey: "2"})
	if err := user.Update(t.Context(), job); err != nil {
		t.Fatalf("an update is no reason to refuse: %v", err)
	}
	if all := warnings.take(); len(all) != 1 || !strings.Contains(all[0], "a job keeps the key that it was created with") {
		t.Errorf("the warnings are %q", all)
	}
	invalid, _ := newJob("PyTorchJob", ns, encryptedProfile)
	invalid.SetName("invalid")
	invalid.SetAnnotations(map[string]string{evenkeel.ProfileKey: encryptedProfile, evenkeel.JobKeyKey: "../theirs"})
	refused(t, admin.Create(t.Context(), invalid), "annotation evenkeel.dev/job-key", "the name of a Secret")
}

func serverOf(t *testing.T, service *evenkeel.ReductionService) *corev1.Pod {
	t.Helper()
	pod := &corev1.Pod{}
	if err := admin.Get(t.Context(), client.ObjectKey{Namespace: service.Namespace, Name: service.Name + "-0"}, pod); err != nil {
		t.Fatal(err)
	}
	return pod
}

// A job and its reduction servers have one key, that of the servers.
func TestEncryptionSharesKeyWithReductionServers(t *testing.T) {
	newEncryptedProfile(t, encryptedProfile, nil)
	job, templates := reducing(t, "PyTorchJob", newNamespace(t, nil), encryptedProfile, "1")
	service := waitService(t, job, "has a status", is(evenkeel.ReasonStarting))
	startServers(t, service)
	for _, pod := range []*corev1.Pod{createPod(t, podOf(t, job, templates[0])), serverOf(t, service)} {
		c := &pod.Spec.Containers[0]
		if !mountsKey(pod, service.Name) || variable(c, "EVENKEEL_ENCRYPTION") != "required" || variable(c, "EVENKEEL_RDMA_NETWORK") != "untrusted" {
			t.Errorf("%s: volumes %+v, variables %v", pod.Name, pod.Spec.Volumes, c.Env)
		}
	}
	if job.GetLabels()[evenkeel.JobKeyKey] != "" {
		t.Errorf("a second key: %v", job.GetLabels())
	}
}

// The key of a job that runs is not made again: its pods would have another one than those that come later. That of a job whose pods
// wait is.
func TestEncryptionKeyIsNotRotated(t *testing.T) {
	newEncryptedProfile(t, encryptedProfile, nil)
	ns := newNamespace(t, nil)
	job, templates := encryptedJob(t, "PyTorchJob", ns, encryptedProfile, "")
	first := keyOf(t, job)
	// reconciled returns when the controller has looked at the job again: jobs of a kind are looked at in their order.
	reconciled := func() {
		t.Helper()
		change := fmt.Sprintf(`{"metadata": {"labels": {"changed": %q}}}`, rand.Text())
		if err := admin.Patch(t.Context(), job.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(change))); err != nil {
			t.Fatal(err)
		}
		later, _ := encryptedJob(t, "PyTorchJob", newNamespace(t, nil), encryptedProfile, "")
		keyOf(t, later)
	}
	if err := install.controller.stop(); err != nil {
		t.Fatal(err)
	}
	var err error
	if install.controller, err = install.startController(); err != nil {
		t.Fatal(err)
	}
	reconciled()
	if again := keyOf(t, job); again.UID != first.UID {
		t.Error("a restarted controller made another key")
	}
	pod := createPod(t, podOf(t, job, templates[0]))
	if err := admin.Delete(t.Context(), first.DeepCopy()); err != nil {
		t.Fatal(err)
	}
	reconciled()
	second := keyOf(t, job)
	if string(second.Data["job-key"]) == string(first.Data["job-key"]) {
		t.Error("the key that is made for pods that wait is the one that was deleted")
	}
	pod.Status.Phase = corev1.PodRunning
	if err := admin.Status().Update(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	if err := admin.Delete(t.Context(), second.DeepCopy()); err != nil {
		t.Fatal(err)
	}
	reconciled()
	if err := admin.Get(t.Context(), client.ObjectKeyFromObject(first), &corev1.Secret{}); !apierrors.IsNotFound(err) {
		t.Errorf("a running job got another key: %v", err)
	}
}

// The key is in its Secret, and nowhere else: no object, no Event, no log.
func TestEncryptionKeyIsSecret(t *testing.T) {
	newEncryptedProfile(t, encryptedProfile, nil)
	ns := newNamespace(t, nil)
	job, templates := encryptedJob(t, "PyTorchJob", ns, encryptedProfile, "")
	secret := keyOf(t, job)
	createPod(t, podOf(t, job, templates[0]))
	key := string(secret.Data["job-key"])
	var pods corev1.PodList
	var events corev1.EventList
	for _, list := range []client.ObjectList{&pods, &events} {
		if err := admin.List(t.Context(), list, client.InNamespace(ns)); err != nil {
			t.Fatal(err)
		}
	}
	if err := admin.Get(t.Context(), client.ObjectKeyFromObject(job), job); err != nil {
		t.Fatal(err)
	}
	for where, text := range map[string]string{
		"the job": asJSON(t, job.Object), "pods": asJSON(t, pods.Items), "Events": asJSON(t, events.Items), "the Secret's metadata": asJSON(t, secret.ObjectMeta),
		"the controller's log": install.controller.output.String(), "the webhook's log": install.webhook.output.String(),
	} {
		if strings.Contains(text, key) || strings.Contains(text, key[:16]) {
			t.Errorf("the key is in %s", where)
		}
	}
}

// A label that a user wrote makes no Secret of a name that is not a key's.
func TestEncryptionForgedLabelMakesNoSecret(t *testing.T) {
	newEncryptedProfile(t, encryptedProfile, nil)
	ns := newNamespace(t, nil)
	forged, _ := newJob("PyTorchJob", ns, "")
	forged.SetLabels(map[string]string{evenkeel.JobKeyKey: "database"})
	createJob(t, forged)
	job, _ := newJob("PyTorchJob", ns, encryptedProfile)
	job.SetName("other")
	job.SetLabels(map[string]string{evenkeel.JobKeyKey: "database"})
	createJob(t, job)
	if key := keyOf(t, job); key.Name == "database" {
		t.Error("the webhook kept what a user wrote")
	}
	var secrets corev1.SecretList
	if err := admin.List(t.Context(), &secrets, client.InNamespace(ns)); err != nil || len(secrets.Items) != 1 {
		t.Errorf("%d Secrets (%v), want that of the second job", len(secrets.Items), err)
	}
}

func TestEncryptionProfileValidation(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*evenkeel.NetworkProfileSpec)
		want   string // empty: it is valid
	}{
		"auto": {func(*evenkeel.NetworkProfileSpec) {}, ""},
		"TCP":  {func(s *evenkeel.NetworkProfileSpec) { s.Transport.Mode = evenkeel.TransportTCP }, ""},
		"RDMA": {func(s *evenkeel.NetworkProfileSpec) { s.Transport.Mode = evenkeel.TransportRDMA }, "RDMA is not encrypted"},
		"RDMA over a trusted network": {func(s *evenkeel.NetworkProfileSpec) {
			s.Transport.Mode, s.Transport.RDMA.Network = evenkeel.TransportRDMA, evenkeel.RDMANetworkTrusted
		}, ""},
		"a key for everybody to read": {func(s *evenkeel.NetworkProfileSpec) {
			s.Environment = []evenkeel.EnvironmentVariable{{Name: "EVENKEEL_JOB_KEY", Value: "0"}}
		}, "the job's key"},
		"NCCL's own sockets": {func(s *evenkeel.NetworkProfileSpec) {
			s.Environment = []evenkeel.EnvironmentVariable{{Name: "NCCL_NET", Value: "Socket"}}
		}, "NCCL_NET"},
		"the plugin's variable": {func(s *evenkeel.NetworkProfileSpec) {
			s.Environment = []evenkeel.EnvironmentVariable{{Name: "EVENKEEL_ENCRYPTION", Value: "off"}}
		}, "set by transport.encryption"},
		"another word": {func(s *evenkeel.NetworkProfileSpec) { s.Transport.Encryption = "Preferred" }, "Preferred"},
	} {
		t.Run(name, func(t *testing.T) {
			p := &evenkeel.NetworkProfile{ObjectMeta: metav1.ObjectMeta{Name: "validated"}, Spec: evenkeel.NetworkProfileSpec{
				Plugin: evenkeel.PluginSpec{Image: image}, Transport: evenkeel.TransportSpec{Encryption: evenkeel.EncryptionRequired}}}
			test.change(&p.Spec)
			err := admin.Create(t.Context(), p, client.DryRunAll)
			if test.want != "" {
				refused(t, err, test.want)
			} else if err != nil {
				t.Error(err)
			}
		})
	}
}

// Of Secrets, the controller may make keys of jobs, and nothing else.
func TestKeyGuardLimitsController(t *testing.T) {
	newEncryptedProfile(t, encryptedProfile, nil)
	job, _ := encryptedJob(t, "PyTorchJob", newNamespace(t, nil), encryptedProfile, "")
	good := keyOf(t, job)
	controller, err := client.New(apiserver.As(config, systemNamespace, "evenkeel-controller"), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	const name = "other-key-01234567"
	key := func(change func(*corev1.Secret)) *corev1.Secret {
		s := good.DeepCopy()
		s.ObjectMeta = metav1.ObjectMeta{Namespace: good.Namespace, Name: name, Labels: map[string]string{evenkeel.JobKeyKey: name}, OwnerReferences: good.OwnerReferences}
		change(s)
		return s
	}
	// Whatever is refused below is refused for what was changed.
	if err := controller.Create(t.Context(), key(func(*corev1.Secret) {}), client.DryRunAll); err != nil {
		t.Fatal(err)
	}
	no := false
	for what, change := range map[string]func(*corev1.Secret){
		"another entry":           func(s *corev1.Secret) { s.Data["password"] = []byte("x") },
		"an entry as text":        func(s *corev1.Secret) { s.StringData = map[string]string{"password": "x"} },
		"one that can be changed": func(s *corev1.Secret) { s.Immutable = &no },
		"one that may be changed": func(s *corev1.Secret) { s.Immutable = nil },
		"another name":            func(s *corev1.Secret) { s.Name, s.Labels[evenkeel.JobKeyKey] = "database", "database" },
		"another's label":         func(s *corev1.Secret) { s.Labels[evenkeel.JobKeyKey] = "train-key-01234567" },
		"a label of its own":      func(s *corev1.Secret) { s.Labels["app"] = "database" },
		"an annotation":           func(s *corev1.Secret) { s.Annotations = map[string]string{"a": "b"} },
		"a finalizer":             func(s *corev1.Secret) { s.Finalizers = []string{"example.com/a"} },
		"no owner":                func(s *corev1.Secret) { s.OwnerReferences = nil },
		"an owner that is no job": func(s *corev1.Secret) { s.OwnerReferences[0].Kind, s.OwnerReferences[0].APIVersion = "Pod", "v1" },
		"an owner of another API": func(s *corev1.Secret) { s.OwnerReferences[0].APIVersion = "example.com/v1" },
		"two owners": func(s *corev1.Secret) {
			s.OwnerReferences = append(s.OwnerReferences, s.OwnerReferences[0])
			s.OwnerReferences[1].UID = "x"
		},
		"the credentials of Helm": func(s *corev1.Secret) { s.Type = "helm.sh/release.v1" },
		"a token for an account": func(s *corev1.Secret) {
			s.Type, s.Annotations = corev1.SecretTypeServiceAccountToken, map[string]string{corev1.ServiceAccountNameKey: "default"}
		},
	} {
		t.Run(what, func(t *testing.T) {
			refused(t, controller.Create(t.Context(), key(func(s *corev1.Secret) {
				s.OwnerReferences = []metav1.OwnerReference{*good.OwnerReferences[0].DeepCopy()}
				change(s)
			}), client.DryRunAll), "'evenkeel-keys' denied")
		})
	}
	// RBAC, and not the policy, refuses the rest.
	for what, err := range map[string]error{
		"read":   controller.Get(t.Context(), client.ObjectKeyFromObject(good), &corev1.Secret{}),
		"list":   controller.List(t.Context(), &corev1.SecretList{}, client.InNamespace(good.Namespace)),
		"change": controller.Patch(t.Context(), good.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(`{"metadata": {"labels": {"a": "b"}}}`))),
		"delete": controller.Delete(t.Context(), good.DeepCopy()),
	} {
		if !apierrors.IsForbidden(err) {
			t.Errorf("%s a key: %v", what, err)
		}
	}
}
