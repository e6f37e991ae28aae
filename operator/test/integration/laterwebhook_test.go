package integration

import (
	"encoding/json"
	"encoding/pem"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// laterWebhook has somebody else's webhook apply the JSON patch to new objects of the rule in the namespace. It comes after
// Evenkeel's, which the API server then calls again.
func laterWebhook(t *testing.T, namespace string, rule admissionregistrationv1.Rule, patch string) {
	t.Helper()
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var review admissionv1.AdmissionReview
		text, err := io.ReadAll(r.Body)
		if err != nil || json.Unmarshal(text, &review) != nil {
			http.Error(w, "not a review", http.StatusBadRequest)
			return
		}
		kind := admissionv1.PatchTypeJSONPatch
		review.Response = &admissionv1.AdmissionResponse{UID: review.Request.UID, Allowed: true, PatchType: &kind, Patch: []byte(patch)}
		review.Request = nil
		if err := json.NewEncoder(w).Encode(review); err != nil {
			t.Errorf("answer: %v", err)
		}
	}))
	t.Cleanup(server.Close)
	fail, none := admissionregistrationv1.Fail, admissionregistrationv1.SideEffectClassNone
	configuration := &admissionregistrationv1.MutatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: "zz-" + namespace}, // configurations are called in the order of their names
		Webhooks: []admissionregistrationv1.MutatingWebhook{{
			Name: "later.example.com", AdmissionReviewVersions: []string{"v1"}, SideEffects: &none, FailurePolicy: &fail,
			ClientConfig: admissionregistrationv1.WebhookClientConfig{
				URL: &server.URL, CABundle: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}),
			},
			NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: namespace}},
			Rules:             []admissionregistrationv1.RuleWithOperations{{Operations: []admissionregistrationv1.OperationType{admissionregistrationv1.Create}, Rule: rule}},
		}},
	}
	if err := admin.Create(t.Context(), configuration); err != nil {
		t.Fatal(err)
	}
	remove(t, configuration)
}
