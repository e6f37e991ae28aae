package admission

import (
	"encoding/json"
	"strings"
	"testing"

	jsonpatch "github.com/evanphx/json-patch/v5"
	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// gatingPolicy gates jobs of the profile default.
func gatingPolicy(optOut evenkeel.GateOptOut) *evenkeel.NetworkCheckPolicy {
	p := &evenkeel.NetworkCheckPolicy{ObjectMeta: metav1.ObjectMeta{Name: "all"}}
	p.Spec.Triggers.JobStart = evenkeel.SwitchEnabled
	p.Spec.Gate.OptOut = optOut
	return p
}

// batchJob is a Job: its labels and annotations as JSON, and whether it is suspended.
func batchJob(labels, annotations, suspend string) []byte {
	return []byte(`{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train", "labels": {` + labels + `}, "annotations": {` + annotations +
		`}}, "spec": {"suspend": ` + suspend + `, "template": {"spec": {"containers": [{"name": "main"}]}}}}`)
}

const (
	wants    = `"evenkeel.dev/profile": "default"`
	disabled = `, "evenkeel.dev/gate": "Disabled"`
	isGated  = `"evenkeel.dev/gated": "true"`
)

// patched is the object with the changes of the response.
func patched(t *testing.T, object []byte, response admission.Response) []byte {
	t.Helper()
	if len(response.Patches) == 0 {
		return object
	}
	patch, err := json.Marshal(response.Patches)
	if err != nil {
		t.Fatal(err)
	}
	decoded, err := jsonpatch.DecodePatch(patch)
	if err != nil {
		t.Fatal(err)
	}
	if object, err = decoded.Apply(object); err != nil {
		t.Fatal(err)
	}
	return object
}

// after is the job that the response makes of the object: suspended, and the value of the label.
func after(t *testing.T, object []byte, response admission.Response) string {
	t.Helper()
	job := &unstructured.Unstructured{}
	if err := json.Unmarshal(patched(t, object, response), &job.Object); err != nil {
		t.Fatal(err)
	}
	if job.GetAnnotations()[evenkeel.ProfileKey] == "" {
		return "no profile"
	}
	text := "runs"
	if suspended, _ := workload.Suspended(job); suspended {
		text = "suspended"
	}
	if label := job.GetLabels()[evenkeel.GatedKey]; label != "" {
		text += ", gated " + label
	}
	return text
}

func TestGateOfNewJob(t *testing.T) {
	for name, test := range map[string]struct {
		optOut                       evenkeel.GateOptOut
		labels, annotations, suspend string
		want, refused                string
	}{
		"a job":                                      {"", "", wants, "false", "suspended, gated true", ""},
		"its user turns the gate off":                {"", "", wants + disabled, "false", "runs", ""},
		"its user turns a mandatory gate off":        {"Forbidden", "", wants + disabled, "false", "", "NetworkCheckPolicy all gates every job"},
		"suspended by its user":                      {"", "", wants, "true", "suspended", ""},
		"suspended by its user, a mandatory gate":    {"Forbidden", "", wants, "true", "suspended, gated suspended", ""},
		"copied from a gated job":                    {"", isGated, wants, "true", "suspended, gated true", ""},
		"copied from a gated job, without a gate":    {"", isGated, wants + disabled, "true", "runs", ""},
		"copied from one that its user suspended":    {"", `"evenkeel.dev/gated": "suspended"`, wants, "true", "suspended", ""},
		"with the label, which its user has written": {"", isGated, wants, "false", "suspended, gated true", ""},
		"copied from a gated job, in a queue":        {"", isGated + `, "kueue.x-k8s.io/queue-name": "team"`, wants, "true", "suspended", ""},
		"in a queue, where a gate is mandatory":      {"Forbidden", `"kueue.x-k8s.io/queue-name": "team"`, wants + disabled, "true", "suspended", ""},
	} {
		t.Run(name, func(t *testing.T) {
			reader := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(profile("default", nil), gatingPolicy(test.optOut)).Build()
			text := batchJob(test.labels, test.annotations, test.suspend)
			response := Workloads(reader, reader, reductionImage).Handler.Handle(t.Context(), job{raw: string(text)}.request(t, admissionv1.Create))
			if test.refused != "" {
				if response.Allowed || !strings.Contains(response.Result.Message, test.refused) {
					t.Errorf("%+v", response)
				}
				return
			}
			if got := after(t, text, response); !response.Allowed || got != test.want {
				t.Errorf("%s, want %s: %+v", got, test.want, response.Result)
			}
		})
	}
}

// GitOps makes a job again what it is in Git. That alone does not open its gate.
func TestGateStaysClosedOnUpdate(t *testing.T) {
	queued := `"kueue.x-k8s.io/queue-name": "team"`
	for name, test := range map[string]struct {
		policy          *evenkeel.NetworkCheckPolicy
		before, updated []byte
		want, warns     string
	}{
		"GitOps resumes it":               {gatingPolicy(""), batchJob(isGated, wants, "true"), batchJob(isGated, wants, "false"), "suspended, gated true", "evenkeel.dev/gate to Disabled"},
		"GitOps resumes it, and prunes":   {gatingPolicy(""), batchJob(isGated, wants, "true"), batchJob("", wants, "false"), "suspended, gated true", "stays suspended"},
		"the label alone goes":            {gatingPolicy(""), batchJob(isGated, wants, "true"), batchJob("", wants, "true"), "suspended, gated true", "stays suspended"},
		"the profile goes":                {gatingPolicy(""), batchJob(isGated, wants, "true"), batchJob(isGated, "", "true"), "suspended, gated true", "stays suspended"},
		"something else changes":          {gatingPolicy(""), batchJob(isGated, wants, "true"), batchJob(isGated+`, "a": "b"`, wants, "true"), "suspended, gated true", ""},
		"its user opens the gate":         {gatingPolicy(""), batchJob(isGated, wants, "true"), batchJob("", wants+disabled, "false"), "runs", ""},
		"its user opens a mandatory gate": {gatingPolicy("Forbidden"), batchJob(isGated, wants, "true"), batchJob("", wants+disabled, "false"), "suspended, gated true", "NetworkCheckPolicy all makes its gate mandatory"},
		"its user wants it to start now":  {gatingPolicy("Forbidden"), batchJob(`"evenkeel.dev/gated": "suspended"`, wants, "true"), batchJob(`"evenkeel.dev/gated": "suspended"`, wants, "false"), "suspended, gated true", "mandatory"},
		"Kueue starts it":                 {gatingPolicy("Forbidden"), batchJob(isGated+", "+queued, wants, "true"), batchJob(queued, wants, "false"), "runs", ""},
		"no policy gates it any more":     {&evenkeel.NetworkCheckPolicy{ObjectMeta: metav1.ObjectMeta{Name: "all"}}, batchJob(isGated, wants, "true"), batchJob("", wants, "false"), "runs", ""},
		"it has no gate":                  {gatingPolicy("Forbidden"), batchJob("", wants, "true"), batchJob("", wants, "false"), "runs", ""},
	} {
		t.Run(name, func(t *testing.T) {
			reader := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(profile("default", nil), test.policy).Build()
			request := job{raw: string(test.updated)}.request(t, admissionv1.Update)
			request.OldObject = runtime.RawExtension{Raw: test.before}
			response := Workloads(reader, reader, reductionImage).Handler.Handle(t.Context(), request)
			if got := after(t, test.updated, response); !response.Allowed || got != test.want {
				t.Errorf("%s, want %s: %+v", got, test.want, response.Result)
			}
			if said := strings.Join(response.Warnings, " "); test.warns != "" && !strings.Contains(said, test.warns) {
				t.Errorf("warned %q, want %q", said, test.warns)
			}
		})
	}
}
