package networkcheck

import (
	"context"
	"encoding/json"
	"fmt"
	"hash/fnv"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/preflight"
	"evenkeel.dev/evenkeel/operator/internal/preflight/health"
	"evenkeel.dev/evenkeel/operator/internal/preflight/jobs"
	"evenkeel.dev/evenkeel/operator/internal/preflight/pairing"
)

// describePools summarizes what is known of the pools of a check's nodes: whether they have other nodes under the same
// policies that pods can run on, used ones too, and what bandwidth other nodes reached.
func (c *Reconciler) describePools(ctx context.Context, check *jobs.Check, record *preflight.Record) (map[string]preflight.Pool, error) {
	var nodes corev1.NodeList
	var healths evenkeel.NodeNetworkHealthList
	var policies evenkeel.NetworkCheckPolicyList
	for _, list := range []client.ObjectList{&nodes, &healths, &policies} {
		if err := c.client.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
			return nil, fmt.Errorf("list %T: %w", list, err)
		}
	}
	type kind struct{ pool, policy string }
	under := health.PolicyByNode(nodes.Items, policies.Items)
	kindOf := func(pool, node string) kind {
		if p := under[node]; p != nil {
			return kind{pool, p.Name}
		}
		return kind{pool, ""}
	}
	in, kinds := map[string]bool{}, map[kind]bool{}
	for _, n := range record.Nodes {
		in[n.Name], kinds[kindOf(n.Pool, n.Name)] = true, true
	}
	pools, others := map[string]preflight.Pool{}, map[string]string{}
	tolerations := jobs.Tolerations(check.Options.Runner.Tolerations)
	for i := range nodes.Items {
		node := &nodes.Items[i]
		pool := node.Labels[check.Options.PoolLabel]
		if in[node.Name] {
			continue
		}
		others[node.Name] = pool
		if why, _ := preflight.Unschedulable(node, tolerations); why == "" && kinds[kindOf(pool, node.Name)] {
			pools[pool] = preflight.Pool{Partial: true}
		}
	}
	benchmark, reached := BenchmarkOf(check.Object, record), map[string][]float64{}
	for i := range healths.Items {
		h := &healths.Items[i]
		pool, other := others[h.Name]
		if !other || h.Status.Health != evenkeel.HealthHealthy {
			continue
		}
		for _, r := range h.Status.History {
			if r.Verdict == evenkeel.VerdictPass && r.Benchmark == benchmark && r.BusBandwidth != nil {
				reached[pool] = append(reached[pool], r.BusBandwidth.AsApproximateFloat64()/1e9)
				break
			}
		}
	}
	for name, pool := range pools {
		pool.UsualBusBW = pairing.Median(reached[name])
		pools[name] = pool
	}
	return pools, nil
}

// BenchmarkOf identifies what a check measures: the bandwidths of checks with the same benchmark can be compared.
func BenchmarkOf(object *evenkeel.NetworkCheck, record *preflight.Record) string {
	spec := object.Spec.WithDefaults()
	runner := spec.Runner
	record.SetRunner(&runner)
	runner.Tolerations = nil
	hash := fnv.New64a()
	// Neither the encoding of the API's types nor a hash ever fails.
	_ = json.NewEncoder(hash).Encode([]any{runner, spec.Sweep, spec.ProfileName, record.Plugin, record.Launcher, record.Transport})
	return fmt.Sprintf("%016x", hash.Sum64())
}
