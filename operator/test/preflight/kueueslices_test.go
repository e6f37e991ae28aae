package preflight

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// slice makes a Workload slice of an elastic job, as Kueue (0.19.2) does, with the hosts that it chose. One that was
// admitted has run, and is finished since another replaces it.
func slice(t *testing.T, name, check, replaces string, admitted bool, hosts ...string) *unstructured.Unstructured {
	t.Helper()
	now := time.Now().UTC().Format(time.RFC3339)
	annotations, state, conditions := `kueue.x-k8s.io/elastic-job: "true"`, "Pending", ""
	if replaces != "" {
		annotations += fmt.Sprintf(", kueue.x-k8s.io/workload-slice-replacement-for: %s/%s", users, replaces)
	}
	if admitted {
		state = "Ready"
		conditions = fmt.Sprintf(`, {type: Admitted, status: "True", reason: Admitted, message: m,
  lastTransitionTime: %[1]q}, {type: Finished, status: "True", reason: WorkloadSliceReplaced, message: m,
  lastTransitionTime: %[1]q}`, now)
	}
	return kueueObject(t, fmt.Sprintf(`{apiVersion: kueue.x-k8s.io/v1beta2, kind: Workload, metadata: {name: %[1]s,
  namespace: %[6]s, annotations: {%[7]s}}, spec: {
  podSets: [{name: main, count: %[4]d, template: {spec: {restartPolicy: Never, containers: [{name: c,
    image: "registry.example.com/train:1", resources: {}}]}}}]}, status: {
  conditions: [{type: QuotaReserved, status: "True", reason: QuotaReserved, message: m,
    lastTransitionTime: %[5]q}%[9]s],
  admissionChecks: [{name: %[2]s, state: %[8]s, message: "", lastTransitionTime: %[5]q}],
  admission: {clusterQueue: q, podSetAssignments: [{name: main, count: %[4]d, topologyAssignment: {
    levels: [kubernetes.io/hostname], slices: [{domainCount: %[4]d, podCounts: {universal: 1},
      valuesPerLevel: [{individual: {roots: [%[3]s]}}]}]}}]}}}`,
		name, check, strings.Join(hosts, ", "), len(hosts), now, users, annotations, state, conditions))
}

// A job grows by a second Workload, which replaces the first and has its nodes too. Only the new ones are to be proven:
// whatever was found of the others since, the job runs there. Retry would have Kueue stop all of it.
func TestKueueSliceWaitsForNewNodesOnly(t *testing.T) {
	start(t, newFleet(t, stuck), &clock{}, &clock{})
	for i, name := range newNodes(t, "slice", 5) {
		if i == 0 || i == 3 {
			recordHealth(t, name, evenkeel.HealthUnhealthy, evenkeel.VerdictFail)
		} else {
			recordHealth(t, name, evenkeel.HealthHealthy, evenkeel.VerdictPass)
		}
	}
	newPolicy(t, "slice", func(s *evenkeel.NetworkCheckPolicySpec) { s.Triggers.NewNodes = evenkeel.SwitchDisabled })
	admissionCheck(t, "slice", "slice")
	for _, failed := range []string{"slice-0", "slice-3"} {
		carries(t, failed, "False Test|unhealthy|")
	}
	slice(t, "running", "slice", "", true, "slice-0", "slice-1")
	isAnswered(t, slice(t, "grown", "slice", "running", false, "slice-0", "slice-1", "slice-2"), "slice", "Ready",
		"all 1 nodes")
	isAnswered(t, slice(t, "packed", "slice", "running", false, "slice-0", "slice-1"), "slice", "Ready",
		"runs on its nodes already")
	isAnswered(t, slice(t, "failing", "slice", "running", false, "slice-0", "slice-1", "slice-3"), "slice", "Pending",
		"the network of slice-3 failed a check: other nodes are needed (attempt 1)")
	// The slice between was never admitted: the job does not run on its nodes.
	isAnswered(t, slice(t, "failing-too", "slice", "failing", false, "slice-0", "slice-1", "slice-3", "slice-4"),
		"slice", "Pending",
		"the job runs on as it is: Kueue would stop it to choose other nodes")
}
