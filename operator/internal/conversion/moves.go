package conversion

import (
	"slices"
	"strings"
)

// A move says where a value is in both versions, and how it differs. No move reads what another one writes.
type move struct {
	alpha, beta path
	// toBeta and toAlpha change the value; nil: it is the same.
	toBeta, toAlpha func(any) any
}

// kinds has the differences of each kind with both versions. All else is the same in both.
var kinds = map[string][]move{
	"NetworkProfile": at("spec",
		rename("environment", "env"),
		secrets("imagePullSecrets"),
		replace(rename("plugin.strict", "plugin.unavailablePolicy"), true, "Fail", false, "Fallback"),
		off("transport.encryption"),
		rename("transport.rdma.network", "transport.rdma.networkTrust"),
		rename("transport.rdma.networks", "transport.rdma.additionalNetworks"),
		off("reduction.mode"),
		rename("reduction.server.memory", "reduction.server.bufferMemory"),
	),
	"NetworkCheck": at("spec", checkOptions()...),
	"NetworkCheckPolicy": at("spec", slices.Concat(at("check", checkOptions()...), []move{
		rename("onFail.maxUnhealthyPercent", "maxUnhealthyPercent"),
		rename("history", "historyLimit"),
	})...),
}

// checkOptions are those of the options that checks and policies have in common.
func checkOptions() []move {
	return []move{
		rename("rails", "railsPerNode"),
		rename("runner.environment", "runner.env"),
		rename("runner.podLabels", "runner.podTemplate.metadata.labels"),
		rename("runner.podAnnotations", "runner.podTemplate.metadata.annotations"),
		rename("runner.tolerations", "runner.podTemplate.spec.tolerations"),
		rename("runner.imagePullSecrets", "runner.podTemplate.spec.imagePullSecrets"),
		rename("runner.runtimeClassName", "runner.podTemplate.spec.runtimeClassName"),
		rename("runner.supplementalGroups", "runner.podTemplate.spec.securityContext.supplementalGroups"),
	}
}

// rename is a move of a value that stays the same. Paths have dots.
func rename(alpha, beta string) move {
	return move{alpha: strings.Split(alpha, "."), beta: strings.Split(beta, ".")}
}

// off is an enumeration whose Off is Disabled in v1beta1, since YAML 1.1 takes an unquoted Off for false.
func off(field string) move { return replace(rename(field, field), "Off", "Disabled") }

// replace adds pairs of values, of v1alpha1 and v1beta1, to a move. Other values stay.
func replace(m move, pairs ...any) move {
	change := func(from, to int) func(any) any {
		return func(value any) any {
			for i := 0; i < len(pairs); i += 2 {
				if pairs[i+from] == value {
					return pairs[i+to]
				}
			}
			return value
		}
	}
	m.toBeta, m.toAlpha = change(0, 1), change(1, 0)
	return m
}

// secrets is a list of Secrets' names, which has objects in v1beta1, as in a pod.
func secrets(field string) move {
	const key = "name"
	m := rename(field, field)
	m.toBeta = each(func(item any) any {
		if name, is := item.(string); is {
			return map[string]any{key: name}
		}
		return item
	})
	m.toAlpha = each(func(item any) any {
		if object, is := item.(map[string]any); is && len(object) == 1 {
			if name, is := object[key].(string); is {
				return name
			}
		}
		return item
	})
	return m
}

// each changes every item of a list.
func each(change func(any) any) func(any) any {
	return func(value any) any {
		list, isList := value.([]any)
		if !isList {
			return value
		}
		changed := make([]any, len(list))
		for i, item := range list {
			changed[i] = change(item)
		}
		return changed
	}
}
