package metrics

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// Limits of what is reported by name: Kubernetes supports 5,000 nodes. Unhealthy ones come first.
const (
	maxNodes    = 5000
	maxPools    = 64
	maxPolicies = 64
	// everyPool stands for all pools of a check.
	everyPool = "*"
	// readTimeout bounds reading the cache.
	readTimeout = 5 * time.Second
)

var (
	nodesDesc     = prometheus.NewDesc("evenkeel_nodes", "Nodes of the cluster by the health of their network: Healthy, Unhealthy, Unknown.", []string{"health"}, nil)
	unhealthyDesc = prometheus.NewDesc("evenkeel_node_unhealthy", "1 for each node that failed a check and was not cleared since, with the reason.", []string{"node", "reason"}, nil)
	measuredDesc  = prometheus.NewDesc("evenkeel_node_bus_bandwidth_bytes_per_second", "The best bus bandwidth that the latest check with a verdict measured with the node.", []string{"node"}, nil)
	usualDesc     = prometheus.NewDesc("evenkeel_node_usual_bus_bandwidth_bytes_per_second", "The median over the node's latest checks that passed.", []string{"node"}, nil)
	checkedDesc   = prometheus.NewDesc("evenkeel_node_checked_timestamp_seconds", "Time of the last conclusive check of the node.", []string{"node"}, nil)
	policyDesc    = prometheus.NewDesc("evenkeel_policy_nodes", "Nodes of a NetworkCheckPolicy by the health of their network: Healthy, Unhealthy, Unknown. A verdict older than the policy's freshnessSeconds is Unknown.", []string{"policy", "health"}, nil)
	fabricDesc    = prometheus.NewDesc("evenkeel_fabric_verdict", "1 for the latest verdict on what connects the nodes of a pool (of the latest check as a whole: *), 0 for the other verdicts.", []string{"pool", "verdict"}, nil)
	runningDesc   = prometheus.NewDesc("evenkeel_checks_running", "NetworkChecks that have not ended.", nil, nil)
)

// StateCollector exports the state of nodes, policies and fabrics. Only the leader exports it, from its cache, when it is scraped. So it is
// correct after a restart, and deleted objects disappear.
type StateCollector struct{ reader client.Reader }

// SetupWithManager registers the collector while the manager leads. Other controllers watch the kinds that it reads.
func (s *StateCollector) SetupWithManager(mgr manager.Manager) error {
	s.reader = mgr.GetClient()
	return mgr.Add(manager.RunnableFunc(func(ctx context.Context) error {
		if err := metrics.Registry.Register(s); err != nil {
			return fmt.Errorf("metrics of the nodes: %w", err)
		}
		<-ctx.Done()
		metrics.Registry.Unregister(s)
		return nil
	}))
}

// Describe implements prometheus.Collector.
func (s *StateCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{nodesDesc, unhealthyDesc, measuredDesc, usualDesc, checkedDesc, policyDesc, fabricDesc, runningDesc} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (s *StateCollector) Collect(out chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), readTimeout)
	defer cancel()
	var nodes corev1.NodeList
	var healths evenkeel.NodeNetworkHealthList
	var checks evenkeel.NetworkCheckList
	var policies evenkeel.NetworkCheckPolicyList
	for _, list := range []client.ObjectList{&nodes, &healths, &checks, &policies} {
		// The objects are read only, so the cache need not copy them.
		if err := s.reader.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
			out <- prometheus.NewInvalidMetric(nodesDesc, fmt.Errorf("list %T: %w", list, err))
			return
		}
	}
	collectNodes(nodes.Items, healths.Items, out)
	collectPolicies(policies.Items, out)
	collectChecks(checks.Items, out)
}

func gauge(out chan<- prometheus.Metric, desc *prometheus.Desc, value float64, labels ...string) {
	out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
}

func collectNodes(nodes []corev1.Node, healths []evenkeel.NodeNetworkHealth, out chan<- prometheus.Metric) {
	uids := make(map[string]types.UID, len(nodes))
	for i := range nodes {
		uids[nodes[i].Name] = nodes[i].UID
	}
	known := make([]*evenkeel.NodeNetworkHealth, 0, len(healths))
	counts := map[evenkeel.Health]int{evenkeel.HealthHealthy: 0, evenkeel.HealthUnhealthy: 0}
	for i := range healths {
		h := &healths[i]
		// The health of an earlier node of the same name does not count.
		if uid, ok := uids[h.Name]; !ok || len(h.OwnerReferences) == 0 || h.OwnerReferences[0].UID != uid {
			continue
		}
		known = append(known, h)
		if h.Status.Health == evenkeel.HealthHealthy || h.Status.Health == evenkeel.HealthUnhealthy {
			counts[h.Status.Health]++
		}
	}
	counts[evenkeel.HealthUnknown] = len(nodes) - counts[evenkeel.HealthHealthy] - counts[evenkeel.HealthUnhealthy]
	for health, count := range counts {
		gauge(out, nodesDesc, float64(count), string(health))
	}
	good := func(h *evenkeel.NodeNetworkHealth) int {
		if h.Status.Health == evenkeel.HealthUnhealthy {
			return 0
		}
		return 1
	}
	slices.SortFunc(known, func(a, b *evenkeel.NodeNetworkHealth) int {
		return cmp.Or(cmp.Compare(good(a), good(b)), cmp.Compare(a.Name, b.Name))
	})
	for _, h := range known[:min(len(known), maxNodes)] {
		s := &h.Status
		if s.Health == evenkeel.HealthUnhealthy {
			gauge(out, unhealthyDesc, 1, h.Name, s.Reason)
		}
		if s.BusBandwidth != nil {
			gauge(out, measuredDesc, s.BusBandwidth.AsApproximateFloat64(), h.Name)
		}
		if s.Baseline.MedianBusBandwidth != nil {
			gauge(out, usualDesc, s.Baseline.MedianBusBandwidth.AsApproximateFloat64(), h.Name)
		}
		if s.ObservedTime != nil {
			gauge(out, checkedDesc, float64(s.ObservedTime.Unix()), h.Name)
		}
	}
}

func collectPolicies(policies []evenkeel.NetworkCheckPolicy, out chan<- prometheus.Metric) {
	counted := make([]*evenkeel.NetworkCheckPolicy, 0, len(policies))
	for i := range policies {
		if policies[i].Status.Nodes != nil { // the controller has seen it
			counted = append(counted, &policies[i])
		}
	}
	slices.SortFunc(counted, func(a, b *evenkeel.NetworkCheckPolicy) int { return cmp.Compare(a.Name, b.Name) })
	for _, p := range counted[:min(len(counted), maxPolicies)] {
		for health, count := range map[evenkeel.Health]*int32{
			evenkeel.HealthHealthy: p.Status.Healthy, evenkeel.HealthUnhealthy: p.Status.Unhealthy, evenkeel.HealthUnknown: p.Status.Unknown,
		} {
			if count != nil {
				gauge(out, policyDesc, float64(*count), p.Name, string(health))
			}
		}
	}
}

func collectChecks(checks []evenkeel.NetworkCheck, out chan<- prometheus.Metric) {
	running := 0
	type opinion struct {
		at      time.Time
		verdict evenkeel.Verdict
	}
	latest := map[string]opinion{}
	for i := range checks {
		s := &checks[i].Status
		if !meta.IsStatusConditionTrue(s.Conditions, evenkeel.ConditionComplete) {
			running++
			continue
		}
		if s.CompletionTime == nil {
			continue
		}
		for _, f := range s.Fabrics {
			for _, pool := range append(slices.Clone(f.Pools), everyPool) {
				o := opinion{s.CompletionTime.Time, f.Verdict}
				had, ok := latest[pool]
				// A check may have two verdicts on a pool: of the pairs, and of all nodes together. The worse one counts.
				if !ok || o.at.After(had.at) || o.at.Equal(had.at) && o.verdict.Worse(had.verdict) {
					latest[pool] = o
				}
			}
		}
	}
	gauge(out, runningDesc, float64(running))
	pools := make([]string, 0, len(latest))
	for pool := range latest {
		pools = append(pools, pool)
	}
	slices.SortFunc(pools, func(a, b string) int {
		return cmp.Or(evenkeel.WorstFirst(latest[a].verdict, latest[b].verdict), cmp.Compare(a, b))
	})
	for _, pool := range pools[:min(len(pools), maxPools)] {
		for _, v := range verdicts {
			value := 0.0
			if v == latest[pool].verdict {
				value = 1
			}
			gauge(out, fabricDesc, value, pool, string(v))
		}
	}
}

// verdicts, the worst first.
var verdicts = []evenkeel.Verdict{evenkeel.VerdictFail, evenkeel.VerdictInconclusive, evenkeel.VerdictPass}
