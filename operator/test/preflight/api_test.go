package preflight

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// stored is what the API server would store of the object.
func stored(t *testing.T, text string, into any) map[string]any {
	t.Helper()
	object := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(text), &object.Object); err != nil {
		t.Fatal(err)
	}
	if err := admin.Create(t.Context(), object, client.DryRunAll, client.FieldValidation("Strict")); err != nil {
		t.Fatal(err)
	}
	spec := object.Object["spec"].(map[string]any)
	if into != nil {
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(spec, into); err != nil {
			t.Fatal(err)
		}
	}
	return spec
}

const minimalCheck = `{apiVersion: evenkeel.dev/v1alpha1, kind: NetworkCheck, metadata: {name: minimal, namespace: default}, spec: {nodes: {selector: {}}, runner: {type: Bench}}}`

// TestDefaultsAreInTheSchema has objects that name nothing that has a default. What is stored says what counts, and a later version
// with other defaults does not change it.
func TestDefaultsAreInTheSchema(t *testing.T) {
	for name, test := range map[string]struct{ object, want string }{
		"NetworkCheck": {minimalCheck, `
nodes: {selector: {}}
stages: [Capacity, Local, Pairs]
profileName: default
busyNodes: Skip
runner: {type: Bench, launcher: Auto}
sweep: {collective: AllReduce, iterations: 20}
poolLabel: nvidia.com/gpu.product
thresholds: {minPercentOfMedian: 85}
runTimeoutSeconds: 300`},
		"NetworkCheckPolicy": {`{apiVersion: evenkeel.dev/v1alpha1, kind: NetworkCheckPolicy, metadata: {name: minimal}, spec: {check: {runner: {type: Bench}}}}`, `
priority: 0
triggers: {newNodes: Enabled, jobEnd: Enabled, suspicions: Enabled, repairs: Enabled, jobStart: Disabled}
freshnessSeconds: 86400
check:
  stages: [Capacity, Local, Pairs]
  profileName: default
  busyNodes: Skip
  runner: {type: Bench, launcher: Auto}
  sweep: {collective: AllReduce, iterations: 20}
  poolLabel: nvidia.com/gpu.product
  thresholds: {minPercentOfMedian: 85}
  runTimeoutSeconds: 300
onFail: {taint: Disabled, maxUnhealthyPercent: 20}
onSuspicion: {avoid: Disabled}
gate: {timeoutSeconds: 1800, onTimeout: Start, optOut: Allowed}
history: 5`},
		"NetworkProfile": {`{apiVersion: evenkeel.dev/v1alpha1, kind: NetworkProfile, metadata: {name: minimal}, spec: {plugin: {image: "p@sha256:` + strings.Repeat("0", 64) + `"}}}`, `
plugin: {image: "p@sha256:` + strings.Repeat("0", 64) + `", delivery: Auto, path: /plugin, conflictPolicy: Keep}
transport: {mode: Auto, encryption: "Off", rdma: {count: 1, memoryLock: RuntimeDefault, network: Untrusted}}
reduction: {mode: OnRequest, maxServers: 16, server: {cpu: "2", memory: 1Gi, placement: {mode: Spread}}}`},
	} {
		var want map[string]any
		if err := yaml.Unmarshal([]byte(test.want), &want); err != nil {
			t.Fatal(err)
		}
		got := stored(t, test.object, nil)
		if diff := cmp.Diff(plain(t, want), plain(t, got)); diff != "" {
			t.Errorf("%s is stored otherwise than wanted (-want +got):\n%s", name, diff)
		}
	}
}

// plain has numbers of one type only.
func plain(t *testing.T, object any) string {
	t.Helper()
	text, err := yaml.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestDefaultsOfSchemaAndCodeAreTheSame: the code fills in what follows from other fields, and what has no API server before it.
func TestDefaultsOfSchemaAndCodeAreTheSame(t *testing.T) {
	var check evenkeel.NetworkCheckSpec
	stored(t, minimalCheck, &check)
	options := evenkeel.CheckOptions{Runner: evenkeel.RunnerSpec{Type: evenkeel.RunnerBench}}.WithDefaults()
	percent := int32(85) // of package pairing, where thresholds are
	options.Thresholds.MinPercentOfMedian = &percent
	if diff := cmp.Diff(options, check.WithDefaults()); diff != "" {
		t.Errorf("options of a check differ (-code +schema):\n%s", diff)
	}
	var profile evenkeel.NetworkProfileSpec
	stored(t, `{apiVersion: evenkeel.dev/v1alpha1, kind: NetworkProfile, metadata: {name: minimal}, spec: {plugin: {delivery: Preinstalled}}}`, &profile)
	if diff := cmp.Diff(evenkeel.ReductionServerSpec{}.WithDefaults(), profile.Reduction.Server.WithDefaults()); diff != "" {
		t.Errorf("reduction servers differ (-code +schema):\n%s", diff)
	}
}

// TestCoreTypesAreValidated: the types are those of pods, and what a pod could not have is refused in the object.
func TestCoreTypesAreValidated(t *testing.T) {
	check := func(runner string) string {
		return strings.Replace(minimalCheck, "type: Bench", "type: Bench, "+runner, 1)
	}
	for runner, want := range map[string]string{
		`tolerations: [{key: a, operator: Exists, effect: NoExecute, tolerationSeconds: 30}, {operator: Exists}, {key: a, value: b}]`: "",
		`resources: {requests: {cpu: 2}, limits: {memory: 8Gi, example.com/nic: 1}}`:                                                  "",
		`environment: [{name: A, value: b}]`:                                                 "",
		`tolerations: [{key: a, operator: Exists, value: b}]`:                                "goes without a value",
		`tolerations: [{value: b}]`:                                                          "a toleration without a key has the operator Exists",
		`tolerations: [{key: a, operator: Resembles}]`:                                       "operator is Exists or Equal",
		`tolerations: [{key: a, operator: Exists, effect: NoWay}]`:                           "effect is NoSchedule, PreferNoSchedule or NoExecute",
		`resources: {claims: [{name: gpu}]}`:                                                 "claims are not supported",
		`environment: [{name: A, valueFrom: {secretKeyRef: {name: evenkeel-ca, key: key}}}]`: "valueFrom",
	} {
		object := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(check(runner)), &object.Object); err != nil {
			t.Fatal(err)
		}
		err := admin.Create(t.Context(), object, client.DryRunAll, client.FieldValidation("Strict"))
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", runner, err, want)
		}
	}
}

// TestPolicyValidation has what used to be found when the policy ran.
func TestPolicyValidation(t *testing.T) {
	policy := `{apiVersion: evenkeel.dev/v1alpha1, kind: NetworkCheckPolicy, metadata: {name: bad}, spec: {TRIGGERS, check: {runner: {type: Bench}OPTIONS}}}`
	for _, test := range []struct{ triggers, options, want string }{
		{`triggers: {schedule: "0 3 * * mon-fri"}`, "", ""},
		{`triggers: {schedule: "*/15 0,12 1-7 JAN ?"}`, "", ""},
		{`triggers: {schedule: "@daily"}`, "", ""},
		{`triggers: {schedule: sometimes}`, "", "a cron expression of five fields"},
		{`triggers: {schedule: "0 3 * *"}`, "", "a cron expression of five fields"},
		{`triggers: {schedule: "@now"}`, "", "a cron expression of five fields"},
		// A check that is deleted at once may not have been counted; history says how many are kept.
		{`priority: 1`, ", ttlSecondsAfterFinished: 0", "ttlSecondsAfterFinished"},
	} {
		object := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(strings.NewReplacer("TRIGGERS", test.triggers, "OPTIONS", test.options).Replace(policy)), &object.Object); err != nil {
			t.Fatal(err)
		}
		err := admin.Create(t.Context(), object, client.DryRunAll, client.FieldValidation("Strict"))
		if test.want == "" && err != nil || test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)) {
			t.Errorf("%s%s: %v, want %q", test.triggers, test.options, err, test.want)
		}
	}
}
