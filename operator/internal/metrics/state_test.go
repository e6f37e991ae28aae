package metrics

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// collected returns the series for these objects, one line each.
func collected(t *testing.T, objects ...client.Object) []string {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, evenkeel.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(&StateCollector{fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).Build()})
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, family := range families {
		for _, metric := range family.GetMetric() {
			line := family.GetName()
			for _, label := range metric.GetLabel() {
				line += " " + label.GetValue()
			}
			lines = append(lines, fmt.Sprint(line, " = ", metric.GetGauge().GetValue()))
		}
	}
	return lines
}

func node(name string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("uid of " + name)}}
}

func state(name, owner string, health evenkeel.Health) *evenkeel.NodeNetworkHealth {
	speed := resource.MustParse("2G")
	return &evenkeel.NodeNetworkHealth{
		ObjectMeta: metav1.ObjectMeta{Name: name, OwnerReferences: []metav1.OwnerReference{{Kind: "Node", Name: name, UID: types.UID(owner)}}},
		Status:     evenkeel.NodeNetworkHealthStatus{Health: health, Reason: "TooSlow", BusBandwidth: &speed},
	}
}

func TestMetricsOfNodes(t *testing.T) {
	lines := collected(t, node("good"), node("bad"), node("new"), node("again"),
		state("good", "uid of good", evenkeel.HealthHealthy), state("bad", "uid of bad", evenkeel.HealthUnhealthy),
		// The node of that name was replaced or deleted.
		state("again", "uid of another", evenkeel.HealthUnhealthy), state("gone", "uid of gone", evenkeel.HealthUnhealthy))
	for _, want := range []string{
		"evenkeel_nodes Healthy = 1", "evenkeel_nodes Unhealthy = 1", "evenkeel_nodes Unknown = 2", "evenkeel_node_unhealthy bad TooSlow = 1",
		"evenkeel_node_bus_bandwidth_bytes_per_second good = 2e+09", "evenkeel_checks_running = 0",
	} {
		if !slices.Contains(lines, want) {
			t.Errorf("%q is missing in\n%s", want, strings.Join(lines, "\n"))
		}
	}
	if text := strings.Join(lines, "\n"); strings.Contains(text, " again ") || strings.Contains(text, " gone ") || strings.Count(text, "evenkeel_node_unhealthy") != 1 {
		t.Errorf("a node that is not there:\n%s", text)
	}
}

func TestMetricsOfFabrics(t *testing.T) {
	check := func(name string, minute int, fabrics ...evenkeel.FabricFinding) *evenkeel.NetworkCheck {
		c := &evenkeel.NetworkCheck{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: name}}
		if minute >= 0 {
			at := metav1.NewTime(time.Date(2026, 11, 21, 12, minute, 0, 0, time.UTC))
			c.Status.CompletionTime, c.Status.Fabrics = &at, fabrics
			c.Status.Conditions = []metav1.Condition{{Type: evenkeel.ConditionComplete, Status: metav1.ConditionTrue, Reason: "Ended", LastTransitionTime: at}}
		}
		return c
	}
	finding := func(v evenkeel.Verdict, pools ...string) evenkeel.FabricFinding {
		return evenkeel.FabricFinding{Pools: pools, Verdict: v, Reason: "R"}
	}
	lines := collected(t, check("running", -1), check("old", 1, finding("Fail", "a"), finding("Fail", "b")), check("new", 2, finding("Pass", "a"), finding("Inconclusive", "a"), finding("Pass", "c")))
	for _, want := range []string{
		"evenkeel_checks_running = 1",
		"evenkeel_fabric_verdict a Inconclusive = 1", "evenkeel_fabric_verdict a Pass = 0", "evenkeel_fabric_verdict a Fail = 0",
		"evenkeel_fabric_verdict b Fail = 1", "evenkeel_fabric_verdict c Pass = 1", "evenkeel_fabric_verdict * Inconclusive = 1",
	} {
		if !slices.Contains(lines, want) {
			t.Errorf("%q is missing in\n%s", want, strings.Join(lines, "\n"))
		}
	}
	// The plugin or the image is blamed: no pool is named.
	if lines := collected(t, check("whole", 1, finding("Fail"))); !slices.Contains(lines, "evenkeel_fabric_verdict * Fail = 1") {
		t.Errorf("%v", lines)
	}
}

// A policy that the controller has yet to count has no series: zeros would say that its nodes are proven.
func TestMetricsOfPolicies(t *testing.T) {
	policy := func(name string, counts ...int32) *evenkeel.NetworkCheckPolicy {
		p := &evenkeel.NetworkCheckPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if len(counts) > 0 {
			p.Status.Nodes, p.Status.Healthy, p.Status.Unhealthy, p.Status.Unknown = &counts[0], &counts[1], &counts[2], &counts[3]
		}
		return p
	}
	lines := collected(t, policy("gpu", 7, 4, 1, 2), policy("new"))
	for _, want := range []string{"evenkeel_policy_nodes Healthy gpu = 4", "evenkeel_policy_nodes Unhealthy gpu = 1", "evenkeel_policy_nodes Unknown gpu = 2"} {
		if !slices.Contains(lines, want) {
			t.Errorf("%q is missing in\n%s", want, strings.Join(lines, "\n"))
		}
	}
	if text := strings.Join(lines, "\n"); strings.Contains(text, " new ") {
		t.Errorf("a policy without a status:\n%s", text)
	}
	var many []client.Object
	for i := range maxPolicies + 5 {
		many = append(many, policy(fmt.Sprintf("policy-%03d", i), 1, 1, 0, 0))
	}
	if text := strings.Join(collected(t, many...), "\n"); strings.Count(text, "evenkeel_policy_nodes") != 3*maxPolicies {
		t.Errorf("series of %d policies, want %d", strings.Count(text, "evenkeel_policy_nodes")/3, maxPolicies)
	}
}

func TestMetricsAreBounded(t *testing.T) {
	var objects []client.Object
	var fabrics []evenkeel.FabricFinding
	for i := range 200 {
		fabrics = append(fabrics, evenkeel.FabricFinding{Pools: []string{fmt.Sprint("pool-", i)}, Verdict: "Pass", Reason: "R"})
	}
	at := metav1.NewTime(time.Unix(1, 0))
	c := &evenkeel.NetworkCheck{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "c"}}
	c.Status = evenkeel.NetworkCheckStatus{CompletionTime: &at, Fabrics: fabrics, Conditions: []metav1.Condition{{Type: evenkeel.ConditionComplete, Status: metav1.ConditionTrue, Reason: "Ended", LastTransitionTime: at}}}
	objects = append(objects, c)
	for i := range maxNodes + 10 {
		name := fmt.Sprintf("node-%05d", i)
		health := evenkeel.HealthHealthy
		if i == maxNodes+5 {
			health = evenkeel.HealthUnhealthy
		}
		objects = append(objects, node(name), state(name, "uid of "+name, health))
	}
	lines := collected(t, objects...)
	if text := strings.Join(lines, "\n"); strings.Count(text, "evenkeel_node_bus") != maxNodes || !strings.Contains(text, "evenkeel_node_unhealthy node-05005") || strings.Count(text, "evenkeel_fabric_verdict") != 3*maxPools {
		t.Errorf("%d lines", len(lines))
	}
}
