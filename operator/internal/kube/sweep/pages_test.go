package sweep

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// An API server leaves out empty fields, and the token of the last page. The client empties the list before it decodes the next page
// into it; otherwise objects would keep what an earlier page had in their place, and the last page would never come.
func TestPagesHaveNothingOfEarlierOnes(t *testing.T) {
	const first, second = `"metadata": {"continue": "next"}, "items": [{"metadata": {"name": "a", "labels": {"x": "y"}}, "status": {"conditions": [{"type": "Complete", "status": "True"}]}}]`,
		`"metadata": {}, "items": [{"metadata": {"name": "b"}, "status": {}}, {"metadata": {"name": "c"}}]`
	requests := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		text := first
		if r.URL.Query().Get("continue") != "" {
			text = second
		}
		if requests++; requests > 2 {
			http.Error(w, "there are two pages", http.StatusGone)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"apiVersion": "evenkeel.dev/v1alpha1", "kind": "NetworkCheckList", %s}`, text)
	}))
	defer server.Close()
	scheme := runtime.NewScheme()
	if err := evenkeel.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	mapper := meta.NewDefaultRESTMapper(nil)
	mapper.Add(evenkeel.GroupVersion.WithKind("NetworkCheck"), meta.RESTScopeNamespace)
	c, err := client.New(&rest.Config{Host: server.URL}, client.Options{Scheme: scheme, Mapper: mapper})
	if err != nil {
		t.Fatal(err)
	}
	var kept []*evenkeel.NetworkCheck
	var list evenkeel.NetworkCheckList
	err = Pages(t.Context(), c, &list, func() error {
		for i := range list.Items {
			kept = append(kept, &list.Items[i])
		}
		return nil
	})
	if err != nil || len(kept) != 3 {
		t.Fatalf("%d objects, %v", len(kept), err)
	}
	for i, want := range []struct {
		name     string
		complete bool
		labels   int
	}{{"a", true, 1}, {"b", false, 0}, {"c", false, 0}} {
		if is := kept[i]; is.Name != want.name || meta.IsStatusConditionPresentAndEqual(is.Status.Conditions, "Complete", metav1.ConditionTrue) != want.complete || len(is.Labels) != want.labels {
			t.Errorf("object %d is %s with labels %v and conditions %v, want %+v", i, is.Name, is.Labels, is.Status.Conditions, want)
		}
	}
}
