package inject

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// TestInjectPython: the package's folder comes last in PYTHONPATH, whoever sets that, and never in the place of another value.
func TestInjectPython(t *testing.T) {
	const ours = "/opt/evenkeel/plugin/python"
	from := &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}
	value := func(v string) []corev1.EnvVar { return []corev1.EnvVar{{Name: "PYTHONPATH", Value: v}} }
	for name, test := range map[string]struct {
		env     []corev1.EnvVar
		profile string // PYTHONPATH of the profile's environment
		off     bool
		want    string
		skipped string
	}{
		"disabled":                      {off: true, want: ""},
		"nothing set":                   {want: ours},
		"the container's":               {env: value("/src:/lib"), want: "/src:/lib:" + ours},
		"the container's, empty":        {env: value(""), want: ours},
		"the folder is there already":   {env: value(ours + ":/src"), want: ours + ":/src"},
		"from elsewhere":                {env: []corev1.EnvVar{{Name: "PYTHONPATH", ValueFrom: from}}, skipped: "container main: takes PYTHONPATH from elsewhere"},
		"the profile's":                 {profile: "/shared", want: "/shared:" + ours},
		"the container's and profile's": {env: value("/src"), profile: "/shared", want: "/src:" + ours, skipped: "container main: sets PYTHONPATH itself"},
	} {
		t.Run(name, func(t *testing.T) {
			r := resolved(func(r *Resolved) {
				r.Python = !test.off
				if test.profile != "" {
					r.Environment["PYTHONPATH"] = test.profile
				}
			})
			p := apply(t, pod(corev1.Container{Name: "main", Env: test.env}), r)
			if got := env(p.Spec.Containers[0])["PYTHONPATH"]; got != test.want || p.Annotations[evenkeel.SkippedKey] != test.skipped {
				t.Errorf("PYTHONPATH %q, want %q; skipped %q, want %q", got, test.want, p.Annotations[evenkeel.SkippedKey], test.skipped)
			}
			again := apply(t, p.DeepCopy(), r)
			if diff := cmp.Diff(p, again); diff != "" {
				t.Errorf("a second time changes the pod: %s", diff)
			}
		})
	}
	present := apply(t, pod(corev1.Container{Name: "main"}), resolved(func(r *Resolved) {
		r.Delivery, r.Image, r.Path, r.Python = evenkeel.DeliveryPreinstalled, "", "/usr/lib/nccl", true
	}))
	if got := env(present.Spec.Containers[0])["PYTHONPATH"]; got != "/usr/lib/nccl/python" {
		t.Errorf("preinstalled: PYTHONPATH %q", got)
	}
	theirs := apply(t, pod(corev1.Container{Name: "main", VolumeMounts: []corev1.VolumeMount{{Name: "v", MountPath: MountPath}}}), resolved(func(r *Resolved) { r.Python = true }))
	if got := env(theirs.Spec.Containers[0]); len(got) != 0 {
		t.Errorf("a container that mounts something else there gets %v", got)
	}
}
