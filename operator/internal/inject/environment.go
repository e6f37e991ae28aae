package inject

import (
	"fmt"
	"slices"
	"strings"

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

// PluginUnused is what the pod's annotation evenkeel.dev/skipped says of containers whose NCCL_NET names another network.
const PluginUnused = "NCCL does not use the plugin"

// addEnvironment sets the profile's variables and the node's name. Variables that the container sets itself stay, and it says so where
// NCCL then does not use the plugin.
func addEnvironment(in *injection) error {
	r := in.resolved
	for _, t := range in.targets {
		if t.excluded {
			continue
		}
		setsNetwork, others := t.network()
		for _, name := range r.Variables() {
			if t.hasJobKey && slices.Contains(keyVariables, name) || t.usesServers && name == serversEnv {
				continue // the job's own value, which its servers share
			}
			if name == networkEnv && r.Environment[name] == networkName && !t.usesPlugin {
				continue // it has another plugin, and NCCL would find no network
			}
			if name == networkEnv && t.usesPlugin && setsNetwork {
				continue // what follows says more
			}
			t.setEnv(name, r.Environment[name], false)
		}
		if t.usesPlugin {
			t.skipped = append(t.skipped, others...)
		}
		if !slices.ContainsFunc(t.Env, func(e corev1.EnvVar) bool { return e.Name == nodeEnv }) {
			node := &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "spec.nodeName"}}
			t.addEnv(corev1.EnvVar{Name: nodeEnv, ValueFrom: node})
		}
	}
	return nil
}

// network reports whether the container sets NCCL_NET, and says of values that keep NCCL from using the plugin that they do.
func (t *target) network() (sets bool, others []string) {
	for _, e := range t.Env {
		if e.Name != networkEnv {
			continue
		}
		sets = true
		switch {
		case e.ValueFrom != nil:
			others = append(others, fmt.Sprintf("container %s: takes %s from elsewhere: unless it is %s, %s", t.Name, networkEnv, networkName, PluginUnused))
		case otherNetwork(e.Value):
			others = append(others, fmt.Sprintf("container %s: sets %s itself, so %s", t.Name, networkEnv, PluginUnused))
		}
	}
	return sets, others
}

// otherNetwork reports whether NCCL does not use the plugin with this value of NCCL_NET. NCCL compares without regard to case.
func otherNetwork(value string) bool { return value != "" && !strings.EqualFold(value, networkName) }

// has reports whether the container sets the variable to the value.
func (t *target) has(name, value string) bool {
	return slices.Contains(t.Env, corev1.EnvVar{Name: name, Value: value})
}

// setEnv sets a variable, unless the container sets it to something else and replace is false.
func (t *target) setEnv(name, value string, replace bool) {
	at := slices.IndexFunc(t.Env, func(e corev1.EnvVar) bool { return e.Name == name })
	switch {
	case at < 0:
		t.addEnv(corev1.EnvVar{Name: name, Value: value})
	case t.Env[at].ValueFrom == nil && t.Env[at].Value == value:
	case replace:
		t.Env[at] = corev1.EnvVar{Name: name, Value: value}
	default:
		t.skip("sets %s itself", name)
	}
}
