package admission

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// The job's user is told that nobody proves its nodes, where a policy says that somebody has to.
func TestWarnWithoutKueue(t *testing.T) {
	const (
		queued = `"kueue.x-k8s.io/queue-name": "batch"`
		gpu    = `{"name": "main", "resources": {"limits": {"nvidia.com/gpu": 1}}}`
		none   = http.StatusNotFound
	)
	for name, test := range map[string]struct {
		optOut              evenkeel.GateOptOut
		labels, annotations string
		kueue               int // what the API server answers about the group
		warns               bool
	}{
		"in a queue, without Kueue":           {"", queued, wants, none, true},
		"in a queue":                          {"", queued, wants, http.StatusOK, false},
		"in no queue":                         {"", "", wants, none, false},
		"its user turns the gate off":         {"", queued, wants + disabled, none, false},
		"its user turns a mandatory gate off": {"Forbidden", queued, wants + disabled, none, true},
		"with the profile of the namespace":   {"", queued, "", none, true},
		"without a profile":                   {"", queued, `"evenkeel.dev/profile": ""`, none, false},
		"where the API server does not say":   {"", queued, wants, http.StatusInternalServerError, false},
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path != "/apis/kueue.x-k8s.io" {
					t.Errorf("it asks for %s", r.URL.Path)
				}
				w.WriteHeader(test.kueue)
			}))
			defer server.Close()
			groups, err := discovery.NewDiscoveryClientForConfig(&rest.Config{Host: server.URL})
			if err != nil {
				t.Fatal(err)
			}
			team := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "team", Labels: map[string]string{evenkeel.DefaultProfileKey: "default"}}}
			reader := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(profile("default", nil), gatingPolicy(test.optOut), team).Build()
			text := strings.Replace(string(batchJob(test.labels, test.annotations, "false")), `{"name": "main"}`, gpu, 1)
			webhook := WarnWithoutKueue(Workloads(reader, reader, reductionImage), reader, groups.RESTClient())
			response := webhook.Handler.Handle(t.Context(), job{raw: text}.request(t, admissionv1.Create))
			if said := strings.Join(response.Warnings, " "); !response.Allowed || strings.Contains(said, "batch: the cluster has no Kueue") != test.warns {
				t.Errorf("allowed %t, warned %q", response.Allowed, said)
			}
		})
	}
}
