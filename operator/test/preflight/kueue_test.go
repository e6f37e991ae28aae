package preflight

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"path"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/controller/jobgate/kueue"
)

// kueueObject makes one of Kueue's objects, as YAML has it, with its status; it goes with the test.
func kueueObject(t *testing.T, text string) *unstructured.Unstructured {
	t.Helper()
	return kueueObjectIn(t, admin, text)
}

func kueueObjectIn(t *testing.T, admin client.Client, text string) *unstructured.Unstructured {
	t.Helper()
	object := &unstructured.Unstructured{}
	if err := yaml.UnmarshalStrict([]byte(text), &object.Object); err != nil {
		t.Fatal(err)
	}
	status := object.Object["status"]
	if err := admin.Create(t.Context(), object, client.FieldValidation("Strict")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := admin.Delete(context.Background(), object); client.IgnoreNotFound(err) != nil {
			t.Error(err)
		}
	})
	if status != nil {
		object.Object["status"] = status
		if err := admin.Status().Update(t.Context(), object); err != nil {
			t.Fatal(err)
		}
	}
	return object
}

// admissionCheck makes one that goes by the policy.
func admissionCheck(t *testing.T, name, policy string) *unstructured.Unstructured {
	t.Helper()
	return kueueObject(t, fmt.Sprintf(`{apiVersion: kueue.x-k8s.io/v1beta2, kind: AdmissionCheck, metadata: {name: %s}, spec: {
  controllerName: %s, parameters: {apiGroup: evenkeel.dev, kind: NetworkCheckPolicy, name: %s}}}`, name, kueue.ControllerName, policy))
}

// reservedWorkload makes one that Kueue has given its quota and the hosts, and that waits for the check.
func reservedWorkload(t *testing.T, name, check string, hosts ...string) *unstructured.Unstructured {
	t.Helper()
	return reservedWorkloadIn(t, users, name, check, hosts...)
}

func reservedWorkloadIn(t *testing.T, namespace, name, check string, hosts ...string) *unstructured.Unstructured {
	t.Helper()
	now := time.Now().UTC().Format(time.RFC3339)
	return kueueObject(t, fmt.Sprintf(`{apiVersion: kueue.x-k8s.io/v1beta2, kind: Workload, metadata: {name: %[1]s, namespace: %[6]s}, spec: {
  podSets: [{name: main, count: %[4]d, template: {spec: {restartPolicy: Never, containers: [{name: c, image: "registry.example.com/train:1", resources: {}}]}}}]}, status: {
  conditions: [{type: QuotaReserved, status: "True", reason: QuotaReserved, message: m, lastTransitionTime: %[5]q}],
  admissionChecks: [{name: %[2]s, state: Pending, message: "", lastTransitionTime: %[5]q}, {name: another, state: Pending, message: "", lastTransitionTime: %[5]q}],
  admission: {clusterQueue: q, podSetAssignments: [{name: main, count: %[4]d, topologyAssignment: {
    levels: [kubernetes.io/hostname], slices: [{domainCount: %[4]d, podCounts: {universal: 1}, valuesPerLevel: [{individual: {roots: [%[3]s]}}]}]}}]}}}`,
		name, check, strings.Join(hosts, ", "), len(hosts), now, namespace))
}

// isAnswered waits until the workload's check has the state, and a message with the part.
func isAnswered(t *testing.T, workload *unstructured.Unstructured, check, state, part string) map[string]any {
	t.Helper()
	return isAnsweredIn(t, admin, workload, check, state, part)
}

func isAnsweredIn(t *testing.T, admin client.Client, workload *unstructured.Unstructured, check, state, part string) map[string]any {
	t.Helper()
	var answer map[string]any
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s: %v", workload.GetName(), answer)
		}
	})
	eventually(t, fmt.Sprintf("%s has the check %s %s: %s", workload.GetName(), check, state, part), func(ctx context.Context) (bool, error) {
		if err := admin.Get(ctx, client.ObjectKeyFromObject(workload), workload); err != nil {
			return false, err
		}
		list, _, err := unstructured.NestedSlice(workload.Object, "status", "admissionChecks")
		for _, item := range list {
			c, _ := item.(map[string]any)
			switch {
			case c["name"] == check:
				answer = c
			case c["state"] != "Pending" || c["message"] != "":
				t.Errorf("the check of another is %v", c)
			}
		}
		message, _ := answer["message"].(string)
		return answer["state"] == state && strings.Contains(message, part), err
	})
	return answer
}

func isActive(t *testing.T, check *unstructured.Unstructured, status, reason string) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s is Active %s: %s", check.GetName(), status, reason), func(ctx context.Context) (bool, error) {
		if err := admin.Get(ctx, client.ObjectKeyFromObject(check), check); err != nil {
			return false, err
		}
		list, _, err := unstructured.NestedSlice(check.Object, "status", "conditions")
		for _, item := range list {
			c, _ := item.(map[string]any)
			if c["type"] == "Active" && c["status"] == status && c["reason"] == reason {
				return true, err
			}
		}
		return false, err
	})
}

func TestKueueAdmitsProvenNodes(t *testing.T) {
	start(t, newFleet(t, links(nil)), &clock{}, &clock{})
	newNodes(t, "kueue", 4)
	check := admissionCheck(t, "kueue", "kueue")
	// Nobody waits for a policy that is not there.
	isActive(t, check, "True", "NoPolicy")
	// The AdmissionCheck names the policy: its own trigger is for other jobs.
	p := newPolicy(t, "kueue", func(s *evenkeel.NetworkCheckPolicySpec) { s.Triggers.NewNodes = evenkeel.SwitchDisabled })
	isActive(t, check, "True", "Active")
	w := reservedWorkload(t, "kueue", "kueue", "kueue-0", "kueue-2")
	isAnswered(t, w, "kueue", "Ready", "all 2 nodes")
	carries(t, "kueue-0", "True Proven|healthy|")
	isAnswered(t, reservedWorkload(t, "kueue-again", "kueue", "kueue-0", "kueue-2"), "kueue", "Ready", "all 2 nodes")
	if n := len(policyChecks(t, p)); n != 1 {
		t.Errorf("%d checks", n)
	}
	if err := admin.Delete(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	isActive(t, check, "True", "NoPolicy")
	isAnswered(t, reservedWorkload(t, "kueue-late", "kueue", "kueue-1"), "kueue", "Ready", "none of the nodes")
}

// answerReady has another controller answer for its check of the workload.
func answerReady(t *testing.T, workload *unstructured.Unstructured, check string, at time.Time) {
	t.Helper()
	if err := admin.Get(t.Context(), client.ObjectKeyFromObject(workload), workload); err != nil {
		t.Fatal(err)
	}
	list, _, err := unstructured.NestedSlice(workload.Object, "status", "admissionChecks")
	if err != nil {
		t.Fatal(err)
	}
	for _, item := range list {
		if c := item.(map[string]any); c["name"] == check {
			c["state"], c["lastTransitionTime"] = "Ready", at.UTC().Format(time.RFC3339)
		}
	}
	if err := unstructured.SetNestedSlice(workload.Object, list, "status", "admissionChecks"); err != nil {
		t.Fatal(err)
	}
	if err := admin.Status().Update(t.Context(), workload); err != nil {
		t.Fatal(err)
	}
}

// Nodes that an autoscaler has yet to bring cannot be checked. The workload says so, and is decided about when they are there; its
// timeout begins then. Kueue chooses among them when all checks are ready: to wait for that would be to wait for ever.
func TestKueueWaitsForProvisionedNodes(t *testing.T) {
	calendar := &clock{}
	start(t, newFleet(t, stuck), &clock{}, calendar)
	newNodes(t, "provisioned", 2)
	p := newPolicy(t, "provisioned", func(s *evenkeel.NetworkCheckPolicySpec) { s.Triggers.NewNodes = evenkeel.SwitchDisabled })
	kueueObject(t, `{apiVersion: kueue.x-k8s.io/v1beta2, kind: AdmissionCheck, metadata: {name: another}, spec: {controllerName: kueue.x-k8s.io/provisioning-request}}`)
	isActive(t, admissionCheck(t, "provisioned", "provisioned"), "True", "Active")
	w := kueueObject(t, fmt.Sprintf(`{apiVersion: kueue.x-k8s.io/v1beta2, kind: Workload, metadata: {name: provisioned, namespace: %[1]s}, spec: {
  podSets: [{name: main, count: 2, template: {spec: {restartPolicy: Never, containers: [{name: c, image: "registry.example.com/train:1", resources: {}}]}}}]}, status: {
  conditions: [{type: QuotaReserved, status: "True", reason: QuotaReserved, message: m, lastTransitionTime: %[2]q}],
  admissionChecks: [{name: provisioned, state: Pending, message: "", lastTransitionTime: %[2]q}, {name: another, state: Pending, message: "", lastTransitionTime: %[2]q}],
  admission: {clusterQueue: q, podSetAssignments: [{name: main, count: 2, delayedTopologyRequest: Pending}]}}}`, users, time.Now().UTC().Format(time.RFC3339)))
	isAnswered(t, w, "provisioned", "Pending", "waits for nodes, which Kueue asks an autoscaler for by the AdmissionCheck another")
	if n := len(policyChecks(t, p)); n != 0 {
		t.Errorf("%d checks of nodes that are not there", n)
	}
	// It took longer than the policy's timeout.
	calendar.advance(time.Hour)
	answerReady(t, w, "another", calendar.Now())
	eventually(t, "its nodes are checked", func(ctx context.Context) (bool, error) {
		err := admin.Get(ctx, client.ObjectKeyFromObject(w), w)
		list, _, _ := unstructured.NestedSlice(w.Object, "status", "admissionChecks")
		for _, item := range list {
			c, _ := item.(map[string]any)
			message, _ := c["message"].(string)
			switch {
			case c["name"] != "provisioned":
			case c["state"] == "Ready":
				return false, fmt.Errorf("it is admitted with nodes that nobody has checked: %s", message)
			case strings.Contains(message, "until the network of provisioned-0, provisioned-1 is checked"):
				return true, err
			}
		}
		return false, err
	})
}

func TestKueueRetriesFailedNodes(t *testing.T) {
	start(t, newFleet(t, links(map[string]float64{"retry-1": 0.1})), &clock{}, &clock{})
	newNodes(t, "retry", 4)
	newPolicy(t, "retry", nil)
	admissionCheck(t, "retry", "retry")
	carries(t, "retry-1", "False TooSlow|unhealthy|")
	answer := isAnswered(t, reservedWorkload(t, "retry", "retry", "retry-0", "retry-1"), "retry", "Retry", "the network of retry-1 failed")
	if answer["requeueAfterSeconds"] != int64(60) {
		t.Errorf("%v", answer)
	}
	isAnswered(t, reservedWorkload(t, "retry-elsewhere", "retry", "retry-2", "retry-3"), "retry", "Ready", "all 2 nodes")
}

// evict does what Kueue does with a workload that returned its quota: it counts, resets the check, and reserves quota again.
func evict(t *testing.T, workload *unstructured.Unstructured, check string, counts bool, at time.Time) {
	t.Helper()
	list, _, err := unstructured.NestedSlice(workload.Object, "status", "admissionChecks")
	if err != nil {
		t.Fatal(err)
	}
	for _, item := range list {
		if c := item.(map[string]any); c["name"] == check {
			c["state"], c["message"] = "Pending", "Reset to Pending after eviction. Previously: Retry"
			if count, _ := c["retryCount"].(int64); counts {
				c["retryCount"] = count + 1
			}
		}
	}
	conditions, _, err := unstructured.NestedSlice(workload.Object, "status", "conditions")
	if err != nil {
		t.Fatal(err)
	}
	conditions[0].(map[string]any)["lastTransitionTime"] = at.UTC().Format(time.RFC3339)
	if err := errors.Join(unstructured.SetNestedSlice(workload.Object, list, "status", "admissionChecks"), unstructured.SetNestedSlice(workload.Object, conditions, "status", "conditions")); err != nil {
		t.Fatal(err)
	}
	if err := admin.Status().Update(t.Context(), workload); err != nil {
		t.Fatal(err)
	}
}

// Kueue may choose the failed node each time: nothing in the workload makes it avoid the node.
func TestKueueRetriesAreBounded(t *testing.T) {
	start(t, newFleet(t, links(map[string]float64{"again-1": 0.1})), &clock{}, &clock{})
	newNodes(t, "again", 4)
	newPolicy(t, "again", nil)
	admissionCheck(t, "again", "again")
	carries(t, "again-1", "False TooSlow|unhealthy|")
	w := reservedWorkload(t, "again", "again", "again-0", "again-1")
	for attempt, delay := range []int64{60, 120, 240, 480, 960} {
		answer := isAnswered(t, w, "again", "Retry", fmt.Sprintf("(attempt %d)", attempt+1))
		if answer["requeueAfterSeconds"] != delay {
			t.Errorf("attempt %d: %v", attempt+1, answer)
		}
		evict(t, w, "again", true, time.Now())
	}
	isAnswered(t, w, "again", "Ready", "starts although the network of again-1 failed a check, as it was given such nodes 6 times")
}

// withoutFields serves the CRD of workloads as versions of Kueue before 0.15 have it, until the test ends.
func withoutFields(t *testing.T, names ...string) {
	t.Helper()
	crd := &unstructured.Unstructured{}
	crd.SetAPIVersion("apiextensions.k8s.io/v1")
	crd.SetKind("CustomResourceDefinition")
	crd.SetName("workloads.kueue.x-k8s.io")
	if err := admin.Get(t.Context(), client.ObjectKeyFromObject(crd), crd); err != nil {
		t.Fatal(err)
	}
	whole, _, err := unstructured.NestedSlice(crd.Object, "spec", "versions")
	if err != nil {
		t.Fatal(err)
	}
	serve := func(ctx context.Context, change func(properties map[string]any)) {
		versions := runtime.DeepCopyJSONValue(whole).([]any)
		for _, v := range versions {
			item := v
			for _, key := range []string{"schema", "openAPIV3Schema", "properties", "status", "properties", "admissionChecks", "items", "properties"} {
				item = item.(map[string]any)[key]
			}
			change(item.(map[string]any))
		}
		patch, err := json.Marshal(map[string]any{"spec": map[string]any{"versions": versions}})
		if err != nil {
			t.Fatal(err)
		}
		if err := admin.Patch(ctx, crd.DeepCopy(), client.RawPatch(types.MergePatchType, patch)); err != nil {
			t.Fatal(err)
		}
	}
	// declared reports whether the API server knows the field, by what it says of a workload that is not there.
	declared := func(ctx context.Context, t *testing.T, want bool) {
		probe := reservedWorkload(t, "probe", "probe", "nowhere")
		eventually(t, fmt.Sprintf("the field %s is served: %t", names[0], want), func(context.Context) (bool, error) {
			apply := &unstructured.Unstructured{Object: map[string]any{"status": map[string]any{"admissionChecks": []any{
				map[string]any{"name": "probe", "state": "Pending", "message": "", "lastTransitionTime": "2026-11-21T12:00:00Z", names[0]: int64(1)},
			}}}}
			apply.SetGroupVersionKind(probe.GroupVersionKind())
			apply.SetNamespace(probe.GetNamespace())
			apply.SetName(probe.GetName())
			err := admin.Status().Apply(ctx, client.ApplyConfigurationFromUnstructured(apply), client.FieldOwner("probe"), client.ForceOwnership, client.DryRunAll)
			return (err == nil) == want, nil
		})
	}
	serve(t.Context(), func(properties map[string]any) {
		for _, name := range names {
			delete(properties, name)
		}
	})
	t.Cleanup(func() { serve(context.Background(), func(map[string]any) {}) })
	declared(t.Context(), t, false)
}

// Kueue 0.14 and before have no requeueAfterSeconds: an answer with it would be refused, again and again.
func TestKueueRetriesWithoutFieldsOfLaterVersions(t *testing.T) {
	withoutFields(t, "requeueAfterSeconds", "retryCount")
	calendar := &clock{}
	start(t, newFleet(t, links(map[string]float64{"old-1": 0.1})), &clock{}, calendar)
	newNodes(t, "old", 4)
	newPolicy(t, "old", nil)
	admissionCheck(t, "old", "old")
	carries(t, "old-1", "False TooSlow|unhealthy|")
	w := reservedWorkload(t, "old", "old", "old-0", "old-1")
	for attempt := range 5 {
		// Kueue would choose again at once, so the answer waits.
		isAnswered(t, w, "old", "Pending", fmt.Sprintf("(attempt %d)", attempt+1))
		calendar.advance(time.Minute << attempt)
		trigger(t, w)
		isAnswered(t, w, "old", "Retry", fmt.Sprintf("(attempt %d)", attempt+1))
		evict(t, w, "old", false, calendar.Now())
	}
	isAnswered(t, w, "old", "Ready", "given such nodes 6 times")
}

func TestKueueWorkloadReturnsQuotaAfterTimeout(t *testing.T) {
	calendar := &clock{}
	start(t, newFleet(t, stuck), &clock{}, calendar)
	newNodes(t, "quota", 2)
	p := newPolicy(t, "quota", func(s *evenkeel.NetworkCheckPolicySpec) { s.Gate.OnTimeout = evenkeel.GateWait })
	admissionCheck(t, "quota", "quota")
	w := reservedWorkload(t, "quota", "quota", "quota-0", "quota-1")
	answer := isAnswered(t, w, "quota", "Pending", "runs")
	// Kueue keeps the delay of an answer that it has read, as its own.
	answer["requeueAfterSeconds"] = int64(1800)
	kept := &unstructured.Unstructured{Object: map[string]any{"status": map[string]any{"admissionChecks": []any{answer}}}}
	kept.SetGroupVersionKind(w.GroupVersionKind())
	kept.SetNamespace(w.GetNamespace())
	kept.SetName(w.GetName())
	if err := admin.Status().Apply(t.Context(), client.ApplyConfigurationFromUnstructured(kept), client.FieldOwner("kueue-admission"), client.ForceOwnership); err != nil {
		t.Fatal(err)
	}
	calendar.advance(time.Hour)
	if err := admin.Patch(t.Context(), &evenkeel.NetworkCheckPolicy{ObjectMeta: metav1.ObjectMeta{Name: p.Name}}, client.RawPatch("application/merge-patch+json", []byte(`{"spec": {"freshnessSeconds": 7200}}`))); err != nil {
		t.Fatal(err)
	}
	if answer := isAnswered(t, w, "quota", "Retry", "quota-0, quota-1"); answer["requeueAfterSeconds"] != int64(0) {
		t.Errorf("Kueue keeps the quota of a workload that waits %v s", answer["requeueAfterSeconds"])
	}
}

// waitsFor adds checks that Kueue waits for to a workload.
func waitsFor(t *testing.T, workload *unstructured.Unstructured, checks ...string) {
	t.Helper()
	list, _, err := unstructured.NestedSlice(workload.Object, "status", "admissionChecks")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range checks {
		list = append(list, map[string]any{"name": name, "state": "Pending", "message": "", "lastTransitionTime": time.Now().UTC().Format(time.RFC3339)})
	}
	if err := unstructured.SetNestedSlice(workload.Object, list, "status", "admissionChecks"); err != nil {
		t.Fatal(err)
	}
	if err := admin.Status().Update(t.Context(), workload); err != nil {
		t.Fatal(err)
	}
}

// allAnswered waits until every check of Evenkeel on the workload is Ready. Their messages must contain the part. The check of another
// controller stays as it is.
func allAnswered(t *testing.T, workload *unstructured.Unstructured, part string) {
	t.Helper()
	eventually(t, workload.GetName()+" has all its checks Ready", func(ctx context.Context) (bool, error) {
		if err := admin.Get(ctx, client.ObjectKeyFromObject(workload), workload); err != nil {
			return false, err
		}
		list, _, err := unstructured.NestedSlice(workload.Object, "status", "admissionChecks")
		for _, item := range list {
			c, _ := item.(map[string]any)
			if message, _ := c["message"].(string); c["name"] != "another" && (c["state"] != "Ready" || !strings.Contains(message, part)) {
				return false, err
			}
		}
		return true, err
	})
}

// A ClusterQueue with a check for each of its flavors gives a workload all of them.
func TestKueueAnswersEachOfSeveralChecks(t *testing.T) {
	names := []string{"several", "several-too", strings.Repeat("long-", 30) + "name"}
	for _, name := range names {
		admissionCheck(t, name, "several")
	}
	w := reservedWorkload(t, "several", names[0], "several-0")
	waitsFor(t, w, names[1:]...)
	stop := start(t, newFleet(t, stuck), &clock{}, &clock{})
	allAnswered(t, w, "none of the nodes")
	stop()
	left := reservedWorkload(t, "several-left", names[0], "several-0")
	waitsFor(t, left, names[1:]...)
	cleanup(t)
	allAnswered(t, left, "Evenkeel was uninstalled")
}

// Kueue's workloads are many, and most are nobody's business. Until an AdmissionCheck is Evenkeel's, the controller asks for none.
func TestKueueWorkloadsAreWatchedOnDemand(t *testing.T) {
	asked := recordReads(t)
	requests := func(resource string) int {
		return len(asked.of(func(u *url.URL) bool {
			return strings.HasPrefix(u.Path, "/apis/kueue.x-k8s.io/") && path.Base(u.Path) == resource
		}))
	}
	kueueObject(t, `{apiVersion: kueue.x-k8s.io/v1beta2, kind: AdmissionCheck, metadata: {name: theirs}, spec: {controllerName: example.com/other}}`)
	start(t, newFleet(t, links(nil)), &clock{}, &clock{})
	newNodes(t, "ondemand", 2)
	newPolicy(t, "ondemand", onStart(nil))
	eventually(t, "the controller reads AdmissionChecks", func(context.Context) (bool, error) { return requests("admissionchecks") > 0, nil })
	// A whole check of nodes takes many rounds of looking for kinds to watch.
	isState(t, newJob(t, "Job", "ondemand", nil), started)
	if n := requests("workloads") + requests("resourceflavors"); n != 0 {
		t.Errorf("%d requests for workloads and flavors, and no AdmissionCheck is Evenkeel's", n)
	}
	admissionCheck(t, "ours", "ondemand")
	isAnswered(t, reservedWorkload(t, "ondemand", "ours", "ondemand-0"), "ours", "Ready", "all 1 nodes")
	if requests("workloads") == 0 {
		t.Error("the requests are not counted")
	}
}

// TestKueueGuardLimitsController has answers for AdmissionChecks of another controller, and parts of the status that are Kueue's.
func TestKueueGuardLimitsController(t *testing.T) {
	asWriters(t, func(t *testing.T, writer client.Client) {
		check := admissionCheck(t, "guarded", "default")
		other := kueueObject(t, `{apiVersion: kueue.x-k8s.io/v1beta2, kind: AdmissionCheck, metadata: {name: another}, spec: {controllerName: example.com/other}}`)
		waiting := reservedWorkload(t, "guarded", "guarded", "n1")
		patch := func(object client.Object, text string) error {
			return writer.Status().Patch(t.Context(), object.DeepCopyObject().(client.Object), client.RawPatch("application/merge-patch+json", []byte(text)))
		}
		const now = `"2026-01-01T00:00:00Z"`
		state := func(name, state string) string {
			return fmt.Sprintf(`{"name": %q, "state": %q, "message": "m", "lastTransitionTime": %s}`, name, state, now)
		}
		checks := func(entries ...string) string {
			return `{"status": {"admissionChecks": [` + strings.Join(entries, ",") + `]}}`
		}
		list, _, _ := unstructured.NestedSlice(waiting.Object, "status", "admissionChecks")
		kept, err := json.Marshal(list[1])
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, "the API server has read the policies", func(ctx context.Context) (bool, error) {
			set := func(object client.Object, text string) error {
				return writer.Status().Patch(ctx, object.DeepCopyObject().(client.Object), client.RawPatch("application/merge-patch+json", []byte(text)), client.DryRunAll)
			}
			return set(other, `{"status": {"conditions": []}}`) != nil && set(waiting, checks(state("guarded", "Ready"), state("another", "Ready"))) != nil, nil
		})
		active := `{"status": {"conditions": [{"type": "Active", "status": "True", "reason": "r", "message": "m", "lastTransitionTime": ` + now + `}]}}`
		for name, err := range map[string]error{
			"an answer for another controller": patch(waiting, checks(state("guarded", "Ready"), state("another", "Ready"))),
			"another check's answer removed":   patch(waiting, checks(state("guarded", "Ready"))),
			"a rejection":                      patch(waiting, checks(state("guarded", "Rejected"), string(kept))),
			"a check that Kueue does not ask":  patch(waiting, checks(state("guarded", "Ready"), string(kept), state("third", "Ready"))),
			"admission":                        patch(waiting, `{"status": {"admission": null}}`),
			"a condition of the workload":      patch(waiting, `{"status": {"conditions": [{"type": "Admitted", "status": "True", "reason": "r", "message": "m", "lastTransitionTime": `+now+`}]}}`),
			"another controller's check":       patch(other, active),
			"another condition of its check":   patch(check, strings.Replace(active, "Active", "Other", 1)),
		} {
			if err == nil || !strings.Contains(err.Error(), "ValidatingAdmissionPolicy") {
				t.Errorf("%s: %v", name, err)
			}
		}
		for what, err := range map[string]error{
			"its own answer":    patch(waiting, checks(state("guarded", "Ready"), string(kept))),
			"its own condition": patch(check, active),
		} {
			if err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
		if err := patch(waiting, checks(state("guarded", "Retry"), string(kept))); err == nil || !strings.Contains(err.Error(), "pending AdmissionChecks only") {
			t.Errorf("another answer for a check that has one: %v", err)
		}
	})
}
