package preflight

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/controller/jobgate/kueue"
)

// kueueObject makes one of Kueue's objects, as YAML has it, with its status; it goes with the test.
func kueueObject(t *testing.T, text string) *unstructured.Unstructured {
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
	now := time.Now().UTC().Format(time.RFC3339)
	return kueueObject(t, fmt.Sprintf(`{apiVersion: kueue.x-k8s.io/v1beta2, kind: Workload, metadata: {name: %[1]s, namespace: default}, spec: {
  podSets: [{name: main, count: %[4]d, template: {spec: {restartPolicy: Never, containers: [{name: c, image: "registry.example.com/train:1", resources: {}}]}}}]}, status: {
  conditions: [{type: QuotaReserved, status: "True", reason: QuotaReserved, message: m, lastTransitionTime: %[5]q}],
  admissionChecks: [{name: %[2]s, state: Pending, message: "", lastTransitionTime: %[5]q}, {name: another, state: Pending, message: "", lastTransitionTime: %[5]q}],
  admission: {clusterQueue: q, podSetAssignments: [{name: main, count: %[4]d, topologyAssignment: {
    levels: [kubernetes.io/hostname], slices: [{domainCount: %[4]d, podCounts: {universal: 1}, valuesPerLevel: [{individual: {roots: [%[3]s]}}]}]}}]}}}`,
		name, check, strings.Join(hosts, ", "), len(hosts), now))
}

// isAnswered waits until the workload's check has the state, and a message with the part.
func isAnswered(t *testing.T, workload *unstructured.Unstructured, check, state, part string) map[string]any {
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
	isActive(t, check, "False", "NoPolicy")
	// The AdmissionCheck names the policy: its own trigger is for other jobs.
	p := newPolicy(t, "kueue", func(s *evenkeel.NetworkCheckPolicySpec) { s.Triggers.NewNodes = evenkeel.SwitchDisabled })
	isActive(t, check, "True", "Active")
	w := reservedWorkload(t, "kueue", "kueue", "kueue-0", "kueue-2")
	isAnswered(t, w, "kueue", "Ready", "all 2 nodes")
	carries(t, "kueue-0", "True Proven|healthy|")
	carries(t, "kueue-1", "Unknown NotChecked||")
	isAnswered(t, reservedWorkload(t, "kueue-again", "kueue", "kueue-0", "kueue-2"), "kueue", "Ready", "all 2 nodes")
	if n := len(policyChecks(t, p)); n != 1 {
		t.Errorf("%d checks", n)
	}
	if err := admin.Delete(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	isActive(t, check, "False", "NoPolicy")
	isAnswered(t, reservedWorkload(t, "kueue-late", "kueue", "kueue-1"), "kueue", "Ready", "none of the nodes")
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

func TestKueueWorkloadReturnsQuotaAfterTimeout(t *testing.T) {
	calendar := &clock{}
	start(t, newFleet(t, stuck), &clock{}, calendar)
	newNodes(t, "quota", 2)
	p := newPolicy(t, "quota", func(s *evenkeel.NetworkCheckPolicySpec) { s.Gate.OnTimeout = evenkeel.GateWait })
	admissionCheck(t, "quota", "quota")
	w := reservedWorkload(t, "quota", "quota", "quota-0", "quota-1")
	isAnswered(t, w, "quota", "Pending", "runs")
	calendar.advance(time.Hour)
	if err := admin.Patch(t.Context(), &evenkeel.NetworkCheckPolicy{ObjectMeta: metav1.ObjectMeta{Name: p.Name}}, client.RawPatch("application/merge-patch+json", []byte(`{"spec": {"freshnessSeconds": 7200}}`))); err != nil {
		t.Fatal(err)
	}
	isAnswered(t, w, "quota", "Retry", "quota-0, quota-1")
}
