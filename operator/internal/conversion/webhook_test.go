package conversion

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
)

func post(t *testing.T, body string) *httptest.ResponseRecorder {
	t.Helper()
	recorder := httptest.NewRecorder()
	Handler().ServeHTTP(recorder, httptest.NewRequest(http.MethodPost, "/convert", strings.NewReader(body)))
	return recorder
}

func review(version string, objects ...string) string {
	return fmt.Sprintf(`{"apiVersion": "apiextensions.k8s.io/v1", "kind": "ConversionReview",
		"request": {"uid": "7", "desiredAPIVersion": %q, "objects": [%s]}}`, version, strings.Join(objects, ","))
}

func TestWebhookConvertsAllOrNothing(t *testing.T) {
	const good = `{"apiVersion": "evenkeel.dev/v1alpha1", "kind": "NetworkCheckPolicy",
		"spec": {"history": 9007199254740993}}`
	const bad = `{"apiVersion": "evenkeel.dev/v1alpha1", "kind": "Node"}`
	for name, test := range map[string]struct {
		body, status, message string
		converted             []string
	}{
		"list": {review(beta, good, good), "Success", "", []string{
			`{"apiVersion":"evenkeel.dev/v1beta1","kind":"NetworkCheckPolicy","spec":{"historyLimit":9007199254740993}}`,
			`{"apiVersion":"evenkeel.dev/v1beta1","kind":"NetworkCheckPolicy","spec":{"historyLimit":9007199254740993}}`,
		}},
		"foreign kind": {review(beta, good, bad), "Failure", `object 2 of 2: kind "Node"`, nil},
		"no object":    {review(beta, "5"), "Failure", "object 1 of 1: it is no JSON object", nil},
	} {
		recorder := post(t, test.body)
		var got apiextensionsv1.ConversionReview
		if err := json.Unmarshal(recorder.Body.Bytes(), &got); err != nil || recorder.Code != http.StatusOK {
			t.Fatalf("%s: %d, %v: %s", name, recorder.Code, err, recorder.Body)
		}
		if got.Kind != "ConversionReview" || got.Response.UID != "7" || got.Response.Result.Status != test.status ||
			!strings.HasPrefix(got.Response.Result.Message, test.message) {
			t.Errorf("%s: %s", name, recorder.Body)
		}
		if len(got.Response.ConvertedObjects) != len(test.converted) {
			t.Fatalf("%s: %d objects", name, len(got.Response.ConvertedObjects))
		}
		for i, want := range test.converted {
			if is := string(got.Response.ConvertedObjects[i].Raw); is != want {
				t.Errorf("%s: %s, want %s", name, is, want)
			}
		}
	}
}

func TestWebhookRefusesWhatIsNoReview(t *testing.T) {
	for name, body := range map[string]string{
		"no JSON": "x", "no request": `{"kind": "ConversionReview"}`,
		"too long": `{"kind": "` + strings.Repeat("x", maxRequest) + `"}`,
	} {
		if recorder := post(t, body); recorder.Code != http.StatusBadRequest {
			t.Errorf("%s: %d", name, recorder.Code)
		}
	}
}
