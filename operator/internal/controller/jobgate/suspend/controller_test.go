package suspend

import (
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/controller/jobgate"
)

// A startedJob is a gated job that somebody started, and the controller that sees it.
type startedJob struct {
	*Reconciler
	seen *unstructured.Unstructured
}

func newStartedJob(t *testing.T) *startedJob {
	t.Helper()
	c := fake.NewClientBuilder().WithScheme(clientgoscheme.Scheme).WithReturnManagedFields().Build()
	suspended := true
	job := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "train", Labels: map[string]string{evenkeel.GatedKey: evenkeel.GatedValue}}, Spec: batchv1.JobSpec{Suspend: &suspended}}
	if err := c.Create(t.Context(), job, client.FieldOwner("kubectl-create")); err != nil {
		t.Fatal(err)
	}
	if err := c.Patch(t.Context(), job, client.RawPatch(types.MergePatchType, []byte(`{"spec": {"suspend": false}}`)), client.FieldOwner("argocd-controller")); err != nil {
		t.Fatal(err)
	}
	s := &startedJob{seen: &unstructured.Unstructured{}}
	s.Reconciler = &Reconciler{Evaluator: jobgate.Evaluator{Client: client.WithFieldOwner(c, "evenkeel"), Clock: clocktesting.NewFakePassiveClock(noon)}}
	s.seen.SetGroupVersionKind(batchv1.SchemeGroupVersion.WithKind("Job"))
	if err := c.Get(t.Context(), client.ObjectKeyFromObject(job), s.seen); err != nil {
		t.Fatal(err)
	}
	s.seen.SetManagedFields(nil) // as the cache has it
	return s
}

// look is a pass in which the cache has the job as it was seen. It returns what Events say.
func (s *startedJob) look(t *testing.T) (messages []string) {
	t.Helper()
	about := corev1.ObjectReference{Kind: "Job", Namespace: "team", Name: "train", UID: s.seen.GetUID()}
	if err := s.leaveToOthers(t.Context(), gatedJob{about: about}, s.seen, false); err != nil {
		t.Fatal(err)
	}
	var list corev1.EventList
	if err := s.Client.List(t.Context(), &list); err != nil {
		t.Fatal(err)
	}
	for _, e := range list.Items {
		messages = append(messages, e.Reason+": "+e.Message)
	}
	return messages
}

// The cache may show the job once more as it was before the controller removed its label.
func TestManagerThatOpenedGateIsSaidOnce(t *testing.T) {
	s := newStartedJob(t)
	for _, pass := range []string{"first", "second"} {
		said := s.look(t)
		if want := ReasonOpenedManually + ": the job was started by argocd-controller before its nodes were proven"; len(said) != 1 || said[0] != want {
			t.Errorf("after the %s pass, the Events are %q; want %q alone", pass, said, want)
		}
	}
}

// Somebody changes the job after the cache has seen it started: the change is another event, which has the same manager.
func TestManagerThatOpenedGateIsSaidAfterAnotherChange(t *testing.T) {
	s := newStartedJob(t)
	changed := s.seen.DeepCopy()
	status := client.RawPatch(types.MergePatchType, []byte(`{"metadata": {"annotations": {"a": "b"}}}`))
	if err := s.Client.Patch(t.Context(), changed, status, client.FieldOwner("job-controller")); err != nil {
		t.Fatal(err)
	}
	if said := s.look(t); len(said) > 0 {
		t.Errorf("of a job that has changed since, the Events are %q", said)
	}
	s.seen = changed
	if said := s.look(t); len(said) != 1 || said[0] != ReasonOpenedManually+": the job was started by argocd-controller before its nodes were proven" {
		t.Errorf("the Events are %q", said)
	}
}

func TestLastManagerOfField(t *testing.T) {
	second := metav1.NewTime(noon)
	later := metav1.NewTime(noon.Add(1e9))
	entry := func(manager string, at *metav1.Time, fields string) metav1.ManagedFieldsEntry {
		e := metav1.ManagedFieldsEntry{Manager: manager, Time: at}
		if fields != "" {
			e.FieldsV1 = metav1.NewFieldsV1(fields)
		}
		return e
	}
	const suspend = `{"f:spec":{".":{},"f:suspend":{}}}`
	for name, test := range map[string]struct {
		entries []metav1.ManagedFieldsEntry
		want    string
	}{
		"nobody":                          {nil, ""},
		"the only one":                    {[]metav1.ManagedFieldsEntry{entry("a", &second, suspend)}, "a"},
		"the later one":                   {[]metav1.ManagedFieldsEntry{entry("a", &second, suspend), entry("b", &later, suspend)}, "b"},
		"the later one is first":          {[]metav1.ManagedFieldsEntry{entry("b", &later, suspend), entry("a", &second, suspend)}, "b"},
		"a label of that name":            {[]metav1.ManagedFieldsEntry{entry("a", &second, `{"f:metadata":{"f:labels":{"f:suspend":{}}}}`), entry("b", &second, suspend)}, "b"},
		"a field of the pods' template":   {[]metav1.ManagedFieldsEntry{entry("a", &later, `{"f:spec":{"f:template":{"f:suspend":{}}}}`), entry("b", &second, suspend)}, "b"},
		"without a time":                  {[]metav1.ManagedFieldsEntry{entry("a", nil, suspend), entry("b", &second, suspend)}, "b"},
		"without fields":                  {[]metav1.ManagedFieldsEntry{entry("a", &later, ""), entry("b", &second, suspend)}, "b"},
		"fields that cannot be read":      {[]metav1.ManagedFieldsEntry{entry("a", &later, `{"f:spec"`), entry("b", &second, suspend)}, "b"},
		"fields that are not an object":   {[]metav1.ManagedFieldsEntry{entry("a", &later, `{"f:spec":[]}`), entry("b", &second, suspend)}, "b"},
		"only fields of others are there": {[]metav1.ManagedFieldsEntry{entry("a", &later, `{"f:status":{}}`)}, ""},
	} {
		object := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{ManagedFields: test.entries}}
		if got := lastManager(object, []string{"spec", "suspend"}); got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}
