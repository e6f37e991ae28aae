package inject

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// sources are the entries of ConfigMaps and Secrets, by kind and name.
type sources map[string]map[string]string

// resolve is what the kubelet makes of a container's variables, by makeEnvironmentVariables in pkg/kubelet/kubelet_pods.go of
// Kubernetes 1.36: first envFrom, then env in its order. An optional reference to what is not there changes nothing.
func (s sources) resolve(t *testing.T, c *corev1.Container) map[string]string {
	t.Helper()
	values := map[string]string{}
	for _, from := range c.EnvFrom {
		var entries map[string]string
		switch {
		case from.ConfigMapRef != nil:
			entries = s["ConfigMap "+from.ConfigMapRef.Name]
		case from.SecretRef != nil:
			entries = s["Secret "+from.SecretRef.Name]
		}
		for key, value := range entries {
			values[from.Prefix+key] = value
		}
	}
	for _, e := range c.Env {
		value, found, optional := e.Value, true, false
		if e.ValueFrom != nil {
			switch from := e.ValueFrom; {
			case from.ConfigMapKeyRef != nil:
				value, found = s["ConfigMap "+from.ConfigMapKeyRef.Name][from.ConfigMapKeyRef.Key]
				optional = from.ConfigMapKeyRef.Optional != nil && *from.ConfigMapKeyRef.Optional
			case from.SecretKeyRef != nil:
				value, found = s["Secret "+from.SecretKeyRef.Name][from.SecretKeyRef.Key]
				optional = from.SecretKeyRef.Optional != nil && *from.SecretKeyRef.Optional
			}
		}
		if !found && !optional {
			t.Errorf("the container does not start: %s refers to what is not there", e.Name)
		}
		if found {
			values[e.Name] = value
		}
	}
	return values
}

func configMap(name, prefix string) corev1.EnvFromSource {
	return corev1.EnvFromSource{Prefix: prefix, ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: name}}}
}

func secret(name, prefix string) corev1.EnvFromSource {
	return corev1.EnvFromSource{Prefix: prefix, SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: name}}}
}

// TestInjectKeepsEnvFrom has variables in ConfigMaps and Secrets, which nobody reads but the kubelet.
func TestInjectKeepsEnvFrom(t *testing.T) {
	const library = "/opt/evenkeel/plugin/libnccl-net-evenkeel.so"
	held := sources{
		"ConfigMap nccl":    {"NCCL_DEBUG": "TRACE", "EVENKEEL_FLOWS": "2", "NCCL_NET_PLUGIN": "none", "NCCL_NET": "Socket", "PYTHONPATH": "/theirs", "EVENKEEL_NODE": "rack-3"},
		"ConfigMap flows":   {"FLOWS": "3"},
		"ConfigMap harmful": {"EVENKEEL_ENCRYPTION": "off", "NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none", "EVENKEEL_RDMA_NETWORK": "trusted", "EVENKEEL_JOB_KEY_FILE": "/theirs"},
		"Secret flows":      {"EVENKEEL_FLOWS": "5"},
		"ConfigMap other":   {"OTHER": "1"},
	}
	none := func(*Resolved) {}
	for name, test := range map[string]struct {
		change func(*Resolved)
		from   []corev1.EnvFromSource
		env    []corev1.EnvVar
		want   map[string]string
	}{
		"a ConfigMap": {none, []corev1.EnvFromSource{configMap("nccl", "")}, nil,
			map[string]string{"NCCL_DEBUG": "TRACE", "EVENKEEL_FLOWS": "2", "NCCL_NET_PLUGIN": "none", "NCCL_NET": "Socket", "NCCL_NET_PLUGIN_REF_COUNT": "1", "EVENKEEL_NODE": "rack-3"}},
		"a ConfigMap of other variables": {none, []corev1.EnvFromSource{configMap("other", "")}, nil,
			map[string]string{"NCCL_DEBUG": "WARN", "EVENKEEL_FLOWS": "8", "NCCL_NET_PLUGIN": library, "OTHER": "1"}},
		"a ConfigMap that is not there": {none, []corev1.EnvFromSource{configMap("absent", "")}, nil, map[string]string{"EVENKEEL_FLOWS": "8", "NCCL_NET_PLUGIN": library}},
		"a prefix":                      {none, []corev1.EnvFromSource{configMap("flows", "EVENKEEL_")}, nil, map[string]string{"EVENKEEL_FLOWS": "3", "NCCL_NET_PLUGIN": library}},
		"another prefix":                {none, []corev1.EnvFromSource{configMap("nccl", "THEIR_")}, nil, map[string]string{"EVENKEEL_FLOWS": "8", "NCCL_NET_PLUGIN": library, "THEIR_NCCL_NET_PLUGIN": "none"}},
		"a prefix that is the name":     {none, []corev1.EnvFromSource{configMap("flows", "EVENKEEL_FLOWS")}, nil, map[string]string{"EVENKEEL_FLOWS": "8"}},
		"a Secret":                      {none, []corev1.EnvFromSource{secret("flows", "")}, nil, map[string]string{"EVENKEEL_FLOWS": "5", "NCCL_NET_PLUGIN": library}},
		"the last of several":           {none, []corev1.EnvFromSource{configMap("nccl", ""), secret("flows", "")}, nil, map[string]string{"EVENKEEL_FLOWS": "5", "NCCL_DEBUG": "TRACE"}},
		"env before envFrom": {none, []corev1.EnvFromSource{configMap("nccl", "")}, []corev1.EnvVar{{Name: "EVENKEEL_FLOWS", Value: "6"}},
			map[string]string{"EVENKEEL_FLOWS": "6", "NCCL_DEBUG": "TRACE"}},
		"a plugin that is replaced": {func(r *Resolved) { r.Conflict = evenkeel.ConflictReplace }, []corev1.EnvFromSource{configMap("nccl", "")}, nil,
			map[string]string{"NCCL_NET_PLUGIN": library, "EVENKEEL_FLOWS": "2"}},
		"the Python package": {func(r *Resolved) { r.Python = true }, []corev1.EnvFromSource{configMap("nccl", "")}, nil, map[string]string{"PYTHONPATH": "/theirs"}},
		"the Python package alone": {func(r *Resolved) { r.Python = true }, []corev1.EnvFromSource{configMap("other", "")}, nil,
			map[string]string{"PYTHONPATH": "/opt/evenkeel/plugin/python"}},
		"encryption": {func(r *Resolved) {
			r.Environment[EncryptionEnv], r.Environment[RDMANetworkEnv], r.Environment[networkEnv] = EncryptionRequired, "untrusted", networkName
			r.JobKey = &JobKey{Secret: "key"}
		}, []corev1.EnvFromSource{configMap("harmful", "")}, nil, map[string]string{
			EncryptionEnv: EncryptionRequired, RDMANetworkEnv: "untrusted", networkEnv: networkName, pluginEnv: library, KeyFileEnv: KeyFile,
		}},
	} {
		t.Run(name, func(t *testing.T) {
			p := pod(corev1.Container{Name: "main", EnvFrom: test.from, Env: test.env})
			apply(t, p, resolved(func(r *Resolved) {
				r.Environment["NCCL_DEBUG"] = "WARN"
				test.change(r)
			}))
			got := held.resolve(t, &p.Spec.Containers[0])
			for name, want := range test.want {
				if got[name] != want {
					t.Errorf("%s=%q, want %q", name, got[name], want)
				}
			}
		})
	}
}

// TestInjectSaysWhatShutsThePluginOut has containers that name another network or plugin than Evenkeel's.
func TestInjectSaysWhatShutsThePluginOut(t *testing.T) {
	elsewhere := &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: "nccl"}, Key: "NCCL_NET"}}
	for name, test := range map[string]struct {
		env  []corev1.EnvVar
		want string
	}{
		"another network":            {[]corev1.EnvVar{{Name: "NCCL_NET", Value: "gIB"}}, "container main: sets NCCL_NET itself, so NCCL does not use the plugin"},
		"NCCL's sockets":             {[]corev1.EnvVar{{Name: "NCCL_NET", Value: "Socket"}}, "container main: sets NCCL_NET itself, so NCCL does not use the plugin"},
		"the plugin's":               {[]corev1.EnvVar{{Name: "NCCL_NET", Value: "Evenkeel"}}, ""},
		"the plugin's in lower case": {[]corev1.EnvVar{{Name: "NCCL_NET", Value: "evenkeel"}}, ""}, // NCCL compares without regard to case
		"an empty one":               {[]corev1.EnvVar{{Name: "NCCL_NET", Value: ""}}, ""},
		"one from elsewhere":         {[]corev1.EnvVar{{Name: "NCCL_NET", ValueFrom: elsewhere}}, "container main: takes NCCL_NET from elsewhere: unless it is Evenkeel, NCCL does not use the plugin"},
		"another plugin":             {[]corev1.EnvVar{{Name: "NCCL_NET_PLUGIN", Value: "none"}, {Name: "NCCL_NET", Value: "gIB"}}, "container main: sets NCCL_NET_PLUGIN itself"},
	} {
		p := apply(t, pod(corev1.Container{Name: "main", Env: test.env}), resolved(nil))
		if got := p.Annotations[evenkeel.SkippedKey]; got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}

// TestExplainEnvFromSaysWhatShutsThePluginOut has pods as they are after injection.
func TestExplainEnvFromSaysWhatShutsThePluginOut(t *testing.T) {
	held := map[string]map[string]string{
		"nccl":   {"NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none", "EVENKEEL_FLOWS": "2", "HF_HOME": "/cache"},
		"ours":   {"NCCL_NET": "evenkeel", "NCCL_NET_PLUGIN": "/theirs/libnccl-net-evenkeel.so"},
		"suffix": {"NET": "gIB"},
	}
	none := func(*Resolved) {}
	for name, test := range map[string]struct {
		change func(*Resolved)
		from   []corev1.EnvFromSource
		env    []corev1.EnvVar
		want   []string
	}{
		"nothing": {none, nil, nil, nil},
		"both": {none, []corev1.EnvFromSource{configMap("nccl", "")}, nil, []string{
			"ConfigMap nccl sets EVENKEEL_FLOWS, NCCL_NET_PLUGIN, which stay", "NCCL_NET_PLUGIN=none of ConfigMap nccl keeps NCCL from loading the plugin",
			"NCCL_NET=Socket of ConfigMap nccl keeps NCCL from using the plugin",
		}},
		"by a prefix":       {none, []corev1.EnvFromSource{configMap("suffix", "NCCL_")}, nil, []string{"NCCL_NET=gIB of ConfigMap suffix keeps NCCL from using the plugin"}},
		"the plugin's own":  {none, []corev1.EnvFromSource{configMap("ours", "")}, nil, []string{"ConfigMap ours sets NCCL_NET_PLUGIN, which stay"}},
		"a later ConfigMap": {none, []corev1.EnvFromSource{configMap("suffix", "NCCL_"), configMap("ours", "")}, nil, []string{"ConfigMap ours sets NCCL_NET_PLUGIN, which stay"}},
		"env wins":          {none, []corev1.EnvFromSource{configMap("suffix", "NCCL_")}, []corev1.EnvVar{{Name: "NCCL_NET", Value: "Evenkeel"}}, nil},
		"a reference of its own": {none, nil, []corev1.EnvVar{{Name: "NCCL_NET_PLUGIN", ValueFrom: &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{
			LocalObjectReference: corev1.LocalObjectReference{Name: "nccl"}, Key: "NCCL_NET_PLUGIN"}}}}, []string{"NCCL_NET_PLUGIN=none of ConfigMap nccl keeps NCCL from loading the plugin"}},
		"a Secret": {none, []corev1.EnvFromSource{secret("nccl", "")}, nil, nil},
		"a plugin that is replaced": {func(r *Resolved) { r.Conflict = evenkeel.ConflictReplace }, []corev1.EnvFromSource{configMap("nccl", "")}, nil, []string{
			"ConfigMap nccl sets EVENKEEL_FLOWS, which stay", "ConfigMap nccl sets NCCL_NET_PLUGIN, which NetworkProfile default overrides",
			"NCCL_NET=Socket of ConfigMap nccl keeps NCCL from using the plugin",
		}},
		"a strict profile": {func(r *Resolved) { r.Environment[networkEnv] = networkName }, []corev1.EnvFromSource{configMap("suffix", "NCCL_")}, nil, []string{
			"ConfigMap suffix sets NCCL_NET, which stay", "NCCL_NET=gIB of ConfigMap suffix keeps NCCL from using the plugin",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			r := resolved(test.change)
			p := apply(t, pod(corev1.Container{Name: "main", EnvFrom: test.from, Env: test.env}), r)
			got := r.ExplainEnvFrom(&p.Spec.Containers[0], func(configMap string) map[string]string { return held[configMap] })
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
	companion := corev1.Container{Name: "log", EnvFrom: []corev1.EnvFromSource{configMap("nccl", "")}}
	if got := resolved(nil).ExplainEnvFrom(&companion, func(configMap string) map[string]string { return held[configMap] }); got != nil {
		t.Errorf("a container without the plugin: %v", got)
	}
}
