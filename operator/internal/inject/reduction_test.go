package inject

import (
	"maps"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

func reduced(r *Resolved) {
	r.Reduction = &Reduction{Service: "train-reduce-0", Servers: []string{"train-reduce-0-0.train-reduce-0.team.svc:7470", "train-reduce-0-1.train-reduce-0.team.svc:7470"}}
}

func TestInjectReductionServersAndKey(t *testing.T) {
	p := apply(t, pod(corev1.Container{Name: "main"}, corev1.Container{Name: "istio-proxy"}), resolved(reduced))
	want := map[string]string{
		"NCCL_NET_PLUGIN": "/opt/evenkeel/plugin/libnccl-net-evenkeel.so", "EVENKEEL_FLOWS": "8", "NCCL_COLLNET_ENABLE": "1", "NCCL_NET_PLUGIN_REF_COUNT": "1",
		"EVENKEEL_REDUCTION_SERVERS": "train-reduce-0-0.train-reduce-0.team.svc:7470,train-reduce-0-1.train-reduce-0.team.svc:7470",
		"EVENKEEL_JOB_KEY_FILE":      "/var/run/secrets/evenkeel.dev/job-key",
	}
	if diff := cmp.Diff(want, env(p.Spec.Containers[0])); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(map[string]string{}, env(p.Spec.Containers[1])); diff != "" {
		t.Errorf("the sidecar too: %s", diff)
	}
	key := p.Spec.Volumes[len(p.Spec.Volumes)-1]
	if key.Secret == nil || key.Secret.SecretName != "train-reduce-0" || key.Secret.Optional != nil {
		t.Errorf("volume %+v, want a Secret that pods wait for", key)
	}
	if m := p.Spec.Containers[0].VolumeMounts; m[len(m)-1].Name != key.Name || !strings.HasPrefix(want["EVENKEEL_JOB_KEY_FILE"], m[len(m)-1].MountPath+"/") {
		t.Errorf("mounts %+v", m)
	}
}

func TestInjectReductionSkipsOwnKey(t *testing.T) {
	for name, c := range map[string]corev1.Container{
		"EVENKEEL_JOB_KEY":              {Env: []corev1.EnvVar{{Name: "EVENKEEL_JOB_KEY", Value: "0"}}},
		"EVENKEEL_JOB_KEY_FILE":         {Env: []corev1.EnvVar{{Name: "EVENKEEL_JOB_KEY_FILE", Value: "/mine"}}},
		"EVENKEEL_REDUCTION_SERVERS":    {Env: []corev1.EnvVar{{Name: "EVENKEEL_REDUCTION_SERVERS", Value: "mine:1"}}},
		"/var/run/secrets/evenkeel.dev": {VolumeMounts: []corev1.VolumeMount{{Name: "mine", MountPath: "/var/run/secrets/evenkeel.dev/"}}},
	} {
		c.Name = "main"
		before := env(c)
		p := apply(t, pod(c), resolved(reduced))
		after := env(p.Spec.Containers[0])
		maps.DeleteFunc(after, func(k, _ string) bool { return strings.HasPrefix(k, "NCCL_NET_PLUGIN") || k == "EVENKEEL_FLOWS" })
		if diff := cmp.Diff(before, after); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
		if skipped := p.Annotations[evenkeel.SkippedKey]; !strings.Contains(skipped, name+" itself, and so does without the reduction servers") {
			t.Errorf("%s: the pod says %q", name, skipped)
		}
	}
}

func TestInjectReductionKeepsCollNetSetting(t *testing.T) {
	p := apply(t, pod(corev1.Container{Name: "main", Env: []corev1.EnvVar{{Name: "NCCL_COLLNET_ENABLE", Value: "0"}}}), resolved(reduced))
	if env(p.Spec.Containers[0])["NCCL_COLLNET_ENABLE"] != "0" || !strings.Contains(p.Annotations[evenkeel.SkippedKey], "sets NCCL_COLLNET_ENABLE itself") {
		t.Errorf("%v, %v", p.Spec.Containers[0].Env, p.Annotations)
	}
}

func TestInjectReductionReplacesProfileKey(t *testing.T) {
	own := func(r *Resolved) { r.Environment["EVENKEEL_JOB_KEY"] = "the profile's" }
	p := apply(t, pod(corev1.Container{Name: "main"}), resolved(func(r *Resolved) { reduced(r); own(r) }))
	if got := env(p.Spec.Containers[0]); got["EVENKEEL_JOB_KEY"] != "" || got["EVENKEEL_JOB_KEY_FILE"] == "" {
		t.Errorf("two keys: %v", got)
	}
	p = apply(t, pod(corev1.Container{Name: "main"}), resolved(own))
	if got := env(p.Spec.Containers[0]); got["EVENKEEL_JOB_KEY"] != "the profile's" {
		t.Errorf("without servers: %v", got)
	}
}

// The plugin takes up to 63 letters, digits, dashes, dots, underscores and slashes.
func TestReductionJobNameIsValid(t *testing.T) {
	long := strings.Repeat("n", 63)
	for _, test := range []struct{ namespace, name, want string }{
		{"team", "llama", "team/llama"},
		{"team", "llama.v2", "team/llama.v2"},
		{"team", strings.Repeat("n", 58), "team/" + strings.Repeat("n", 58)},
		{"team", strings.Repeat("n", 59), "team/" + strings.Repeat("n", 49) + "-c7135d3b"},
		{long, "llama", strings.Repeat("n", 54) + "-6d369b4c"},
		{long, "llama-2", strings.Repeat("n", 54) + "-045a96af"},
	} {
		if got := JobName(test.namespace, test.name); got != test.want || len(got) > 63 {
			t.Errorf("%s of %s is %q, want %q", test.name, test.namespace, got, test.want)
		}
	}
}

func TestInjectReductionJobName(t *testing.T) {
	named := func(r *Resolved) { reduced(r); r.Environment[JobEnv] = "team/train" }
	p := apply(t, pod(corev1.Container{Name: "main"}, corev1.Container{Name: "own", Env: []corev1.EnvVar{{Name: JobEnv, Value: "mine"}}}), resolved(named))
	for i, want := range []string{"team/train", "mine"} {
		if got := env(p.Spec.Containers[i])[JobEnv]; got != want {
			t.Errorf("container %d: %q, want %q", i, got, want)
		}
	}
}

func TestResolvedReductionRoundTrip(t *testing.T) {
	r := resolved(reduced)
	back, err := FromPod(r.Labels(), r.Annotations())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(r, back); diff != "" {
		t.Error(diff)
	}
	for name, change := range map[string]func(labels, annotations map[string]string){
		"go together":  func(l, _ map[string]string) { delete(l, evenkeel.ReductionClientKey) },
		"go together ": func(_, a map[string]string) { delete(a, evenkeel.ReductionServersKey) },
		`"Not_A_Name"`: func(l, _ map[string]string) { l[evenkeel.ReductionClientKey] = "Not_A_Name" },
		`has "nobody"`: func(_, a map[string]string) { a[evenkeel.ReductionServersKey] = "x:1,nobody" },
		`has ""`:       func(_, a map[string]string) { a[evenkeel.ReductionServersKey] = "x:1," },
		`has ":1"`:     func(_, a map[string]string) { a[evenkeel.ReductionServersKey] = ":1" },
	} {
		labels, annotations := r.Labels(), r.Annotations()
		change(labels, annotations)
		if _, err := FromPod(labels, annotations); err == nil || !strings.Contains(err.Error(), strings.TrimSpace(name)) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
