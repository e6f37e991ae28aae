package inject

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// TestInjectFlightRecorder: containers with the Python package write what they called to a volume, unless they say where to write.
func TestInjectFlightRecorder(t *testing.T) {
	const ours = "/var/run/evenkeel/rank_"
	from := &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}
	for name, test := range map[string]struct {
		container corev1.Container
		profile   string // the variable in the profile's environment
		off       bool
		want      string
		mounted   bool
		skipped   string
	}{
		"without the package":  {off: true},
		"nothing set":          {want: ours, mounted: true},
		"the container's":      {container: corev1.Container{Env: []corev1.EnvVar{{Name: RecorderEnv, Value: "/tmp/rank_"}}}, want: "/tmp/rank_"},
		"the container's, off": {container: corev1.Container{Env: []corev1.EnvVar{{Name: RecorderEnv}}}},
		"from elsewhere":       {container: corev1.Container{Env: []corev1.EnvVar{{Name: RecorderEnv, ValueFrom: from}}}},
		"the profile's":        {profile: "/shared/rank_", want: "/shared/rank_"},
		"another mount": {
			container: corev1.Container{VolumeMounts: []corev1.VolumeMount{{Name: "v", MountPath: "/var/run/evenkeel/"}}},
			skipped:   "container main: mounts /var/run/evenkeel itself",
		},
		"a mount in place of the plugin": {
			container: corev1.Container{VolumeMounts: []corev1.VolumeMount{{Name: "v", MountPath: MountPath}}},
			skipped:   "container main: mounts /opt/evenkeel itself",
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := resolved(func(r *Resolved) {
				r.Python = !test.off
				if test.profile != "" {
					r.Environment[RecorderEnv] = test.profile
				}
			})
			test.container.Name = "main"
			p := apply(t, pod(test.container), r)
			c := p.Spec.Containers[0]
			if got := env(c)[RecorderEnv]; got != test.want || p.Annotations[evenkeel.SkippedKey] != test.skipped {
				t.Errorf("%q, want %q; skipped %q, want %q", got, test.want, p.Annotations[evenkeel.SkippedKey], test.skipped)
			}
			mounted := false
			for _, m := range c.VolumeMounts {
				mounted = mounted || m.Name == recorderVolumeName && m.MountPath == "/var/run/evenkeel" && !m.ReadOnly
			}
			var limit *resource.Quantity
			for _, v := range p.Spec.Volumes {
				if v.Name == recorderVolumeName {
					limit = v.EmptyDir.SizeLimit
				}
			}
			if mounted != test.mounted || (limit != nil) != test.mounted {
				t.Errorf("mounted: %t, a volume with the limit %v; want %t", mounted, limit, test.mounted)
			}
			if limit != nil && limit.String() != "1Gi" {
				t.Errorf("the volume's limit is %s", limit)
			}
			again := apply(t, p.DeepCopy(), r)
			if diff := cmp.Diff(p, again); diff != "" {
				t.Errorf("a second time changes the pod: %s", diff)
			}
		})
	}
	taken := pod(corev1.Container{Name: "main"})
	taken.Spec.Volumes = []corev1.Volume{{Name: recorderVolumeName}}
	if err := AddPlugin(taken, resolved(func(r *Resolved) { r.Python = true })); err == nil || !strings.Contains(err.Error(), `volume named "evenkeel-flight-recorder"`) {
		t.Errorf("a volume of that name: %v", err)
	}
}
