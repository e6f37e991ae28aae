package integration

import (
	"bufio"
	"context"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/test/apiserver"
)

// scrape returns what the program serves: lines such as name{label="value"} 1, by name.
func (p *program) scrape() (map[string][]string, error) {
	response, err := (&http.Client{Timeout: 5 * time.Second}).Get("http://" + p.metrics + "/metrics")
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("/metrics: %s", response.Status)
	}
	series := map[string][]string{}
	for lines := bufio.NewScanner(response.Body); lines.Scan(); {
		if line := lines.Text(); !strings.HasPrefix(line, "#") {
			name := line[:strings.IndexAny(line, "{ ")]
			series[name] = append(series[name], line)
		}
	}
	return series, nil
}

// Words of PromQL that are no metrics, where no parenthesis follows them.
var grammar = []string{"by", "without", "on", "ignoring", "and", "or", "unless", "group_left", "group_right", "offset", "bool"}

// asked are the metrics that a PromQL expression names.
func asked(expression string) []string {
	expression = regexp.MustCompile(`\{[^}]*\}|"[^"]*"|\[[^\]]*\]`).ReplaceAllString(expression, " ")
	expression = regexp.MustCompile(`\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)`).ReplaceAllString(expression, " ")
	var names []string
	for _, at := range regexp.MustCompile(`[a-zA-Z_:][a-zA-Z0-9_:]*`).FindAllStringIndex(expression, -1) {
		name := expression[at[0]:at[1]]
		if function := strings.HasPrefix(strings.TrimLeft(expression[at[1]:], " "), "("); !function && !slices.Contains(grammar, name) {
			names = append(names, name)
		}
	}
	return names
}

var (
	selector = regexp.MustCompile(`([a-zA-Z_:][a-zA-Z0-9_:]*)\{([^}]*)\}`)
	matcher  = regexp.MustCompile(`(\w+)(=~|=)"([^"]*)"`)
)

// unmatched are the selectors of a PromQL expression that select none of the series.
func unmatched(expression string, served map[string][]string) []string {
	var vain []string
	for _, s := range selector.FindAllStringSubmatch(expression, -1) {
		matchers := matcher.FindAllStringSubmatch(s[2], -1)
		matches := func(line string) bool {
			for _, m := range matchers {
				value := regexp.QuoteMeta(m[3])
				if m[2] == "=~" {
					value = "(" + m[3] + ")"
				}
				if !regexp.MustCompile(`[{,]` + m[1] + `="` + value + `"[,}]`).MatchString(line) {
					return false
				}
			}
			return true
		}
		if len(matchers) == 0 || !slices.ContainsFunc(served[s[1]], matches) {
			vain = append(vain, s[0])
		}
	}
	return vain
}

func TestMetricsSelectors(t *testing.T) {
	served := map[string][]string{"a": {`a{pool="*",verdict="Fail"} 1`, `a{pool="h100",verdict="Pass"} 0`}}
	for expression, want := range map[string][]string{
		`a{pool="*",verdict="Fail"} == 1`:             nil,
		`sum(rate(a{verdict=~"Fail|Pass"}[5m]))`:      nil,
		`a{pool="*",verdict="Pass"} / a{pool="gone"}`: {`a{pool="*",verdict="Pass"}`, `a{pool="gone"}`},
		`b{pool="*"}`: {`b{pool="*"}`},
	} {
		if got := unmatched(expression, served); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", expression, got, want)
		}
	}
}

// alertExpressions are those of the chart's alerts, by name.
func alertExpressions(t *testing.T, root string) map[string]string {
	t.Helper()
	objects, err := apiserver.Chart(root, systemNamespace, "--set", "metrics.prometheusRule.enabled=true")
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for _, object := range objects {
		if object.GetKind() != "PrometheusRule" {
			continue
		}
		groups, _, _ := unstructured.NestedSlice(object.Object, "spec", "groups")
		for _, group := range groups {
			rules, _, _ := unstructured.NestedSlice(group.(map[string]any), "rules")
			for _, rule := range rules {
				name, _, _ := unstructured.NestedString(rule.(map[string]any), "alert")
				all[name], _, _ = unstructured.NestedString(rule.(map[string]any), "expr")
			}
		}
	}
	if len(all) == 0 {
		t.Fatal("the chart has no alerts")
	}
	return all
}

func TestMetricsPromQLParser(t *testing.T) {
	for expression, want := range map[string][]string{
		`histogram_quantile(0.9, sum by (le) (rate(a_bucket{x="b_c"}[5m])))`: {"a_bucket"},
		`bottomk(10, a / on (node) group_left (x) b) > bool 0`:               {"a", "b"},
		`time() - a_seconds == 1`:                                            {"a_seconds"},
	} {
		if got := asked(expression); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", expression, got, want)
		}
	}
}

// The dashboard's queries, the alerts and the manual name metrics that the programs serve; and the manual names all of ours.
func TestMetricsInDashboardAndDocs(t *testing.T) {
	root, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(root, "charts", "evenkeel", "files", "dashboards", "preflight.json"))
	if err != nil {
		t.Fatal(err)
	}
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(text, &dashboard); err != nil {
		t.Fatal(err)
	}
	manual, err := os.ReadFile(filepath.Join(root, "docs", "operate.md"))
	if err != nil {
		t.Fatal(err)
	}

	// A node that failed after it had passed, and a check that said so.
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "metered"}}
	if err := admin.Create(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	remove(t, node)
	now := metav1.NewTime(time.Now().Truncate(time.Second))
	slow, usual := resource.MustParse("100M"), resource.MustParse("1G")
	state := &evenkeel.NodeNetworkHealth{ObjectMeta: metav1.ObjectMeta{Name: node.Name, OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID}}}}
	if err := admin.Create(t.Context(), state); err != nil {
		t.Fatal(err)
	}
	remove(t, state)
	state.Status = evenkeel.NodeNetworkHealthStatus{Health: evenkeel.HealthUnhealthy, Reason: "TooSlow", BusBandwidth: &slow, ObservedTime: &now, Baseline: evenkeel.Baseline{MedianBusBandwidth: &usual}}
	if err := admin.Status().Update(t.Context(), state); err != nil {
		t.Fatal(err)
	}
	check := newCheck(nil)
	if err := admin.Create(t.Context(), check); err != nil {
		t.Fatal(err)
	}
	remove(t, check)
	eventually(t, "the controller has refused the check", func(context.Context) (bool, error) {
		err := admin.Get(t.Context(), client.ObjectKeyFromObject(check), check)
		return meta.IsStatusConditionTrue(check.Status.Conditions, evenkeel.ConditionComplete), err
	})
	check.Status.Fabrics = []evenkeel.FabricFinding{{Pools: []string{"h100"}, Verdict: evenkeel.VerdictFail, Reason: "NoPairPassed"}}
	if err := admin.Status().Update(t.Context(), check); err != nil {
		t.Fatal(err)
	}

	// A job that waits: no check can be run, and its policy lets none start without.
	_, pool, ns := newGate(t, "metered", waitRegardless)
	createJob(t, heldJob(t, "Job", ns, pool))

	wanted := []string{
		`evenkeel_gated_jobs{controller="jobgate-suspend"} `, `evenkeel_gated_job_oldest_timestamp_seconds{controller="jobgate-suspend"} `,
		`evenkeel_policy_nodes{health="Unknown",policy="metered"} 2`,
		`evenkeel_node_unhealthy{node="metered",reason="TooSlow"} 1`, `evenkeel_node_bus_bandwidth_bytes_per_second{node="metered"} 1e+08`, `evenkeel_node_usual_bus_bandwidth_bytes_per_second{node="metered"} 1e+09`,
		`evenkeel_fabric_verdict{pool="h100",verdict="Fail"} 1`, `evenkeel_fabric_verdict{pool="*",verdict="Fail"} 1`, `evenkeel_fabric_verdict{pool="h100",verdict="Pass"} 0`,
		`evenkeel_nodes{health="Unhealthy"} 1`, `evenkeel_checks_total{verdict="Inconclusive"} `,
	}
	var served map[string][]string
	eventually(t, "the controller serves what is known", func(context.Context) (bool, error) {
		var err error
		if served, err = install.controller.scrape(); err != nil {
			return false, err
		}
		return !slices.ContainsFunc(wanted, func(line string) bool {
			return !slices.ContainsFunc(slices.Concat(slices.Collect(maps.Values(served))...), func(s string) bool { return strings.HasPrefix(s, line) })
		}), nil
	})

	for _, panel := range dashboard.Panels {
		for _, target := range panel.Targets {
			names := asked(target.Expr)
			if len(names) == 0 {
				t.Errorf("panel %q asks for nothing: %s", panel.Title, target.Expr)
			}
			for _, name := range names {
				if served[name] == nil {
					t.Errorf("panel %q asks for %s, which nobody serves: %s", panel.Title, name, target.Expr)
				}
			}
		}
	}
	webhook, err := install.webhook.scrape()
	if err != nil {
		t.Fatal(err)
	}
	for name, lines := range webhook {
		served[name] = append(served[name], lines...)
	}
	for alert, expression := range alertExpressions(t, root) {
		names := asked(expression)
		if len(names) == 0 {
			t.Errorf("alert %s asks for nothing: %s", alert, expression)
		}
		for _, name := range names {
			if served[name] == nil {
				t.Errorf("alert %s asks for %s, which nobody serves: %s", alert, name, expression)
			}
		}
		if vain := unmatched(expression, served); len(vain) > 0 {
			t.Errorf("alert %s asks for series that nobody serves: %q", alert, vain)
		}
	}
	for name := range served {
		base := strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(name, "_bucket"), "_sum"), "_count")
		if strings.HasPrefix(name, "evenkeel_") && !strings.Contains(string(manual), "`"+base+"`") {
			t.Errorf("docs/operate.md does not name %s", base)
		}
	}
}

// The metric follows the certificate that is served, whoever made it.
func TestMetricsOfWebhookCertificate(t *testing.T) {
	expires := func() string {
		certificate, err := x509.ParseCertificate(served(t, install.port))
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprintf("evenkeel_webhook_certificate_expiry_timestamp_seconds %v", float64(certificate.NotAfter.Unix()))
	}
	eventually(t, "the webhook says when its certificate expires", func(context.Context) (bool, error) {
		series, err := install.webhook.scrape()
		return slices.Contains(series["evenkeel_webhook_certificate_expiry_timestamp_seconds"], expires()), err
	})
}

func TestMetricsOfWebhook(t *testing.T) {
	count := func() map[string]string {
		t.Helper()
		served, err := install.webhook.scrape()
		if err != nil {
			t.Fatal(err)
		}
		counts := map[string]string{}
		for _, line := range slices.Concat(served["evenkeel_pods_total"], served["evenkeel_jobs_total"]) {
			name, value, _ := strings.Cut(line, " ")
			counts[name] = value
		}
		return counts
	}
	ns := newNamespace(t, nil)
	before := count()
	createPod(t, labelledPod(ns))
	job, _ := newJob("PyTorchJob", ns, "default")
	if err := admin.Create(t.Context(), job); err != nil {
		t.Fatal(err)
	}
	bad, _ := newJob("PyTorchJob", ns, "missing")
	refused(t, admin.Create(t.Context(), bad), "missing")
	after := count()
	for _, name := range []string{`evenkeel_pods_total{result="injected"}`, `evenkeel_jobs_total{result="injected"}`, `evenkeel_jobs_total{result="refused"}`} {
		if before[name] == after[name] || before[name] == "" {
			t.Errorf("%s was %q and is %q", name, before[name], after[name])
		}
	}
}
