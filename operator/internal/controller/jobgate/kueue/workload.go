package kueue

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/preflight/gate"
)

// Kinds of Kueue's, and the states of a workload's check.
const (
	kindCheck    = "AdmissionCheck"
	kindFlavor   = "ResourceFlavor"
	kindWorkload = "Workload"

	statePending = "Pending"
	stateReady   = "Ready"
	stateRetry   = "Retry"

	// provisioningController decides the AdmissionChecks by which Kueue asks an autoscaler for nodes.
	provisioningController = group + "/provisioning-request"
)

// requiredKinds have to be served before anything can be decided.
var requiredKinds = []string{kindCheck, kindFlavor, kindWorkload}

// How long a workload waits for other nodes after the first of its nodes that failed: until they are labeled. Each
// attempt doubles the delay, up to a maximum. After a timeout there is none: Kueue (0.19) keeps the quota until a delay
// is over, and the workload should give it back.
const (
	reassignDelay = time.Minute
	maxRetryDelay = 30 * time.Minute
)

// The fields of Kueue's objects that are read here, in versions v1beta1 and v1beta2.
type (
	checkSpec struct {
		ControllerName string `json:"controllerName"`
		Parameters     *struct {
			APIGroup string `json:"apiGroup"`
			Kind     string `json:"kind"`
			Name     string `json:"name"`
		} `json:"parameters"`
	}
	flavorSpec struct {
		NodeLabels  map[string]string   `json:"nodeLabels"`
		Tolerations []corev1.Toleration `json:"tolerations"`
	}
	workloadSpec struct {
		Active  *bool `json:"active"`
		PodSets []struct {
			Name     string                 `json:"name"`
			Count    int                    `json:"count"`
			Template corev1.PodTemplateSpec `json:"template"`
		} `json:"podSets"`
	}
	workloadStatus struct {
		Conditions      []metav1.Condition `json:"conditions"`
		AdmissionChecks []struct {
			Name               string      `json:"name"`
			State              string      `json:"state"`
			Message            string      `json:"message"`
			LastTransitionTime metav1.Time `json:"lastTransitionTime"`
			RetryCount         *int        `json:"retryCount"`
		} `json:"admissionChecks"`
		Admission *struct {
			PodSetAssignments []assignment `json:"podSetAssignments"`
		} `json:"admission"`
	}
	assignment struct {
		Name string `json:"name"`
		// Count is lower than that of the pod set where Kueue admits a part of it.
		Count              *int              `json:"count"`
		Flavors            map[string]string `json:"flavors"`
		TopologyAssignment *topology         `json:"topologyAssignment"`
	}
	// A topology describes where the pods of a set are placed: for each domain, the values of the levels' node labels.
	// Version v1beta1 lists domains; v1beta2 has slices of domains, level by level.
	topology struct {
		Levels  []string `json:"levels"`
		Domains []struct {
			Values []string `json:"values"`
		} `json:"domains"`
		Slices []struct {
			DomainCount    int32 `json:"domainCount"`
			ValuesPerLevel []struct {
				Universal  *string `json:"universal"`
				Individual *struct {
					Prefix string   `json:"prefix"`
					Suffix string   `json:"suffix"`
					Roots  []string `json:"roots"`
				} `json:"individual"`
			} `json:"valuesPerLevel"`
		} `json:"slices"`
	}
)

// decodeField decodes a field of an object, which may be absent.
func decodeField(object *unstructured.Unstructured, name string, into any) error {
	content, _ := object.Object[name].(map[string]any)
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(content, into); err != nil {
		return fmt.Errorf("%s of %s %s: %w", name, object.GetKind(), object.GetName(), err)
	}
	return nil
}

// isOf reports whether the controller decides the AdmissionCheck.
func isOf(check *unstructured.Unstructured, controller string) bool {
	var spec checkSpec
	return decodeField(check, "spec", &spec) == nil && spec.ControllerName == controller
}

// parseParameters returns the name and the policy of an AdmissionCheck, and whether it is one of ours.
func parseParameters(check *unstructured.Unstructured) (name, policy string, ours bool) {
	var spec checkSpec
	if err := decodeField(check, "spec", &spec); err != nil || spec.ControllerName != ControllerName {
		return "", "", false
	}
	if p := spec.Parameters; p != nil && p.APIGroup == evenkeel.GroupVersion.Group && p.Kind == "NetworkCheckPolicy" {
		policy = p.Name
	}
	return check.GetName(), policy, true
}

// activeCondition is the condition Active of one of our AdmissionChecks.
func activeCondition(check *unstructured.Unstructured, policies []evenkeel.NetworkCheckPolicy) metav1.Condition {
	condition := metav1.Condition{Type: "Active", Status: metav1.ConditionFalse, ObservedGeneration: check.GetGeneration()}
	_, policy, _ := parseParameters(check)
	there := slices.ContainsFunc(policies, func(p evenkeel.NetworkCheckPolicy) bool { return p.Name == policy && p.DeletionTimestamp == nil })
	switch {
	case policy == "":
		condition.Reason, condition.Message = "BadParameters", "spec.parameters: want apiGroup evenkeel.dev, kind NetworkCheckPolicy and the policy's name"
	case !there:
		// Jobs of a policy that is gone need not wait. Kueue admits nothing at all by a check that is not active.
		condition.Status, condition.Reason = metav1.ConditionTrue, "NoPolicy"
		condition.Message = fmt.Sprintf("there is no NetworkCheckPolicy named %q: workloads do not wait", policy)
	default:
		condition.Status, condition.Reason, condition.Message = metav1.ConditionTrue, "Active", "workloads wait until the network of their nodes is proven"
	}
	return condition
}

// A pendingCheck is a workload that waits for one of our checks.
type pendingCheck struct {
	object        *unstructured.Unstructured
	check, policy string
	spec          workloadSpec
	status        workloadStatus
	message       string
	since         time.Time
	// running is what the job has that runs and is to grow; nil: it does not run.
	running []assignment
	// retryCount is Kueue's count of the attempts; nil: it has none.
	retryCount *int
}

// uid identifies one check of one workload.
func (w pendingCheck) uid() types.UID { return w.object.GetUID() + types.UID("/"+w.check) }

// pendingChecks returns our pending checks of a workload that holds its quota.
func pendingChecks(object *unstructured.Unstructured, ours map[string]string) ([]pendingCheck, error) {
	if len(ours) == 0 || object.GetDeletionTimestamp() != nil {
		return nil, nil
	}
	var status workloadStatus
	if err := decodeField(object, "status", &status); err != nil {
		return nil, err
	}
	reserved := meta.FindStatusCondition(status.Conditions, "QuotaReserved")
	if reserved == nil || reserved.Status != metav1.ConditionTrue || status.Admission == nil ||
		meta.IsStatusConditionTrue(status.Conditions, "Finished") || meta.IsStatusConditionTrue(status.Conditions, "Evicted") {
		return nil, nil
	}
	var list []pendingCheck
	for _, c := range status.AdmissionChecks {
		if policy, is := ours[c.Name]; is && c.State == statePending {
			list = append(list, pendingCheck{object: object, check: c.Name, policy: policy, status: status, message: c.Message, since: reserved.LastTransitionTime.Time, retryCount: c.RetryCount})
		}
	}
	if len(list) == 0 {
		return nil, nil
	}
	var spec workloadSpec
	if err := decodeField(object, "spec", &spec); err != nil {
		return nil, err
	}
	if spec.Active != nil && !*spec.Active {
		return nil, nil
	}
	for i := range list {
		list[i].spec = spec
	}
	return list, nil
}

// provisioned describes what is known of the provisioning checks of the workload: the name of one that an autoscaler
// has yet to bring nodes for, or when the last of them was ready. Before that, the nodes that the workload would be
// decided by are not there.
func (w pendingCheck) provisioned(provisioning map[string]bool) (waitsFor string, at time.Time) {
	for _, c := range w.status.AdmissionChecks {
		switch {
		case !provisioning[c.Name]:
		case c.State == stateReady:
			at = later(at, c.LastTransitionTime.Time)
		default:
			waitsFor = c.Name
		}
	}
	return waitsFor, at
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// job converts the workload for package gate. Where a topology is delayed, Kueue chooses nodes once all checks are
// ready: until then the workload may get any node of its flavors. Of a job that runs, what it has is left out.
func (w pendingCheck) job(flavors []unstructured.Unstructured) (job gate.Job, err error) {
	// No policy can be named "/", so a workload without a policy of its own does not wait.
	job = gate.Job{Policy: cmp.Or(w.policy, "/"), Since: w.since}
	for i := range w.spec.PodSets {
		set := &w.spec.PodSets[i]
		a, has := byName(w.status.Admission.PodSetAssignments, set.Name), byName(w.running, set.Name)
		count := set.Count
		if a.Count != nil {
			count = *a.Count
		}
		if has.Count != nil {
			if count -= *has.Count; count <= 0 {
				continue
			}
		}
		hasHosts, err := has.hosts()
		if err != nil {
			return job, fmt.Errorf("the slice before workload %s/%s: %w", w.object.GetNamespace(), w.object.GetName(), err)
		}
		spec, err := applyFlavors(&set.Template.Spec, a.Flavors, flavors)
		if err != nil {
			return job, err
		}
		if a.TopologyAssignment == nil {
			job.AddTemplate(spec, count)
			continue
		}
		domains, err := a.TopologyAssignment.domains()
		if err != nil {
			return job, fmt.Errorf("workload %s/%s: %w", w.object.GetNamespace(), w.object.GetName(), err)
		}
		levels := a.TopologyAssignment.Levels
		for _, values := range domains {
			if last := len(levels) - 1; levels[last] == corev1.LabelHostname {
				if host := values[last]; !slices.Contains(hasHosts, host) {
					job.Hosts = append(job.Hosts, host)
				}
				continue
			}
			there := spec.DeepCopy()
			for i, level := range levels {
				there.NodeSelector = mergeLabels(there.NodeSelector, map[string]string{level: values[i]})
			}
			// How many pods are in which domain differs little.
			job.AddTemplate(there, (count+len(domains)-1)/len(domains))
		}
	}
	return job, nil
}

// applyFlavors returns the pod spec with the node labels and tolerations of its flavors.
func applyFlavors(spec *corev1.PodSpec, assigned map[string]string, flavors []unstructured.Unstructured) (*corev1.PodSpec, error) {
	spec = spec.DeepCopy()
	for i := range flavors {
		if !slices.Contains(slices.Collect(maps.Values(assigned)), flavors[i].GetName()) {
			continue
		}
		var f flavorSpec
		if err := decodeField(&flavors[i], "spec", &f); err != nil {
			return nil, err
		}
		spec.NodeSelector = mergeLabels(spec.NodeSelector, f.NodeLabels)
		spec.Tolerations = append(spec.Tolerations, f.Tolerations...)
	}
	return spec, nil
}

func mergeLabels(a, b map[string]string) map[string]string {
	all := maps.Clone(a)
	if all == nil {
		all = map[string]string{}
	}
	maps.Copy(all, b)
	return all
}

// domains returns the values of all levels, for each domain.
func (t *topology) domains() ([][]string, error) {
	var all [][]string
	for _, d := range t.Domains {
		all = append(all, d.Values)
	}
	for _, s := range t.Slices {
		first := len(all)
		for range s.DomainCount {
			all = append(all, nil)
		}
		for _, level := range s.ValuesPerLevel {
			for i := range int(s.DomainCount) {
				value := ""
				switch {
				case level.Universal != nil:
					value = *level.Universal
				case level.Individual != nil && i < len(level.Individual.Roots):
					value = level.Individual.Prefix + level.Individual.Roots[i] + level.Individual.Suffix
				}
				all[first+i] = append(all[first+i], value)
			}
		}
	}
	for _, values := range all {
		if len(values) != len(t.Levels) || len(t.Levels) == 0 || slices.Contains(values, "") {
			return nil, fmt.Errorf("its topology assignment has values %q for the levels %q", values, t.Levels)
		}
	}
	return all, nil
}

// stateFor maps the decision to the state of an AdmissionCheck, and says how long the workload waits if it returns its
// quota. Retried is the number of times that it has done so before. A workload that waits beyond its timeout returns
// its quota, so that others can use it. No finding rejects a workload for good.
func stateFor(d gate.Decision, retried int) (state string, after time.Duration) {
	switch {
	case !d.Waits():
		return stateReady, 0
	case d.Action == gate.Reassign:
		return stateRetry, retryDelay(retried)
	case d.Overdue:
		return stateRetry, 0
	}
	return statePending, 0
}

func retryDelay(retried int) time.Duration {
	delay := reassignDelay
	for ; retried > 0 && delay < maxRetryDelay; retried-- {
		delay *= 2
	}
	return min(delay, maxRetryDelay)
}
