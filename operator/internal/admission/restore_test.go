package admission

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admission/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// An update that makes templates what they are in a file gets back all that the webhook changed when the job was created: also devices
// and affinity, which JobSet's own webhook would refuse to see changed. Items of the list may have changed places.
func TestUpdateRestoresTemplates(t *testing.T) {
	offered := profile("default", func(s *evenkeel.NetworkProfileSpec) { s.Transport.Mode = evenkeel.TransportRDMA })
	offered.Status.RDMAResourceName = "rdma/hca"
	reader := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(offered).Build()
	item := func(name string) string {
		return fmt.Sprintf(`{"name":%q,"template":{"spec":{"template":{"metadata":{"labels":{"app":%[1]q}},"spec":{"containers":[{"name":%[1]q,"resources":{"limits":{"nvidia.com/gpu":"8"}}}]}}}}}`, name)
	}
	set := func(labels string, items ...string) []byte {
		return []byte(`{"apiVersion":"jobset.x-k8s.io/v1alpha2","kind":"JobSet","metadata":{"name":"train","labels":{` + labels + `},"annotations":{"evenkeel.dev/profile":"default"}},"spec":{"suspend":true,"replicatedJobs":[` + strings.Join(items, ",") + `]}}`)
	}
	const queued, zone = `"kueue.x-k8s.io/queue-name":"q"`, `{"matchExpressions":[{"key":"zone","operator":"In","values":["a"]}]}`
	handle := func(operation admissionv1.Operation, object, old []byte) []byte {
		t.Helper()
		request := job{raw: string(object)}.request(t, operation)
		request.OldObject = runtime.RawExtension{Raw: old}
		return patched(t, object, Workloads(reader, reader, "").Handler.Handle(t.Context(), request))
	}
	items := func(object []byte) (byName map[string]any) {
		t.Helper()
		var parsed struct {
			Spec struct{ ReplicatedJobs []map[string]any }
		}
		if err := json.Unmarshal(object, &parsed); err != nil {
			t.Fatal(err)
		}
		byName = map[string]any{}
		for _, j := range parsed.Spec.ReplicatedJobs {
			byName[j["name"].(string)] = j
		}
		return byName
	}
	for name, labels := range map[string]string{"in a queue": queued, "in none": ""} {
		made := handle(admissionv1.Create, set(labels, item("a"), item("b")), nil)
		if text := string(made); !strings.Contains(text, `"rdma/hca":"1"`) || !strings.Contains(text, "evenkeel.dev/rdma-resource") || strings.Contains(text, "affinity") != (labels == queued) {
			t.Fatalf("%s: the new JobSet is %s", name, text)
		}
		again := handle(admissionv1.Update, set(labels, item("b"), item("a")), made)
		if diff := cmp.Diff(items(made), items(again)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
		// An apply by the server keeps labels, annotations and resources, and replaces the list of a node affinity.
		own := strings.ReplaceAll(string(set(labels, item("a"))), `"spec":{"containers"`, `"spec":{"affinity":{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[`+zone+`]}}},"containers"`)
		with := handle(admissionv1.Create, []byte(own), nil)
		taken := strings.ReplaceAll(string(with), `,{"key":"evenkeel.dev/network","operator":"NotIn","values":["unhealthy"]}`, "")
		if (taken == string(with)) != (labels == "") {
			t.Fatalf("%s: nothing can be taken from %s", name, with)
		}
		if diff := cmp.Diff(items(with), items(handle(admissionv1.Update, []byte(taken), with))); diff != "" {
			t.Errorf("%s, with an affinity of its own: %s", name, diff)
		}
		// The rule that was never there is none that an update takes.
		if got := handle(admissionv1.Update, []byte(taken), []byte(taken)); string(got) != taken {
			t.Errorf("%s: a job that had no rule gets one: %s", name, got)
		}
		if same := handle(admissionv1.Update, made, made); string(same) != string(made) {
			t.Errorf("%s: an update that takes nothing is changed: %s", name, same)
		}
		plain := set(labels, item("a"))
		if got := handle(admissionv1.Update, plain, plain); string(got) != string(plain) {
			t.Errorf("%s: a job that had no profile gets one: %s", name, got)
		}
	}
}
