package inject

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

const image = "registry.example.com/plugin@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

const controller = "10.96.0.7:9640"

func resolved(change func(*Resolved)) Resolved {
	r := Resolved{Profile: "default", Image: image, Delivery: evenkeel.DeliveryImageVolume, Path: "/plugin", Conflict: evenkeel.ConflictKeep,
		Environment: map[string]string{"EVENKEEL_FLOWS": "8"}}
	if change != nil {
		change(&r)
	}
	return r
}

func pod(containers ...corev1.Container) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: corev1.PodSpec{Containers: containers}}
}

func env(c corev1.Container) map[string]string {
	m := map[string]string{}
	for _, e := range c.Env {
		if e.ValueFrom == nil {
			m[e.Name] = e.Value
		}
	}
	return m
}

func apply(t *testing.T, p *corev1.Pod, r Resolved) *corev1.Pod {
	t.Helper()
	if err := Apply(p, r, ""); err != nil {
		t.Fatal(err)
	}
	return p
}

func TestInjectImageVolume(t *testing.T) {
	p := apply(t, pod(corev1.Container{Name: "main"}), resolved(nil))
	if diff := cmp.Diff([]corev1.Volume{{Name: "evenkeel", VolumeSource: corev1.VolumeSource{Image: &corev1.ImageVolumeSource{Reference: image, PullPolicy: corev1.PullIfNotPresent}}}}, p.Spec.Volumes); diff != "" {
		t.Error(diff)
	}
	c := p.Spec.Containers[0]
	if diff := cmp.Diff([]corev1.VolumeMount{{Name: "evenkeel", MountPath: "/opt/evenkeel", ReadOnly: true}}, c.VolumeMounts); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(map[string]string{"NCCL_NET_PLUGIN": "/opt/evenkeel/plugin/libnccl-net-evenkeel.so", "NCCL_NET_PLUGIN_REF_COUNT": "1", "EVENKEEL_FLOWS": "8"}, env(c)); diff != "" {
		t.Error(diff)
	}
	if len(p.Spec.InitContainers) != 0 || p.Annotations[evenkeel.InjectedKey] == "" || p.Annotations[evenkeel.SkippedKey] != "" {
		t.Errorf("init containers %v, annotations %v", p.Spec.InitContainers, p.Annotations)
	}
}

func TestInjectInitContainer(t *testing.T) {
	p := pod(corev1.Container{Name: "main"})
	p.Spec.InitContainers = []corev1.Container{{Name: "theirs"}}
	apply(t, p, resolved(func(r *Resolved) { r.Delivery = evenkeel.DeliveryInitContainer; r.Path = "/lib/x" }))
	c := p.Spec.InitContainers[0]
	if c.Image != image || p.Spec.InitContainers[1].Name != "theirs" {
		t.Fatalf("init containers %+v", p.Spec.InitContainers)
	}
	if diff := cmp.Diff([]string{"/lib/x", "/opt/evenkeel/lib/x"}, c.Args); diff != "" {
		t.Error(diff)
	}
	if s := c.SecurityContext; !*s.RunAsNonRoot || *s.AllowPrivilegeEscalation || !*s.ReadOnlyRootFilesystem || s.Capabilities.Drop[0] != "ALL" {
		t.Errorf("%+v", s)
	}
	if got := env(p.Spec.Containers[0])["NCCL_NET_PLUGIN"]; got != "/opt/evenkeel/lib/x/libnccl-net-evenkeel.so" {
		t.Error(got)
	}
}

// A webhook that is called later may replace the list of init containers. The API server calls ours again then.
func TestInjectPutsInitContainerBack(t *testing.T) {
	r := resolved(func(r *Resolved) { r.Delivery = evenkeel.DeliveryInitContainer })
	p := apply(t, pod(corev1.Container{Name: "main"}), r)
	want := p.Spec.DeepCopy()
	p.Spec.InitContainers = []corev1.Container{{Name: "theirs"}}
	apply(t, p, r)
	want.InitContainers = append(want.InitContainers, corev1.Container{Name: "theirs"})
	if diff := cmp.Diff(want, &p.Spec); diff != "" {
		t.Error(diff)
	}
}

// qosClass is the API server's rule, of pkg/apis/core/v1/helper/qos in Kubernetes 1.36.
func qosClass(pod *corev1.Pod) corev1.PodQOSClass {
	type amounts map[corev1.ResourceName]*resource.Quantity
	requests, limits, guaranteed := amounts{}, amounts{}, true
	sum := func(total amounts, list corev1.ResourceList) (found int) {
		for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory} {
			if q, ok := list[name]; ok && q.Sign() > 0 {
				if found++; total[name] == nil {
					total[name] = &resource.Quantity{}
				}
				total[name].Add(q)
			}
		}
		return found
	}
	if r := pod.Spec.Resources; r != nil {
		sum(requests, r.Requests)
		guaranteed = sum(limits, r.Limits) == 2
	} else {
		for _, c := range slices.Concat(pod.Spec.Containers, pod.Spec.InitContainers) {
			sum(requests, c.Resources.Requests)
			guaranteed = sum(limits, c.Resources.Limits) == 2 && guaranteed
		}
	}
	if len(requests)+len(limits) == 0 {
		return corev1.PodQOSBestEffort
	}
	for name, request := range requests {
		guaranteed = guaranteed && limits[name] != nil && limits[name].Cmp(*request) == 0
	}
	if guaranteed && len(requests) == len(limits) {
		return corev1.PodQOSGuaranteed
	}
	return corev1.PodQOSBurstable
}

func TestInjectKeepsQOSClass(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 6))
	list := func() corev1.ResourceList {
		l := corev1.ResourceList{}
		for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, "hugepages-2Mi", "nvidia.com/gpu"} {
			if random.IntN(4) > 0 {
				l[name] = *resource.NewQuantity(random.Int64N(3), resource.DecimalSI)
			}
		}
		return l
	}
	requirements := func() (r corev1.ResourceRequirements) {
		switch random.IntN(5) {
		case 0: // none
		case 1:
			r.Requests = list()
		case 2:
			r.Requests, r.Limits = list(), list()
		default: // a request that is absent gets the limit's value before any webhook is called
			r.Limits = list()
			r.Requests = r.Limits.DeepCopy()
		}
		return r
	}
	seen := map[corev1.PodQOSClass]int{}
	for range 5000 {
		p := pod()
		for range 1 + random.IntN(2) {
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "main", Resources: requirements()})
		}
		for range random.IntN(2) {
			p.Spec.InitContainers = append(p.Spec.InitContainers, corev1.Container{Name: "prepare", Resources: requirements()})
		}
		if random.IntN(4) == 0 {
			whole := requirements()
			p.Spec.Resources = &whole
		}
		before := p.DeepCopy()
		apply(t, p, resolved(func(r *Resolved) { r.Delivery = evenkeel.DeliveryInitContainer }))
		was, is := qosClass(before), qosClass(p)
		if was != is {
			t.Fatalf("%s became %s: %+v", was, is, before.Spec)
		}
		seen[is]++
	}
	if seen[corev1.PodQOSGuaranteed] < 100 || seen[corev1.PodQOSBurstable] < 100 || seen[corev1.PodQOSBestEffort] < 100 {
		t.Errorf("too few pods of a class: %v", seen)
	}
}

func TestInjectInitContainerUser(t *testing.T) {
	root, other, ours := int64(0), int64(1000680000), int64(65532)
	for name, test := range map[string]struct {
		pod  *corev1.PodSecurityContext
		want *int64
	}{
		"no context":        {nil, nil},
		"no user":           {&corev1.PodSecurityContext{}, nil}, // that of the image, or what the cluster assigns
		"the pod's user":    {&corev1.PodSecurityContext{RunAsUser: &other}, nil},
		"the pod is root's": {&corev1.PodSecurityContext{RunAsUser: &root}, &ours},
	} {
		p := pod(corev1.Container{Name: "main"})
		p.Spec.SecurityContext = test.pod
		apply(t, p, resolved(func(r *Resolved) { r.Delivery = evenkeel.DeliveryInitContainer }))
		s := p.Spec.InitContainers[0].SecurityContext
		if diff := cmp.Diff(test.want, s.RunAsUser); diff != "" || !*s.RunAsNonRoot || s.RunAsGroup != nil {
			t.Errorf("%s: %+v %s", name, s, diff)
		}
	}
}

func TestInjectImagePullSecrets(t *testing.T) {
	for _, delivery := range []evenkeel.Delivery{evenkeel.DeliveryImageVolume, evenkeel.DeliveryInitContainer} {
		p := pod(corev1.Container{Name: "main"})
		p.Spec.ImagePullSecrets = []corev1.LocalObjectReference{{Name: "mine"}, {Name: "b"}}
		want := resolved(func(r *Resolved) { r.Delivery, r.ImagePullSecrets = delivery, []string{"a", "b"} })
		r, err := FromPod(want.Labels(), want.Annotations())
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			apply(t, p, r)
			if diff := cmp.Diff([]corev1.LocalObjectReference{{Name: "mine"}, {Name: "b"}, {Name: "a"}}, p.Spec.ImagePullSecrets); diff != "" {
				t.Errorf("%s: %s", delivery, diff)
			}
		}
	}
	forged := resolved(func(r *Resolved) { r.ImagePullSecrets = []string{"../a"} })
	if _, err := FromPod(forged.Labels(), forged.Annotations()); err == nil || !strings.Contains(err.Error(), evenkeel.ImagePullSecretsKey) {
		t.Errorf("a name that is none: %v", err)
	}
}

func TestInjectPreinstalled(t *testing.T) {
	p := apply(t, pod(corev1.Container{Name: "main"}), resolved(func(r *Resolved) { r.Delivery, r.Image, r.Path = evenkeel.DeliveryPreinstalled, "", "/usr/lib/nccl" }))
	if len(p.Spec.Volumes) != 0 || len(p.Spec.Containers[0].VolumeMounts) != 0 || env(p.Spec.Containers[0])["NCCL_NET_PLUGIN"] != "/usr/lib/nccl/libnccl-net-evenkeel.so" {
		t.Errorf("%+v", p.Spec)
	}
}

func TestInjectSelectsContainers(t *testing.T) {
	gpu := corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}}
	for name, test := range map[string]struct {
		containers []corev1.Container
		chosen     []string
		want       []string
	}{
		"one without GPUs":       {containers: []corev1.Container{{Name: "a"}, {Name: "b"}}, want: []string{"a"}},
		"only those with GPUs":   {containers: []corev1.Container{{Name: "a"}, {Name: "b", Resources: gpu}}, want: []string{"b"}},
		"the chosen":             {containers: []corev1.Container{{Name: "a"}, {Name: "b", Resources: gpu}}, chosen: []string{"a"}, want: []string{"a"}},
		"never a mesh's sidecar": {containers: []corev1.Container{{Name: "istio-proxy"}, {Name: "a"}}, want: []string{"a"}},
	} {
		t.Run(name, func(t *testing.T) {
			p := apply(t, pod(test.containers...), resolved(func(r *Resolved) { r.Containers = test.chosen }))
			var got []string
			for _, c := range p.Spec.Containers {
				if env(c)["NCCL_NET_PLUGIN"] != "" {
					got = append(got, c.Name)
				}
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestInjectKeepsUserEnvironment(t *testing.T) {
	from := &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}
	p := pod(corev1.Container{Name: "main", Env: []corev1.EnvVar{{Name: "NCCL_NET_PLUGIN", Value: "none"}, {Name: "EVENKEEL_FLOWS", ValueFrom: from}}})
	before := p.DeepCopy()
	apply(t, p, resolved(nil))
	if env := p.Spec.Containers[0].Env; len(env) != 3 || env[2].Name != "EVENKEEL_NODE" {
		t.Errorf("it got %v", env)
	} else if diff := cmp.Diff(before.Spec.Containers[0].Env, env[:2]); diff != "" {
		t.Error(diff)
	}
	if got, want := p.Annotations[evenkeel.SkippedKey], "container main: sets NCCL_NET_PLUGIN itself; container main: sets EVENKEEL_FLOWS itself"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	replaced := apply(t, before, resolved(func(r *Resolved) { r.Conflict = evenkeel.ConflictReplace }))
	if got := env(replaced.Spec.Containers[0])["NCCL_NET_PLUGIN"]; got != "/opt/evenkeel/plugin/libnccl-net-evenkeel.so" {
		t.Errorf("Replace left %q", got)
	}
}

// TestInjectNoFallback: NCCL 2.28 and 2.29 forget the plugin with the last communicator unless they count references, and a
// strict profile names the plugin as the only network. A container with a plugin of its own gets neither.
// TestInjectNodeName: processes know their node's name, unless somebody gives them another.
func TestInjectNodeName(t *testing.T) {
	mine := corev1.EnvVar{Name: "EVENKEEL_NODE", Value: "rack-3"}
	node := corev1.EnvVar{Name: "EVENKEEL_NODE", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "spec.nodeName"}}}
	for name, test := range map[string]struct {
		container corev1.Container
		profile   map[string]string
		want      corev1.EnvVar
	}{
		"the node's":    {corev1.Container{Name: "main"}, nil, node},
		"the user's":    {corev1.Container{Name: "main", Env: []corev1.EnvVar{mine}}, nil, mine},
		"the profile's": {corev1.Container{Name: "main"}, map[string]string{"EVENKEEL_NODE": "rack-3"}, mine},
	} {
		p := apply(t, pod(test.container), resolved(func(r *Resolved) { r.Environment = test.profile }))
		var got []corev1.EnvVar
		for _, e := range p.Spec.Containers[0].Env {
			if e.Name == "EVENKEEL_NODE" {
				got = append(got, e)
			}
		}
		if diff := cmp.Diff([]corev1.EnvVar{test.want}, got); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

func TestInjectNoFallback(t *testing.T) {
	yes := true
	profile := &evenkeel.NetworkProfile{ObjectMeta: metav1.ObjectMeta{Name: "p"}}
	profile.Spec.Plugin = evenkeel.PluginSpec{Image: image, Strict: &yes}
	own := func(value string) corev1.Container {
		return corev1.Container{Name: "main", Env: []corev1.EnvVar{{Name: "NCCL_NET_PLUGIN", Value: value}}}
	}
	for name, test := range map[string]struct {
		container           corev1.Container
		replace             bool
		network, references string
	}{
		"no plugin of its own":       {corev1.Container{Name: "main"}, false, "Evenkeel", "1"},
		"the same plugin":            {own("/opt/evenkeel/plugin/libnccl-net-evenkeel.so"), false, "Evenkeel", "1"},
		"the same by its short name": {own("evenkeel"), false, "Evenkeel", "1"},
		"another plugin":             {own("none"), false, "", ""},
		"another plugin is replaced": {own("none"), true, "Evenkeel", "1"},
		"its own network": {
			corev1.Container{Name: "main", Env: []corev1.EnvVar{{Name: "NCCL_NET", Value: "IB"}, {Name: "NCCL_NET_PLUGIN_REF_COUNT", Value: "0"}}}, false, "IB", "0",
		},
	} {
		r := Resolve(profile, "")
		if test.replace {
			r.Conflict = evenkeel.ConflictReplace
		}
		got := env(apply(t, pod(test.container), r).Spec.Containers[0])
		if got["NCCL_NET"] != test.network || got["NCCL_NET_PLUGIN_REF_COUNT"] != test.references {
			t.Errorf("%s: NCCL_NET=%q, NCCL_NET_PLUGIN_REF_COUNT=%q, want %q and %q", name, got["NCCL_NET"], got["NCCL_NET_PLUGIN_REF_COUNT"], test.network, test.references)
		}
	}
	profile.Spec.Plugin.Strict = nil
	if got := env(apply(t, pod(corev1.Container{Name: "main"}), Resolve(profile, "")).Spec.Containers[0]); got["NCCL_NET"] != "" {
		t.Errorf("not strict, and yet NCCL_NET=%q", got["NCCL_NET"])
	}
}

// TestInjectReport: only pods in which the plugin can report are marked, whatever the pod says of itself.
func TestInjectReport(t *testing.T) {
	with := func(e ...corev1.EnvVar) corev1.Container { return corev1.Container{Name: "main", Env: e} }
	for name, test := range map[string]struct {
		container       corev1.Container
		address, report string
		marked          bool
	}{
		"the plugin":               {with(), controller, controller, true},
		"no address":               {with(), "", "", false},
		"another plugin":           {with(corev1.EnvVar{Name: "NCCL_NET_PLUGIN", Value: "none"}), controller, "", false},
		"the user wants no report": {with(corev1.EnvVar{Name: "EVENKEEL_REPORT"}), controller, "", false},
	} {
		p := pod(test.container)
		if test.address != "" {
			p.Annotations = map[string]string{evenkeel.PluginStatusKey: "Loaded 2026-11-23T07:00:00Z copied"}
		}
		if err := Apply(p, resolved(nil), test.address); err != nil {
			t.Fatal(err)
		}
		if got := env(p.Spec.Containers[0])["EVENKEEL_REPORT"]; got != test.report {
			t.Errorf("%s: EVENKEEL_REPORT=%q", name, got)
		}
		if got := p.Annotations[evenkeel.PluginStatusKey]; (got == evenkeel.PluginNotReported) != test.marked || !test.marked && got != "" {
			t.Errorf("%s: the annotation is %q", name, got)
		}
	}
}

func TestInjectErrors(t *testing.T) {
	volume := pod(corev1.Container{Name: "main"})
	volume.Spec.Volumes = []corev1.Volume{{Name: "evenkeel"}}
	for name, test := range map[string]struct {
		pod  *corev1.Pod
		r    Resolved
		want string
	}{
		"unknown container": {pod(corev1.Container{Name: "main"}, corev1.Container{Name: "log"}), resolved(func(r *Resolved) { r.Containers = []string{"trainer"} }), `"trainer"; the pod has main, log`},
		"volume taken":      {volume, resolved(nil), `volume named "evenkeel"`},
	} {
		if err := Apply(test.pod, test.r, ""); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", name, err, test.want)
		}
	}
}

func TestInjectIgnoresForgedAnnotation(t *testing.T) {
	p := pod(corev1.Container{Name: "main"})
	p.Annotations = map[string]string{evenkeel.InjectedKey: "yes"}
	apply(t, p, resolved(nil))
	if env(p.Spec.Containers[0])["NCCL_NET_PLUGIN"] == "" {
		t.Error("not injected")
	}
}

func TestResolvedRoundTrip(t *testing.T) {
	r := resolved(func(r *Resolved) {
		r.Containers = []string{"a", "b"}
		r.Python = true
		r.Environment["X"] = `a "quoted" value`
	})
	back, err := FromPod(map[string]string{evenkeel.ProfileKey: "default"}, r.Annotations())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(r, back); diff != "" {
		t.Error(diff)
	}
}

func TestResolvedFromPodErrors(t *testing.T) {
	good := resolved(nil).Annotations()
	for key, value := range map[string]string{
		evenkeel.DeliveryKey: "Sideways", evenkeel.PluginImageKey: "plugin:latest", evenkeel.PluginPathKey: "/a/../b",
		evenkeel.ConflictPolicyKey: "Maybe", evenkeel.PythonKey: "Disabled", evenkeel.EnvironmentKey: "{",
	} {
		bad := map[string]string{}
		for k, v := range good {
			bad[k] = v
		}
		bad[key] = value
		if _, err := FromPod(map[string]string{evenkeel.ProfileKey: "p"}, bad); err == nil || !strings.Contains(err.Error(), key) {
			t.Errorf("%s=%s: %v", key, value, err)
		}
	}
	if _, err := FromPod(map[string]string{evenkeel.ProfileKey: "p"}, nil); err == nil || !strings.Contains(err.Error(), "on the job") {
		t.Errorf("only the label: %v", err)
	}
}

func TestResolve(t *testing.T) {
	n := int32(3)
	profile := &evenkeel.NetworkProfile{ObjectMeta: metav1.ObjectMeta{Name: "p", Generation: 2}}
	profile.Spec.Plugin.Image = image
	profile.Spec.Transport.TCP.FlowsPerPeer = &n
	if got := Resolve(profile, ""); got.Delivery != evenkeel.DeliveryInitContainer || got.Environment["EVENKEEL_FLOWS"] != "3" || got.Path != "/plugin" {
		t.Errorf("without a status: %+v", got)
	}
	profile.Status.Delivery, profile.Status.ObservedGeneration = evenkeel.DeliveryImageVolume, 1
	if got := Resolve(profile, ""); got.Delivery != evenkeel.DeliveryInitContainer {
		t.Errorf("with a stale status: %s", got.Delivery)
	}
	profile.Status.ObservedGeneration = 2
	if got := Resolve(profile, " a, b,"); got.Delivery != evenkeel.DeliveryImageVolume || len(got.Containers) != 2 {
		t.Errorf("with a status: %+v", got)
	}
}

// check asserts what holds for every pod: a second application changes nothing, and nothing of the user's is gone.
func check(t *testing.T, before *corev1.Pod, r Resolved) {
	t.Helper()
	once := before.DeepCopy()
	if Apply(once, r, controller) != nil {
		return
	}
	twice := once.DeepCopy()
	if err := Apply(twice, r, controller); err != nil {
		t.Fatalf("second application: %v", err)
	}
	if diff := cmp.Diff(once, twice); diff != "" {
		t.Fatalf("the second application changed the pod: %s", diff)
	}
	for i, c := range before.Spec.Containers {
		after := once.Spec.Containers[i]
		for j, e := range c.Env {
			if e.Name == "NCCL_NET_PLUGIN" && r.Conflict == evenkeel.ConflictReplace {
				continue
			}
			if own, ok := strings.CutSuffix(after.Env[j].Value, "/python"); ok && e.Name == "PYTHONPATH" && r.Python && strings.HasPrefix(own, e.Value) {
				continue // appended
			}
			if diff := cmp.Diff(e, after.Env[j]); diff != "" {
				t.Fatalf("the user's variable changed: %s", diff)
			}
		}
		if diff := cmp.Diff(c.VolumeMounts, after.VolumeMounts[:len(c.VolumeMounts)]); diff != "" && len(c.VolumeMounts) > 0 {
			t.Fatalf("the user's mounts changed: %s", diff)
		}
		withoutDevice(t, c, &after, r)
		c.Env, after.Env, c.VolumeMounts, after.VolumeMounts = nil, nil, nil, nil
		if diff := cmp.Diff(c, after); diff != "" {
			t.Fatalf("another field of the container changed: %s", diff)
		}
	}
	added := len(once.Spec.InitContainers) - len(before.Spec.InitContainers)
	for i, c := range before.Spec.InitContainers {
		if diff := cmp.Diff(c, once.Spec.InitContainers[added+i]); diff != "" {
			t.Fatalf("the user's init container changed: %s", diff)
		}
	}
	for i, v := range before.Spec.Volumes {
		if diff := cmp.Diff(v, once.Spec.Volumes[i]); diff != "" {
			t.Fatalf("the user's volume changed: %s", diff)
		}
	}
}

func TestInjectProperties(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	pick := func(options ...string) string { return options[random.IntN(len(options))] }
	for range 2000 {
		p := pod()
		for range 1 + random.IntN(3) {
			c := corev1.Container{Name: pick("main", "istio-proxy", "log", "a")}
			for range random.IntN(4) {
				c.Env = append(c.Env, corev1.EnvVar{Name: pick("NCCL_NET_PLUGIN", "NCCL_NET", "PYTHONPATH", "NCCL_NET_PLUGIN_REF_COUNT", "EVENKEEL_FLOWS", "PATH", "X", "EVENKEEL_JOB_KEY", "NCCL_COLLNET_ENABLE"), Value: pick("", "8", "none")})
			}
			for range random.IntN(2) {
				c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: "d", MountPath: pick("/data", "/opt/evenkeel", "/opt/evenkeel/")})
			}
			if random.IntN(3) == 0 {
				c.Resources.Limits = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}
			}
			if random.IntN(4) == 0 {
				c.Resources.Requests = corev1.ResourceList{corev1.ResourceName(pick("rdma/hca", "rdma/other", "cpu")): resource.MustParse("1")}
			}
			if random.IntN(3) == 0 {
				c.SecurityContext = &corev1.SecurityContext{Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{corev1.Capability(pick("ALL", "IPC_LOCK"))}}}
			}
			p.Spec.Containers = append(p.Spec.Containers, c)
		}
		for range random.IntN(2) {
			p.Spec.InitContainers = append(p.Spec.InitContainers, corev1.Container{Name: pick("prepare", "evenkeel-install")})
		}
		for range random.IntN(2) {
			p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: pick("d", "evenkeel", "evenkeel-job-key")})
		}
		if random.IntN(5) == 0 {
			p.Annotations = map[string]string{evenkeel.InjectedKey: pick("", "forged", hash(resolved(nil)))}
		}
		check(t, p, resolved(func(r *Resolved) {
			r.Delivery = evenkeel.Delivery(pick("ImageVolume", "InitContainer", "Preinstalled"))
			r.Conflict = evenkeel.ConflictPolicy(pick("Keep", "Replace"))
			r.Environment["X"] = pick("1", "2")
			r.Python = random.IntN(2) == 0
			if random.IntN(2) == 0 {
				r.Environment["NCCL_NET"] = "Evenkeel"
			}
			if random.IntN(4) == 0 {
				r.Containers = []string{pick("main", "nobody")}
			}
			if random.IntN(2) == 0 {
				r.Reduction = &Reduction{Service: "train-reduce-0", Servers: []string{"a:1", "b:2"}}
			}
			if random.IntN(2) == 0 {
				r.RDMA = &RDMA{Resource: "rdma/hca", Count: 1 + random.IntN(2), LockMemory: random.IntN(2) == 0, Networks: pick("", "rail0,rail1")}
			}
		}))
	}
}

func FuzzInject(f *testing.F) {
	f.Add("main", "NCCL_NET_PLUGIN", "none", "/data", "ImageVolume", "Keep", "{}", "")
	f.Add("istio-proxy", "X", "", "/opt/evenkeel", "InitContainer", "Replace", `{"X":"1"}`, "main")
	f.Fuzz(func(t *testing.T, container, name, value, mount, delivery, conflict, environment, chosen string) {
		p := pod(corev1.Container{Name: container, Env: []corev1.EnvVar{{Name: name, Value: value}}, VolumeMounts: []corev1.VolumeMount{{Name: "v", MountPath: mount}}})
		r, err := FromPod(map[string]string{evenkeel.ProfileKey: "p"}, map[string]string{
			evenkeel.PluginImageKey: image, evenkeel.DeliveryKey: delivery, evenkeel.PluginPathKey: "/plugin",
			evenkeel.ConflictPolicyKey: conflict, evenkeel.EnvironmentKey: environment, evenkeel.ContainersKey: chosen,
		})
		if err == nil {
			check(t, p, r)
		}
	})
}

// Replicas of two versions of the webhook see the same pod during an upgrade, and refuse it if they disagree about what was injected. So
// a new field is left out of the hash where it is not set.
func TestInjectHashIsThatOfEarlierVersions(t *testing.T) {
	r := Resolved{Profile: "p", Image: "i", Delivery: evenkeel.DeliveryInitContainer, Path: "/plugin", Conflict: evenkeel.ConflictKeep, Environment: map[string]string{"A": "1"}}
	if got, want := hash(r), "3a838720e3fec962"; got != want {
		t.Errorf("%s, which was %s", got, want)
	}
}
