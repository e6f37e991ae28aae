package inject

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
)

const (
	pluginEnv = "NCCL_NET_PLUGIN"
	// refCountEnv keeps NCCL from unloading the plugin when a process's last communicator is destroyed. NCCL 2.28 and 2.29 forget
	// the plugin's name then, and use their own sockets for every later communicator. In other versions it changes nothing.
	refCountEnv = "NCCL_NET_PLUGIN_REF_COUNT"
	// networkEnv names the only network that NCCL may use. Without it, it is an error.
	networkEnv = "NCCL_NET"
	// networkName is the plugin's own name for itself, which NCCL compares with networkEnv.
	networkName = "Evenkeel"
	collNetEnv  = "NCCL_COLLNET_ENABLE"
	// nodeEnv is the node's name, so that what is said about a slow job names nodes and not pods.
	nodeEnv = "EVENKEEL_NODE"
)

// addEnvironment sets the profile's variables and the node's name. Variables that the container sets itself stay.
func addEnvironment(in *injection) error {
	r := in.resolved
	for _, t := range in.targets {
		if t.excluded {
			continue
		}
		for _, name := range r.Variables() {
			if t.hasJobKey && slices.Contains(keyVariables, name) || t.usesServers && name == serversEnv {
				continue // the job's own value, which its servers share
			}
			if name == networkEnv && r.Environment[name] == networkName && !t.usesPlugin {
				continue // it has another plugin, and NCCL would find no network
			}
			t.setEnv(name, r.Environment[name], false)
		}
		if !slices.ContainsFunc(t.Env, func(e corev1.EnvVar) bool { return e.Name == nodeEnv }) {
			node := &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "spec.nodeName"}}
			t.Env = append(t.Env, corev1.EnvVar{Name: nodeEnv, ValueFrom: node})
		}
	}
	return nil
}

// has reports whether the container sets the variable to the value.
func (t *target) has(name, value string) bool {
	return slices.Contains(t.Env, corev1.EnvVar{Name: name, Value: value})
}

// setEnv sets a variable, unless the container sets it to something else and replace is false.
func (t *target) setEnv(name, value string, replace bool) {
	at := slices.IndexFunc(t.Env, func(e corev1.EnvVar) bool { return e.Name == name })
	switch {
	case at < 0:
		t.Env = append(t.Env, corev1.EnvVar{Name: name, Value: value})
	case t.Env[at].ValueFrom == nil && t.Env[at].Value == value:
	case replace:
		t.Env[at] = corev1.EnvVar{Name: name, Value: value}
	default:
		t.skip("sets %s itself", name)
	}
}
