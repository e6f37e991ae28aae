package inject

import (
	"fmt"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// ownedVariables are those that envFrom does not set in containers of the profile: what it must not turn off.
func (r Resolved) ownedVariables() []string {
	switch {
	case r.Encrypted():
		return append([]string{pluginEnv}, encryptionVariables...)
	case r.Conflict == evenkeel.ConflictReplace:
		return []string{pluginEnv}
	}
	return nil
}

// addEnv appends a variable that the container does not set. The variables of a container win over those of envFrom, and what
// ConfigMaps and Secrets have is not known here: so references to their entries follow, which the kubelet skips where there is none.
func (t *target) addEnv(e corev1.EnvVar) {
	t.Env = append(t.Env, e)
	if !slices.Contains(t.owned, e.Name) {
		t.Env = append(t.Env, t.envFromVariables(e.Name)...)
	}
}

// envFromVariables are optional references to what the container's ConfigMaps and Secrets may have for a variable. The last one wins, as
// in envFrom.
func (t *target) envFromVariables(name string) []corev1.EnvVar {
	var all []corev1.EnvVar
	optional := true
	for _, from := range t.EnvFrom {
		key, has := strings.CutPrefix(name, from.Prefix)
		if !has || key == "" {
			continue
		}
		e := corev1.EnvVar{Name: name, ValueFrom: &corev1.EnvVarSource{}}
		switch {
		case from.ConfigMapRef != nil:
			e.ValueFrom.ConfigMapKeyRef = &corev1.ConfigMapKeySelector{LocalObjectReference: from.ConfigMapRef.LocalObjectReference, Key: key, Optional: &optional}
		case from.SecretRef != nil:
			e.ValueFrom.SecretKeyRef = &corev1.SecretKeySelector{LocalObjectReference: from.SecretRef.LocalObjectReference, Key: key, Optional: &optional}
		default:
			continue // the API server's validation reports it
		}
		all = append(all, e)
	}
	return all
}

func containsVariable(list []corev1.EnvVar, e corev1.EnvVar) bool {
	return slices.ContainsFunc(list, func(other corev1.EnvVar) bool { return equality.Semantic.DeepEqual(other, e) })
}

// ExplainEnvFrom says what the ConfigMaps of a container with the plugin do to the plugin and its settings. Entries returns what a
// ConfigMap has. Secrets are left alone: nobody has to know what is in them.
func (r Resolved) ExplainEnvFrom(c *corev1.Container, entries func(configMap string) map[string]string) []string {
	if !slices.ContainsFunc(c.Env, func(e corev1.EnvVar) bool { return e.Name == pluginEnv }) {
		return nil
	}
	t := &target{Container: c}
	var lines []string
	for i := range c.EnvFrom {
		from := &c.EnvFrom[i]
		if from.ConfigMapRef == nil {
			continue
		}
		var kept, overridden []string
		for key := range entries(from.ConfigMapRef.Name) {
			name := from.Prefix + key
			switch {
			case slices.ContainsFunc(t.envFromVariables(name), func(e corev1.EnvVar) bool { return containsVariable(c.Env, e) }):
				kept = append(kept, name)
			case slices.Contains(r.ownedVariables(), name):
				overridden = append(overridden, name)
			}
		}
		slices.Sort(kept)
		slices.Sort(overridden)
		if len(kept) > 0 {
			lines = append(lines, fmt.Sprintf("ConfigMap %s sets %s, which stay", from.ConfigMapRef.Name, strings.Join(kept, ", ")))
		}
		if len(overridden) > 0 {
			lines = append(lines, fmt.Sprintf("ConfigMap %s sets %s, which NetworkProfile %s overrides", from.ConfigMapRef.Name, strings.Join(overridden, ", "), r.Profile))
		}
	}
	if value, configMap := t.fromConfigMap(pluginEnv, entries); configMap != "" && value != shortName && path.Base(value) != Library {
		lines = append(lines, fmt.Sprintf("%s=%s of ConfigMap %s keeps NCCL from loading the plugin", pluginEnv, value, configMap))
	}
	if value, configMap := t.fromConfigMap(networkEnv, entries); configMap != "" && otherNetwork(value) {
		lines = append(lines, fmt.Sprintf("%s=%s of ConfigMap %s keeps NCCL from using the plugin", networkEnv, value, configMap))
	}
	return lines
}

// fromConfigMap returns the container's value of a variable, if it comes from a ConfigMap. An empty name: it comes from elsewhere.
func (t *target) fromConfigMap(variable string, entries func(configMap string) map[string]string) (value, configMap string) {
	from := func(name, key string) {
		if v, has := entries(name)[key]; has {
			value, configMap = v, name
		}
	}
	for i := range t.EnvFrom {
		if ref := t.EnvFrom[i].ConfigMapRef; ref != nil {
			if key, has := strings.CutPrefix(variable, t.EnvFrom[i].Prefix); has {
				from(ref.Name, key)
			}
		}
	}
	for _, e := range t.Env {
		switch {
		case e.Name != variable:
		case e.ValueFrom != nil && e.ValueFrom.ConfigMapKeyRef != nil:
			from(e.ValueFrom.ConfigMapKeyRef.Name, e.ValueFrom.ConfigMapKeyRef.Key)
		case e.ValueFrom != nil && e.ValueFrom.SecretKeyRef != nil: // perhaps there is no such entry
		default:
			value, configMap = "", ""
		}
	}
	return value, configMap
}
