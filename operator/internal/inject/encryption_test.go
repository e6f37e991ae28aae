package inject

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// encrypted is a job whose profile requires encryption, and whose key Evenkeel makes.
func encrypted(r *Resolved) {
	r.addEncryption(evenkeel.TransportSpec{Encryption: evenkeel.EncryptionRequired})
	r.JobKey = &JobKey{Secret: "train-key-0", Made: true}
}

func TestInjectEncryptionVariables(t *testing.T) {
	profile := func(change func(*evenkeel.NetworkProfile)) Resolved {
		p := &evenkeel.NetworkProfile{}
		p.Spec.Transport.Mode, p.Status.RDMAResourceName = evenkeel.TransportAuto, "rdma/hca"
		change(p)
		return Resolve(p, "")
	}
	required := map[string]string{"EVENKEEL_TRANSPORT": "auto", "EVENKEEL_ENCRYPTION": "required", "EVENKEEL_RDMA_NETWORK": "untrusted", "NCCL_NET": "Evenkeel"}
	trusted := map[string]string{"EVENKEEL_TRANSPORT": "auto", "EVENKEEL_ENCRYPTION": "required", "EVENKEEL_RDMA_NETWORK": "trusted", "NCCL_NET": "Evenkeel"}
	for name, test := range map[string]struct {
		change func(*evenkeel.NetworkProfile)
		want   map[string]string
		device bool
	}{
		"absent":   {func(*evenkeel.NetworkProfile) {}, map[string]string{"EVENKEEL_TRANSPORT": "auto"}, true},
		"Off":      {func(p *evenkeel.NetworkProfile) { p.Spec.Transport.Encryption = evenkeel.EncryptionOff }, map[string]string{"EVENKEEL_TRANSPORT": "auto"}, true},
		"Required": {func(p *evenkeel.NetworkProfile) { p.Spec.Transport.Encryption = evenkeel.EncryptionRequired }, required, false},
		"Required on a trusted network": {func(p *evenkeel.NetworkProfile) {
			p.Spec.Transport.Encryption, p.Spec.Transport.RDMA.Network = evenkeel.EncryptionRequired, evenkeel.RDMANetworkTrusted
		}, trusted, true},
		"a variable in between": {func(p *evenkeel.NetworkProfile) {
			p.Spec.Transport.Encryption = evenkeel.EncryptionRequired
			p.Spec.Environment = []evenkeel.EnvironmentVariable{{Name: "EVENKEEL_ENCRYPTION", Value: "off"}, {Name: "NCCL_NET", Value: "Socket"}}
		}, required, false},
	} {
		r := profile(test.change)
		if diff := cmp.Diff(test.want, r.Environment); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
		if (r.RDMA != nil) != test.device {
			t.Errorf("%s: device %+v, want one: %t", name, r.RDMA, test.device)
		}
	}
}

// The key is in the containers that run training, and in no other.
func TestInjectJobKey(t *testing.T) {
	p := pod(corev1.Container{Name: "main"}, corev1.Container{Name: "istio-proxy"})
	p.Spec.InitContainers = []corev1.Container{{Name: "prepare"}}
	p = apply(t, p, resolved(encrypted))
	key := p.Spec.Volumes[len(p.Spec.Volumes)-1]
	if key.Secret == nil || key.Secret.SecretName != "train-key-0" || key.Secret.Optional != nil {
		t.Errorf("volume %+v, want a Secret that pods wait for", key)
	}
	main := p.Spec.Containers[0]
	if m := main.VolumeMounts[len(main.VolumeMounts)-1]; m.Name != key.Name || !m.ReadOnly || env(main)["EVENKEEL_JOB_KEY_FILE"] != m.MountPath+"/job-key" {
		t.Errorf("mount %+v, variables %v", m, env(main))
	}
	if got := env(main); got["EVENKEEL_ENCRYPTION"] != "required" || got["NCCL_NET"] != "Evenkeel" || got["EVENKEEL_REDUCTION_SERVERS"] != "" {
		t.Errorf("variables %v", got)
	}
	for _, c := range append(p.Spec.InitContainers, p.Spec.Containers[1]) {
		for _, m := range c.VolumeMounts {
			if m.Name == key.Name {
				t.Errorf("container %s has the key", c.Name)
			}
		}
	}
}

func TestInjectJobKeyOfUserIsSharedWithServers(t *testing.T) {
	p := apply(t, pod(corev1.Container{Name: "main"}), resolved(func(r *Resolved) {
		reduced(r)
		r.JobKey = &JobKey{Secret: "theirs"}
	}))
	if v := p.Spec.Volumes[len(p.Spec.Volumes)-1]; v.Secret == nil || v.Secret.SecretName != "theirs" {
		t.Errorf("volume %+v", v)
	}
	if env(p.Spec.Containers[0])["EVENKEEL_REDUCTION_SERVERS"] == "" {
		t.Error("no servers")
	}
}

func TestInjectJobKeySkipsOwnKey(t *testing.T) {
	p := apply(t, pod(corev1.Container{Name: "main", Env: []corev1.EnvVar{{Name: "EVENKEEL_JOB_KEY", Value: "0"}}}), resolved(encrypted))
	if got := env(p.Spec.Containers[0]); got["EVENKEEL_JOB_KEY_FILE"] != "" || got["EVENKEEL_JOB_KEY"] != "0" || got["EVENKEEL_ENCRYPTION"] != "required" {
		t.Errorf("variables %v", got)
	}
	if skipped := p.Annotations[evenkeel.SkippedKey]; !strings.Contains(skipped, "sets EVENKEEL_JOB_KEY itself, and so does without the job's key") {
		t.Errorf("the pod says %q", skipped)
	}
}

// A pod of which any process would send in clear is refused.
func TestInjectEncryptionRefusesClear(t *testing.T) {
	for want, c := range map[string]corev1.Container{
		"sets EVENKEEL_ENCRYPTION itself":   {Env: []corev1.EnvVar{{Name: "EVENKEEL_ENCRYPTION", Value: "off"}}},
		"sets EVENKEEL_RDMA_NETWORK itself": {Env: []corev1.EnvVar{{Name: "EVENKEEL_RDMA_NETWORK", Value: "trusted"}}},
		"sets NCCL_NET itself":              {Env: []corev1.EnvVar{{Name: "NCCL_NET", ValueFrom: &corev1.EnvVarSource{}}}},
		"sets NCCL_NET_PLUGIN itself":       {Env: []corev1.EnvVar{{Name: "NCCL_NET_PLUGIN", Value: "none"}}},
		"mounts /opt/evenkeel itself":       {VolumeMounts: []corev1.VolumeMount{{Name: "mine", MountPath: "/opt/evenkeel"}}},
	} {
		c.Name = "main"
		err := Apply(pod(corev1.Container{Name: "first"}, c), resolved(func(r *Resolved) {
			encrypted(r)
			r.Containers = []string{"first", "main"}
		}), "")
		if err == nil || !strings.Contains(err.Error(), "container main "+want+", and NetworkProfile default requires encryption") {
			t.Errorf("%s: %v", want, err)
		}
		if err := Apply(pod(c), resolved(nil), ""); err != nil {
			t.Errorf("%s without encryption: %v", want, err)
		}
	}
	twice := corev1.Container{Name: "main", Env: []corev1.EnvVar{{Name: "EVENKEEL_ENCRYPTION", Value: "required"}, {Name: "EVENKEEL_ENCRYPTION", Value: "off"}}}
	if err := Apply(pod(twice), resolved(encrypted), ""); err == nil {
		t.Error("the last value of a variable that is set twice counts")
	}
	keyless := resolved(func(r *Resolved) { encrypted(r); r.JobKey = nil })
	if err := Apply(pod(corev1.Container{Name: "main"}), keyless, ""); err == nil || !strings.Contains(err.Error(), "the annotation evenkeel.dev/job-key names a Secret") {
		t.Errorf("without a key: %v", err)
	}
}

func TestInjectJobKeyOfPod(t *testing.T) {
	of := func(label, annotation string) (*JobKey, error) {
		return keyFromPod(map[string]string{evenkeel.JobKeyKey: label}, map[string]string{evenkeel.JobKeyKey: annotation})
	}
	for _, test := range []struct {
		label, annotation string
		want              *JobKey
	}{
		{"", "", nil}, {"train-key-0", "", &JobKey{Secret: "train-key-0", Made: true}}, {"", "their.secret", &JobKey{Secret: "their.secret"}}, {"train-key-0", "theirs", &JobKey{Secret: "theirs"}},
	} {
		got, err := of(test.label, test.annotation)
		if diff := cmp.Diff(test.want, got); err != nil || diff != "" {
			t.Errorf("%q %q: %v %s", test.label, test.annotation, err, diff)
		}
		if got == nil {
			continue
		}
		// What is written on a template is what its pods have.
		r := resolved(func(r *Resolved) { r.JobKey = got })
		if again, err := FromPod(r.Labels(), r.Annotations()); err != nil || again.JobKey == nil || *again.JobKey != *got {
			t.Errorf("%+v: %+v %v", got, again.JobKey, err)
		}
	}
	for _, name := range []string{"../other", "A", strings.Repeat("a", 254)} {
		if _, err := of("", name); err == nil {
			t.Errorf("annotation %q: accepted", name)
		}
		if _, err := of(name, ""); err == nil {
			t.Errorf("label %q: accepted", name)
		}
	}
}

// What runs without encryption uses no transport that it would not use with it.
func TestInjectInClearKeepsTransport(t *testing.T) {
	r := resolved(encrypted)
	r.Environment["EVENKEEL_TRANSPORT"] = "auto"
	got := r.InClear()
	if want := map[string]string{"EVENKEEL_FLOWS": "8", "EVENKEEL_TRANSPORT": "tcp", "NCCL_NET": "Evenkeel"}; !cmp.Equal(want, got.Environment) {
		t.Error(cmp.Diff(want, got.Environment))
	}
	if !r.Encrypted() {
		t.Error("the profile itself was changed")
	}
	if diff := cmp.Diff(resolved(nil), resolved(nil).InClear()); diff != "" {
		t.Errorf("a profile without encryption: %s", diff)
	}
}
