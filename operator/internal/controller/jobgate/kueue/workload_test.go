package kueue

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/yaml"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/preflight/gate"
)

func parse(t *testing.T, text string) *unstructured.Unstructured {
	t.Helper()
	u := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(text), &u.Object); err != nil {
		t.Fatal(err)
	}
	return u
}

func TestKueueCheckActive(t *testing.T) {
	policies := []evenkeel.NetworkCheckPolicy{{ObjectMeta: metav1.ObjectMeta{Name: "nightly"}}}
	for text, want := range map[string]string{
		`{spec: {controllerName: evenkeel.dev/preflight, parameters: {apiGroup: evenkeel.dev, kind: NetworkCheckPolicy, name: nightly}}}`: "Active",
		`{spec: {controllerName: evenkeel.dev/preflight, parameters: {apiGroup: evenkeel.dev, kind: NetworkCheckPolicy, name: weekly}}}`:  "NoPolicy",
		`{spec: {controllerName: evenkeel.dev/preflight, parameters: {apiGroup: evenkeel.dev, kind: NetworkProfile, name: nightly}}}`:     "BadParameters",
		`{spec: {controllerName: evenkeel.dev/preflight}}`: "BadParameters",
	} {
		check := parse(t, text)
		if c := activeCondition(check, policies); c.Reason != want || (c.Status == metav1.ConditionTrue) != (want != "BadParameters") {
			t.Errorf("%s: %+v", text, c)
		}
		if _, _, ours := parseParameters(check); !ours {
			t.Errorf("%s is ours", text)
		}
	}
	for _, text := range []string{`{spec: {controllerName: example.com/other}}`, `{}`, `{spec: 7}`} {
		if _, _, ours := parseParameters(parse(t, text)); ours {
			t.Errorf("%s is not ours", text)
		}
	}
}

const reserved = `{kind: Workload, metadata: {name: w, uid: u}, spec: {podSets: [{name: main, template: {spec: {nodeSelector: {a: b}, containers: [{name: c}]}}}]}, status: {
  conditions: [{type: QuotaReserved, status: "True", lastTransitionTime: "2026-11-21T12:00:00Z"}],
  admissionChecks: [{name: network, state: Pending}, {name: network-too, state: Ready}, {name: other, state: Pending}],
  admission: {podSetAssignments: [{name: main, flavors: {cpu: h100}}]}}}`

var ours = map[string]string{"network": "nightly", "network-too": "nightly"}

func TestKueuePendingChecks(t *testing.T) {
	list, err := pendingChecks(parse(t, reserved), ours)
	if err != nil || len(list) != 1 || list[0].check != "network" || list[0].policy != "nightly" || !list[0].since.Equal(time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)) {
		t.Errorf("%+v %v", list, err)
	}
	for name, change := range map[string]string{
		"no quota":            `QuotaReserved, status: "True"|QuotaReserved, status: "False"`,
		"finished":            `conditions: [|conditions: [{type: Finished, status: "True"}, `,
		"evicted":             `conditions: [|conditions: [{type: Evicted, status: "True"}, `,
		"not active":          `spec: {podSets|spec: {active: false, podSets`,
		"answered":            `network, state: Pending|network, state: Ready`,
		"no admission so far": `admission:|another:`,
		"going":               `metadata: {|metadata: {deletionTimestamp: "2026-11-21T12:00:00Z", `,
	} {
		from, to, _ := strings.Cut(change, "|")
		if list, err := pendingChecks(parse(t, strings.Replace(reserved, from, to, 1)), ours); err != nil || len(list) != 0 {
			t.Errorf("%s: %+v %v", name, list, err)
		}
	}
	if _, err := pendingChecks(parse(t, strings.Replace(reserved, "conditions: [", "conditions: 7, x: [", 1)), ours); err == nil {
		t.Error("conditions that are none are no error")
	}
}

func TestKueueProvisioningChecks(t *testing.T) {
	for text, want := range map[string]bool{
		`{spec: {controllerName: kueue.x-k8s.io/provisioning-request, parameters: {apiGroup: kueue.x-k8s.io, kind: ProvisioningRequestConfig, name: c}}}`: true,
		`{spec: {controllerName: evenkeel.dev/preflight}}`: false,
		`{spec: 7}`: false,
	} {
		if is := isOf(parse(t, text), provisioningController); is != want {
			t.Errorf("%s: %t", text, is)
		}
	}
	ready := time.Date(2026, 11, 21, 13, 0, 0, 0, time.UTC)
	provisioning := map[string]bool{"other": true}
	for name, test := range map[string]struct {
		other    string
		waitsFor string
		at       time.Time
	}{
		"no nodes yet":   {`state: Pending`, "other", time.Time{}},
		"asks again":     {`state: Retry`, "other", time.Time{}},
		"nodes are here": {`state: Ready, lastTransitionTime: "2026-11-21T13:00:00Z"`, "", ready},
	} {
		list, err := pendingChecks(parse(t, strings.Replace(reserved, "{name: other, state: Pending}", "{name: other, "+test.other+"}", 1)), ours)
		if err != nil || len(list) != 1 {
			t.Fatalf("%s: %+v %v", name, list, err)
		}
		if waitsFor, at := list[0].provisioned(provisioning); waitsFor != test.waitsFor || !at.Equal(test.at) {
			t.Errorf("%s: waits for %q, provisioned %s", name, waitsFor, at)
		}
		if waitsFor, at := list[0].provisioned(nil); waitsFor != "" || !at.IsZero() {
			t.Errorf("%s, and the check is not about nodes: waits for %q, provisioned %s", name, waitsFor, at)
		}
	}
}

func TestKueueWorkloadToGateJob(t *testing.T) {
	flavors := []unstructured.Unstructured{
		*parse(t, `{metadata: {name: h100}, spec: {nodeLabels: {pool: h100}, tolerations: [{key: gpu, operator: Exists}]}}`),
		*parse(t, `{metadata: {name: cpu}, spec: {nodeLabels: {pool: cpu}}}`),
	}
	for name, test := range map[string]struct {
		assignment string
		hosts      []string
		selectors  []map[string]string
		problem    string
	}{
		"flavor": {`{}`, nil, []map[string]string{{"a": "b", "pool": "h100"}}, ""},
		"hosts, v1beta1": {
			`topologyAssignment: {levels: [rack, kubernetes.io/hostname], domains: [{values: [r1, n1], count: 1}, {values: [r1, n2], count: 1}]}`,
			[]string{"n1", "n2"}, nil, "",
		},
		"hosts, v1beta2": {
			`topologyAssignment: {levels: [kubernetes.io/hostname], slices: [{domainCount: 2, podCounts: {universal: 1}, valuesPerLevel: [{individual: {prefix: gpu-, suffix: .x, roots: ["1", "2"]}}]}, {domainCount: 1, podCounts: {universal: 1}, valuesPerLevel: [{universal: n9}]}]}`,
			[]string{"gpu-1.x", "gpu-2.x", "n9"}, nil, "",
		},
		"racks": {
			`topologyAssignment: {levels: [block, rack], slices: [{domainCount: 2, podCounts: {universal: 1}, valuesPerLevel: [{universal: b1}, {individual: {roots: [r1, r2]}}]}]}`,
			nil, []map[string]string{{"a": "b", "pool": "h100", "block": "b1", "rack": "r1"}, {"a": "b", "pool": "h100", "block": "b1", "rack": "r2"}}, "",
		},
		"to be chosen":               {`delayedTopologyRequest: Pending`, nil, []map[string]string{{"a": "b", "pool": "h100"}}, ""},
		"fewer values than domains":  {`topologyAssignment: {levels: [rack], slices: [{domainCount: 2, valuesPerLevel: [{individual: {roots: [r1]}}]}]}`, nil, nil, "topology assignment"},
		"more levels than values":    {`topologyAssignment: {levels: [rack, host], domains: [{values: [r1]}]}`, nil, nil, "topology assignment"},
		"a topology that is not one": {`topologyAssignment: {levels: [], domains: [{values: []}]}`, nil, nil, "topology assignment"},
	} {
		t.Run(name, func(t *testing.T) {
			list, err := pendingChecks(parse(t, strings.Replace(reserved, "flavors: {cpu: h100}", "flavors: {cpu: h100}, "+strings.TrimPrefix(test.assignment, "{}"), 1)), ours)
			if err != nil || len(list) != 1 {
				t.Fatalf("%+v %v", list, err)
			}
			job, err := list[0].job(flavors)
			if test.problem != "" {
				if err == nil || !strings.Contains(err.Error(), test.problem) {
					t.Errorf("%v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var selectors []map[string]string
			for _, spec := range job.Pods {
				selectors = append(selectors, spec.NodeSelector)
				if len(spec.Tolerations) != 1 {
					t.Errorf("tolerations %+v", spec.Tolerations)
				}
			}
			if diff := cmp.Diff(test.selectors, selectors); diff != "" {
				t.Error(diff)
			}
			if diff := cmp.Diff(test.hosts, job.Hosts); diff != "" {
				t.Error(diff)
			}
			if job.Policy != "nightly" {
				t.Errorf("policy %q", job.Policy)
			}
		})
	}
}

func TestKueueCountsPodsOfPartialAdmission(t *testing.T) {
	flavors := []unstructured.Unstructured{*parse(t, `{metadata: {name: h100}}`)}
	for name, test := range map[string]struct {
		assignment string
		want       int
	}{
		"all pods":      {`count: 2`, 2},
		"fewer":         {`count: 1`, 1},
		"none is named": {`resourceUsage: {}`, 2},
	} {
		list, err := pendingChecks(parse(t, strings.NewReplacer("name: main, template", "name: main, count: 2, template", "flavors: {", test.assignment+", flavors: {").Replace(reserved)), ours)
		if err != nil || len(list) != 1 {
			t.Fatalf("%s: %+v %v", name, list, err)
		}
		job, err := list[0].job(flavors)
		if err != nil || len(job.Pods) != 1 {
			t.Fatalf("%s: %+v %v", name, job, err)
		}
		if got := job.Count(job.Pods[0]); got != test.want {
			t.Errorf("%s: waits for nodes of %d pods, want %d", name, got, test.want)
		}
	}
}

func TestKueueStateForDecision(t *testing.T) {
	for _, test := range []struct {
		action  gate.Action
		overdue bool
		retried int
		state   string
		after   time.Duration
	}{
		{gate.Open, false, 0, stateReady, 0},
		{gate.OpenUnproven, false, 7, stateReady, 0},
		{gate.Check, false, 7, statePending, 0},
		{gate.Wait, false, 0, statePending, 0},
		{gate.Check, true, 0, stateRetry, 0}, // Kueue would keep the quota meanwhile
		{gate.Wait, true, 3, stateRetry, 0},
		{gate.Reassign, false, 0, stateRetry, time.Minute},
		{gate.Reassign, false, 4, stateRetry, 16 * time.Minute},
		{gate.Reassign, false, 1 << 40, stateRetry, 30 * time.Minute},
	} {
		if state, after := stateFor(gate.Decision{Action: test.action, Overdue: test.overdue}, test.retried); state != test.state || after != test.after {
			t.Errorf("%+v: %s after %s", test, state, after)
		}
	}
}

// Events may be kept elsewhere, or denied in a namespace: the workload gets its answer all the same. A message that it has is not
// written again each time that the Event is tried.
func TestKueueAnswersWithoutItsEvent(t *testing.T) {
	pending, err := pendingChecks(parse(t, reserved), ours)
	if err != nil {
		t.Fatal(err)
	}
	said := pending[0]
	said.message = "m"
	for name, test := range map[string]struct {
		check    pendingCheck
		action   gate.Action
		written  int
		repeated bool
	}{
		"may start":                  {pending[0], gate.Open, 1, false},
		"waits":                      {pending[0], gate.Wait, 1, true},
		"waits, and that is written": {said, gate.Wait, 0, true},
	} {
		written := 0
		c := &Reconciler{fields: &optionalFields{}, retries: map[types.UID]int{}}
		c.Clock = clocktesting.NewFakePassiveClock(time.Unix(0, 0))
		c.Client = interceptor.NewClient(fake.NewClientBuilder().Build(), interceptor.Funcs{
			Create: func(context.Context, client.WithWatch, client.Object, ...client.CreateOption) error {
				return errors.New("the storage of Events is down")
			},
			SubResourceApply: func(context.Context, client.Client, string, runtime.ApplyConfiguration, ...client.SubResourceApplyOption) error {
				written++
				return nil
			},
		})
		err := c.updateState(t.Context(), test.check, gate.Decision{Action: test.action, Reason: "R", Message: "m"}, true)
		if written != test.written || (err != nil) != test.repeated {
			t.Errorf("a workload that %s: %d answers, then %v", name, written, err)
		}
	}
}

// Thousands of workloads are kept in memory: only those that may wait keep their pod templates.
func TestKueueKeepsTemplatesOfWaitingWorkloadsOnly(t *testing.T) {
	const workload = `{apiVersion: kueue.x-k8s.io/v1beta2, kind: Workload, metadata: {name: w, annotations: {a: b}},
  spec: {podSets: [{name: main, count: 2, template: {spec: {containers: [{name: c, image: i}]}}}]},
  status: {resourceRequests: [{name: main}], admission: {clusterQueue: q}, conditions: [%s], admissionChecks: [{name: ours, state: %s}]}}`
	const reserved, finished = `{type: QuotaReserved, status: "True"}`, `{type: Finished, status: "True"}`
	for name, test := range map[string]struct {
		conditions, state string
		keeps             bool
	}{
		"waits":      {reserved, "Pending", true},
		"is queued":  {`{type: QuotaReserved, status: "False"}`, "Pending", false},
		"runs":       {reserved, "Ready", false},
		"has ended":  {reserved + ", " + finished, "Pending", false},
		"is evicted": {`{type: Evicted, status: "True"}`, "Pending", false},
	} {
		kept, err := slim(parse(t, fmt.Sprintf(workload, test.conditions, test.state)))
		if err != nil {
			t.Fatal(err)
		}
		object := kept.(*unstructured.Unstructured)
		_, spec := object.Object["spec"]
		checks, _, _ := unstructured.NestedSlice(object.Object, "status", "admissionChecks")
		if _, requests, _ := unstructured.NestedSlice(object.Object, "status", "resourceRequests"); spec != test.keeps || requests || len(object.GetAnnotations()) > 0 || len(checks) != 1 || object.GetName() != "w" {
			t.Errorf("a workload that %s: %v", name, object.Object)
		}
	}
}
