package admission

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/reduction"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

const reductionImage = "registry.example.com/servers:1.0.0"

const image = "registry.example.com/plugin@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

func newScheme(t *testing.T) *runtime.Scheme {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(scheme), evenkeel.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	return scheme
}

func profile(name string, change func(*evenkeel.NetworkProfileSpec)) *evenkeel.NetworkProfile {
	p := &evenkeel.NetworkProfile{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: evenkeel.NetworkProfileSpec{Plugin: evenkeel.PluginSpec{Image: image}}}
	if change != nil {
		change(&p.Spec)
	}
	return p
}

// A job is the part of a PyTorchJob that matters here.
type job struct {
	annotations map[string]string
	owners      []metav1.OwnerReference
	templates   map[string][]string // containers, by replica
	raw         string              // instead of all that
}

func (j job) request(t *testing.T, operation admissionv1.Operation) admission.Request {
	t.Helper()
	text := []byte(j.raw)
	if j.raw == "" {
		replicas := map[string]any{}
		for name, containers := range j.templates {
			var list []any
			for _, c := range containers {
				list = append(list, map[string]any{"name": c})
			}
			replicas[name] = map[string]any{"template": map[string]any{"spec": map[string]any{"containers": list}}}
		}
		object := map[string]any{
			"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob",
			"metadata": metav1.ObjectMeta{Name: "train", Annotations: j.annotations, OwnerReferences: j.owners},
			"spec":     map[string]any{"pytorchReplicaSpecs": replicas},
		}
		var err error
		if text, err = json.Marshal(object); err != nil {
			t.Fatal(err)
		}
	}
	return admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{
		UID: "creation", Operation: operation, Namespace: "team", Kind: metav1.GroupVersionKind{Kind: "PyTorchJob"}, Object: runtime.RawExtension{Raw: text},
	}}
}

func asks(annotations ...string) map[string]string {
	m := map[string]string{evenkeel.ProfileKey: "default"}
	for i := 0; i < len(annotations); i += 2 {
		m[annotations[i]] = annotations[i+1]
	}
	return m
}

var masterAndWorker = map[string][]string{"Master": {"pytorch", "logger"}, "Worker": {"pytorch"}}

// TestWorkloadWebhookWarnsOfSkippedJobs has jobs that controllers made, such as those of a CronJob.
func TestWorkloadWebhookWarnsOfSkippedJobs(t *testing.T) {
	reader, controller := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(profile("default", nil)).Build(), true
	owners := `"ownerReferences":[{"apiVersion":"batch/v1","kind":"CronJob","name":"nightly","uid":"u","controller":true}]`
	made := func(template string) job {
		return job{raw: `{"apiVersion":"batch/v1","kind":"Job","metadata":{"name":"nightly-1","annotations":{"evenkeel.dev/profile":"default"},` + owners +
			`},"spec":{"template":{` + template + `"spec":{"containers":[{"name":"c"}]}}}}`}
	}
	pinned := `"metadata":{"labels":{"evenkeel.dev/profile":"default"},"annotations":{"evenkeel.dev/delivery":"ImageVolume"}},`
	for name, test := range map[string]struct {
		job       job
		operation admissionv1.Operation
		warned    bool
	}{
		"not pinned":          {made(""), admissionv1.Create, true},
		"only the label":      {made(`"metadata":{"labels":{"evenkeel.dev/profile":"default"}},`), admissionv1.Create, true},
		"pinned by its owner": {made(pinned), admissionv1.Create, false},
		"updated":             {made(""), admissionv1.Update, false},
		"some templates":      {job{annotations: asks(), templates: masterAndWorker, owners: []metav1.OwnerReference{{Kind: "TrainJob", Name: "t", Controller: &controller}}}, admissionv1.Create, true},
	} {
		response := Workloads(reader, reader, reductionImage).Handler.Handle(t.Context(), test.job.request(t, test.operation))
		if !response.Allowed || len(response.Patches) > 0 || (len(response.Warnings) == 1) != test.warned {
			t.Errorf("%s: allowed %t, %v, warnings %q", name, response.Allowed, response.Patches, response.Warnings)
		} else if test.warned && !strings.Contains(response.Warnings[0], "its pods run without the plugin") {
			t.Errorf("%s: %q", name, response.Warnings[0])
		}
	}
}

func TestWorkloadWebhook(t *testing.T) {
	reader := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "team", Labels: map[string]string{"team": "vision"}}},
		profile("default", nil),
		profile("for-vision", func(s *evenkeel.NetworkProfileSpec) {
			s.NamespaceSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"team": "vision"}}
		}),
		profile("for-speech", func(s *evenkeel.NetworkProfileSpec) {
			s.NamespaceSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"team": "speech"}}
		}),
		profile("for-nonsense", func(s *evenkeel.NetworkProfileSpec) {
			s.NamespaceSelector = &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "team", Operator: "Resembles"}}}
		}),
	).Build()
	controller := true
	for _, test := range []struct {
		name    string
		job     job
		patched bool
		refused string // part of the text, empty: allowed
	}{
		{"annotated", job{annotations: asks(), templates: masterAndWorker}, true, ""},
		{"not annotated", job{templates: masterAndWorker}, false, ""},
		{"made by another job", job{annotations: asks(), templates: masterAndWorker, owners: []metav1.OwnerReference{{Kind: "TrainJob", Controller: &controller}}}, false, ""},
		{"selected namespace", job{annotations: asks(evenkeel.ProfileKey, "for-vision"), templates: masterAndWorker}, true, ""},
		{"other namespace", job{annotations: asks(evenkeel.ProfileKey, "for-speech"), templates: masterAndWorker}, false, "is not for namespace team"},
		{"selector that is none", job{annotations: asks(evenkeel.ProfileKey, "for-nonsense"), templates: masterAndWorker}, false, "namespaceSelector"},
		{"unknown profile", job{annotations: asks(evenkeel.ProfileKey, "defualt"), templates: masterAndWorker}, false, "there are: default, for-nonsense, for-speech, for-vision"},
		{"chosen container of one template", job{annotations: asks(evenkeel.ContainersKey, "logger"), templates: map[string][]string{"Master": {"pytorch", "logger"}}}, true, ""},
		{"chosen container that a template lacks", job{annotations: asks(evenkeel.ContainersKey, "logger"), templates: masterAndWorker}, false, "names no container of spec.pytorchReplicaSpecs.Worker.template, which has pytorch"},
		{"reduction servers", job{annotations: asks(evenkeel.ReductionKey, "4"), templates: masterAndWorker}, true, ""},
		{"reduction servers without a profile", job{annotations: map[string]string{evenkeel.ReductionKey: "4"}, templates: masterAndWorker}, false, "evenkeel.dev/reduction: 4 needs a profile: add the annotation evenkeel.dev/profile"},
		{"reduction servers in a word", job{annotations: asks(evenkeel.ReductionKey, "four"), templates: masterAndWorker}, false, `"four": a number from 1 to 16, Auto or Off`},
		{"templates that are none", job{raw: `{"apiVersion":"kubeflow.org/v1","kind":"PyTorchJob","metadata":{"annotations":{"evenkeel.dev/profile":"default"}},"spec":{"pytorchReplicaSpecs":7}}`}, false, "spec.pytorchReplicaSpecs is not an object"},
		{"a kind we do not know", job{raw: `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"annotations":{"evenkeel.dev/profile":"default"}}}`}, false, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			response := Workloads(reader, reader, reductionImage).Handler.Handle(t.Context(), test.job.request(t, admissionv1.Create))
			if response.Allowed != (test.refused == "") {
				t.Fatalf("allowed %t: %v", response.Allowed, response.Result)
			}
			if test.refused != "" && (!strings.Contains(response.Result.Message, test.refused) || response.Result.Code != http.StatusForbidden) {
				t.Errorf("refused with %d %q, want %q", response.Result.Code, response.Result.Message, test.refused)
			}
			if (len(response.Patches) > 0) != test.patched {
				t.Errorf("patches %v", response.Patches)
			}
			for _, p := range response.Patches {
				if p.Operation != "add" {
					t.Errorf("%s of %s: it may only add", p.Operation, p.Path)
				}
			}
		})
	}
}

func TestWorkloadWebhookWithoutProfiles(t *testing.T) {
	reader := fake.NewClientBuilder().WithScheme(newScheme(t)).Build()
	response := Workloads(reader, reader, reductionImage).Handler.Handle(t.Context(), job{annotations: asks(), templates: masterAndWorker}.request(t, admissionv1.Create))
	if response.Allowed || !strings.Contains(response.Result.Message, "create a NetworkProfile first") {
		t.Errorf("%+v", response.Result)
	}
}

func TestWorkloadWebhookWithStaleCache(t *testing.T) {
	behind := fake.NewClientBuilder().WithScheme(newScheme(t)).Build()
	live := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(profile("default", nil)).Build()
	response := Workloads(behind, live, reductionImage).Handler.Handle(t.Context(), job{annotations: asks(), templates: masterAndWorker}.request(t, admissionv1.Create))
	if !response.Allowed || len(response.Patches) == 0 {
		t.Errorf("%+v", response)
	}
}

// Our own failures are not the user's: their status says so.
func TestWorkloadWebhookFailure(t *testing.T) {
	broken := fake.NewClientBuilder().WithScheme(newScheme(t)).WithInterceptorFuncs(interceptor.Funcs{
		Get: func(context.Context, client.WithWatch, client.ObjectKey, client.Object, ...client.GetOption) error {
			return errors.New("the cache is closed")
		},
	}).Build()
	for name, test := range map[string]struct {
		job  job
		code int32
	}{
		"reader": {job{annotations: asks(), templates: masterAndWorker}, http.StatusInternalServerError},
		"body":   {job{raw: "no JSON"}, http.StatusBadRequest},
	} {
		response := Workloads(broken, broken, reductionImage).Handler.Handle(t.Context(), test.job.request(t, admissionv1.Create))
		if response.Allowed || response.Result.Code != test.code {
			t.Errorf("%s: %+v, want %d", name, response.Result, test.code)
		}
	}
}

func TestWorkloadWebhookGatesJobs(t *testing.T) {
	zero, one := int32(0), int32(1)
	policy := func(unknown *int32) *evenkeel.NetworkCheckPolicy {
		p := &evenkeel.NetworkCheckPolicy{ObjectMeta: metav1.ObjectMeta{Name: "policy"}}
		p.Spec.Triggers.JobStart = evenkeel.SwitchEnabled
		p.Status.Unknown = unknown
		p.Status.Conditions = []metav1.Condition{{Type: evenkeel.ConditionReady, Status: metav1.ConditionTrue}}
		return p
	}
	const (
		plain   = `{"apiVersion":"kubeflow.org/v1","kind":"PyTorchJob","metadata":{"annotations":{"evenkeel.dev/profile":"default"}},"spec":{"pytorchReplicaSpecs":{"Worker":{"template":{"spec":{"containers":[{"name":"c"}]}}}}}}`
		volcano = `{"apiVersion":"batch.volcano.sh/v1alpha1","kind":"Job","metadata":{"annotations":{"evenkeel.dev/profile":"default"}},"spec":{"tasks":[{"template":{"spec":{"containers":[{"name":"c"}]}}}]}}`
	)
	with := func(old, new string) string { return strings.Replace(plain, old, new, 1) }
	for _, test := range []struct {
		name, job string
		policy    *evenkeel.NetworkCheckPolicy
		suspended bool
		label     string // path of the object that gets the gate's label
		refused   string
	}{
		{"nothing proven", plain, policy(&one), true, "/metadata/labels", ""},
		{"all proven", plain, policy(&zero), false, "", ""},
		{"no policy", plain, nil, false, "", ""},
		{"its user suspended it", with(`"spec":{`, `"spec":{"runPolicy":{"suspend":true},`), policy(&one), false, "", ""},
		{"its user started it", with(`"spec":{`, `"spec":{"runPolicy":{"suspend":false},`), policy(&one), true, "/metadata/labels", ""},
		{"in a queue of Kueue's", with(`"metadata":{`, `"metadata":{"labels":{"kueue.x-k8s.io/queue-name":"team"},`), policy(&one), false, "", ""},
		{"not wanted", with(`"default"`, `"default","evenkeel.dev/gate":"Disabled"`), policy(&one), false, "", ""},
		{"wanted", with(`"default"`, `"default","evenkeel.dev/gate":"Enabled"`), policy(&one), true, "/metadata/labels", ""},
		{"misspelt", with(`"default"`, `"default","evenkeel.dev/gate":"Of"`), policy(&one), false, "", `"Of": Enabled or Disabled`},
		{"a kind that cannot be suspended", volcano, policy(&one), false, "/spec/tasks/0/template/metadata", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			builder := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(profile("default", nil))
			if test.policy != nil {
				builder.WithObjects(test.policy)
			}
			reader := builder.Build()
			response := Workloads(reader, reader, reductionImage).Handler.Handle(t.Context(), job{raw: test.job}.request(t, admissionv1.Create))
			if test.refused != "" {
				if response.Allowed || !strings.Contains(response.Result.Message, test.refused) {
					t.Errorf("%+v", response)
				}
				return
			}
			if !response.Allowed {
				t.Fatalf("%+v", response.Result)
			}
			text, err := json.Marshal(response.Patches)
			if err != nil {
				t.Fatal(err)
			}
			if suspended := strings.Contains(string(text), `"suspend":true`) || strings.Contains(string(text), `suspend","value":true`); suspended != test.suspended {
				t.Errorf("suspended %t: %s", suspended, text)
			}
			label := ""
			for _, p := range response.Patches {
				if value, err := json.Marshal(p.Value); err == nil && strings.Contains(string(value), `"evenkeel.dev/gated":"true"`) {
					label = p.Path
				}
			}
			if label != test.label {
				t.Errorf("the label is at %q, want %q: %s", label, test.label, text)
			}
		})
	}
}

func TestWorkloadWebhookAvoidsNodesForKueue(t *testing.T) {
	reader := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(profile("default", nil)).Build()
	const queued = `{"apiVersion":"batch/v1","kind":"Job","metadata":{"labels":{"kueue.x-k8s.io/queue-name":"team"},"annotations":{"evenkeel.dev/profile":"default"}},"spec":{"template":{"spec":{"affinity":{"podAntiAffinity":{}},"containers":[{"name":"c"}]}}}}`
	response := Workloads(reader, reader, reductionImage).Handler.Handle(t.Context(), job{raw: queued}.request(t, admissionv1.Create))
	text, err := json.Marshal(response.Patches)
	if err != nil || !response.Allowed {
		t.Fatalf("%+v %v", response.Result, err)
	}
	if !strings.Contains(string(text), `"path":"/spec/template/spec/affinity/nodeAffinity"`) || !strings.Contains(string(text), `{"key":"evenkeel.dev/network","operator":"NotIn","values":["unhealthy"]}`) {
		t.Errorf("%s", text)
	}
	plain := strings.Replace(queued, "kueue.x-k8s.io/queue-name", "app", 1)
	response = Workloads(reader, reader, reductionImage).Handler.Handle(t.Context(), job{raw: plain}.request(t, admissionv1.Create))
	for _, p := range response.Patches {
		if strings.Contains(p.Path, "affinity") {
			t.Errorf("a job without a queue: %s", p.Path)
		}
	}
}

func TestWorkloadWebhookUpdate(t *testing.T) {
	const pinned = `{"apiVersion":"batch/v1","kind":"Job","metadata":{"annotations":{"evenkeel.dev/profile":"NAME"}},"spec":{"template":{"metadata":{"labels":{"evenkeel.dev/profile":"default"}}}}}`
	for name, warned := range map[string]bool{"default": false, "another": true} {
		response := Workloads(nil, nil, reductionImage).Handler.Handle(t.Context(), job{raw: strings.Replace(pinned, "NAME", name, 1)}.request(t, admissionv1.Update))
		if !response.Allowed || len(response.Patches) != 0 || (len(response.Warnings) == 1) != warned {
			t.Errorf("%s: %+v", name, response)
		}
	}
}

// created is the job as the webhook leaves it.
func created(t *testing.T, j job, reader client.Reader, reductionImage string) *unstructured.Unstructured {
	t.Helper()
	request := j.request(t, admissionv1.Create)
	object := &unstructured.Unstructured{}
	if err := json.Unmarshal(request.Object.Raw, &object.Object); err != nil {
		t.Fatal(err)
	}
	pinner := workloadPinner{reader, reader, reductionImage}
	if _, err := pinner.pinProfile(t.Context(), object, "default", request); err != nil {
		t.Fatal(err)
	}
	return object
}

func TestWorkloadWebhookReductionServers(t *testing.T) {
	reader := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(
		profile("default", func(s *evenkeel.NetworkProfileSpec) { s.Reduction.Mode = evenkeel.ReductionAlways }),
	).Build()
	// Copied from another job, whose servers it must not use.
	stale := `{"apiVersion":"kubeflow.org/v1","kind":"PyTorchJob","metadata":{"name":"train","labels":{"evenkeel.dev/reduction-client":"old","mine":"kept"},
	  "annotations":{"evenkeel.dev/profile":"default"ASKED}},"spec":{"pytorchReplicaSpecs":{"Worker":{"replicas":3,"template":{
	  "metadata":{"labels":{"evenkeel.dev/reduction-client":"old"},"annotations":{"evenkeel.dev/reduction-servers":"old:1"}},"spec":{"containers":[{"name":"pytorch"}]}}}}}}`
	for asked, want := range map[string]int{
		"": 3, `,"evenkeel.dev/reduction":"2"`: 2, `,"evenkeel.dev/reduction":"Off"`: 0,
	} {
		object := created(t, job{raw: strings.Replace(stale, "ASKED", asked, 1)}, reader, reductionImage)
		templates, err := workload.Templates(object)
		if err != nil {
			t.Fatal(err)
		}
		service, servers := "", ""
		if want > 0 {
			service = reduction.Name("train", "creation")
			servers = strings.Join(reduction.Endpoints(service, "team", want), ",")
		}
		labels := object.GetLabels()
		if labels[evenkeel.ReductionClientKey] != service || labels["mine"] != "kept" {
			t.Errorf("%s: the job's labels are %v, want %q", asked, labels, service)
		}
		if templates[0].Label(evenkeel.ReductionClientKey) != service || templates[0].Annotations()[evenkeel.ReductionServersKey] != servers {
			t.Errorf("%s: the template has %q, %q; want %q, %q", asked, templates[0].Label(evenkeel.ReductionClientKey), templates[0].Annotations()[evenkeel.ReductionServersKey], service, servers)
		}
	}
}

func TestWorkloadWebhookReductionJobName(t *testing.T) {
	const text = `{"apiVersion":"batch/v1","kind":"Job","metadata":{NAME,"annotations":{"evenkeel.dev/profile":"default","evenkeel.dev/reduction":"SERVERS"}},
	  "spec":{"template":{"metadata":{"annotations":{"evenkeel.dev/environment":"{\"EVENKEEL_JOB\":\"team/copied-from\"}"}},"spec":{"containers":[{"name":"main"}]}}}}`
	own := func(s *evenkeel.NetworkProfileSpec) {
		s.Environment = []evenkeel.EnvironmentVariable{{Name: "EVENKEEL_JOB", Value: "ours"}}
	}
	for name, test := range map[string]struct {
		name, servers string
		profile       func(*evenkeel.NetworkProfileSpec)
		want          string
	}{
		"the job's":       {`"name":"train"`, "2", nil, `{"EVENKEEL_JOB":"team/train"}`},
		"made up later":   {`"generateName":"train-"`, "2", nil, `{"EVENKEEL_JOB":"team/` + reduction.Name("train-", "creation") + `"}`},
		"the profile's":   {`"name":"train"`, "2", own, `{"EVENKEEL_JOB":"ours"}`},
		"without servers": {`"name":"train"`, "Off", nil, ""},
	} {
		reader := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(profile("default", test.profile)).Build()
		object := created(t, job{raw: strings.NewReplacer("NAME", test.name, "SERVERS", test.servers).Replace(text)}, reader, reductionImage)
		templates, err := workload.Templates(object)
		if err != nil {
			t.Fatal(err)
		}
		if got := templates[0].Annotations()[evenkeel.EnvironmentKey]; got != test.want {
			t.Errorf("%s: environment %s, want %s", name, got, test.want)
		}
	}
}

func TestWorkloadWebhookReductionWithoutImage(t *testing.T) {
	reader := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(
		profile("default", func(s *evenkeel.NetworkProfileSpec) { s.Reduction.Mode = evenkeel.ReductionAlways }),
	).Build()
	if got := created(t, job{annotations: asks(), templates: masterAndWorker}, reader, "").GetLabels(); len(got) != 0 {
		t.Errorf("the profile says always, the installation cannot, and the job has labels %v", got)
	}
	response := Workloads(reader, reader, "").Handler.Handle(t.Context(), job{annotations: asks(evenkeel.ReductionKey, "Auto"), templates: masterAndWorker}.request(t, admissionv1.Create))
	if response.Allowed || !strings.Contains(response.Result.Message, "reduction.image") {
		t.Errorf("asked for, and not refused: %+v", response.Result)
	}
}

// TestWorkloadWebhookReductionImagesDiffer has a plugin and servers of different versions, which may refuse each other while the job
// runs.
func TestWorkloadWebhookReductionImagesDiffer(t *testing.T) {
	digest := image[strings.Index(image, "@"):]
	for _, test := range []struct {
		plugin, servers string
		warned          bool
	}{
		{"registry.example.com/plugin:1.0.0" + digest, "", false},
		{"registry.example.com/plugin:1.1.0" + digest, "", true},
		{"registry.example.com/plugin:1.1.0" + digest, "registry.example.com/servers:1.1.0", false},
		{"registry.example.com/plugin:1.0.0" + digest, "registry.example.com/servers:1.1.0", true},
		{"registry.example.com/plugin:1.1.0-p7.2" + digest, "registry.example.com/servers:1.0.0-p7.2", false},
		{"registry.example.com/plugin:1.0.0-p7.2" + digest, "registry.example.com/servers:1.0.0-p7.1", true},
		{image, "", false}, // they cannot be compared, which the profile's condition says
	} {
		reader := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(profile("default", func(s *evenkeel.NetworkProfileSpec) {
			s.Plugin.Image, s.Reduction.Image, s.Reduction.Mode = test.plugin, test.servers, evenkeel.ReductionAlways
		})).Build()
		handle := func(annotations ...string) admission.Response {
			return Workloads(reader, reader, reductionImage).Handler.Handle(t.Context(), job{annotations: asks(annotations...), templates: masterAndWorker}.request(t, admissionv1.Create))
		}
		// The profile's own wish is not worth the job; what the user asks for is refused.
		always := handle()
		if text, _ := json.Marshal(always.Patches); !always.Allowed || strings.Contains(string(text), evenkeel.ReductionServersKey) == test.warned {
			t.Errorf("plugin %q, servers %q: allowed %t, %s", test.plugin, test.servers, always.Allowed, text)
		}
		if warned := slices.ContainsFunc(always.Warnings, func(w string) bool {
			return strings.Contains(w, "no reduction servers") && strings.Contains(w, "set spec.plugin.image and spec.reduction.image")
		}); warned != test.warned {
			t.Errorf("plugin %q, servers %q: warnings %q", test.plugin, test.servers, always.Warnings)
		}
		if asked := handle(evenkeel.ReductionKey, "2"); asked.Allowed == test.warned {
			t.Errorf("plugin %q, servers %q, and the job asks: allowed %t", test.plugin, test.servers, asked.Allowed)
		}
	}
}

func TestWorkloadWebhookReductionUpdateWarns(t *testing.T) {
	const text = `{"apiVersion":"batch/v1","kind":"Job","metadata":{"annotations":{"evenkeel.dev/profile":"default","evenkeel.dev/reduction":"NUMBER"}},"spec":{"template":{"metadata":{"labels":{"evenkeel.dev/profile":"default"}}}}}`
	for number, warned := range map[string]bool{"2": false, "3": true} {
		request := job{raw: strings.Replace(text, "NUMBER", number, 1)}.request(t, admissionv1.Update)
		request.OldObject.Raw = []byte(strings.Replace(text, "NUMBER", "2", 1))
		response := Workloads(nil, nil, reductionImage).Handler.Handle(t.Context(), request)
		if !response.Allowed || len(response.Patches) != 0 || (len(response.Warnings) == 1) != warned {
			t.Errorf("%s: %+v", number, response)
		}
	}
}

func TestPodWebhook(t *testing.T) {
	good := map[string]string{evenkeel.PluginImageKey: image, evenkeel.DeliveryKey: "ImageVolume", evenkeel.PluginPathKey: "/plugin", evenkeel.ConflictPolicyKey: "Keep"}
	pod := func(annotations map[string]string) admission.Request {
		text, err := json.Marshal(&corev1.Pod{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
			ObjectMeta: metav1.ObjectMeta{Name: "p", Labels: map[string]string{evenkeel.ProfileKey: "default"}, Annotations: annotations},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main"}}},
		})
		if err != nil {
			t.Fatal(err)
		}
		return admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{Operation: admissionv1.Create, Object: runtime.RawExtension{Raw: text}}}
	}
	handler := Pods(newScheme(t), nil, func() string { return "10.96.0.7:9640" }).Handler
	if response := handler.Handle(t.Context(), pod(good)); !response.Allowed || len(response.Patches) == 0 {
		t.Errorf("a pod with all annotations: %+v", response)
	}
	if response := handler.Handle(t.Context(), pod(nil)); response.Allowed || !strings.Contains(response.Result.Message, "put the annotation") {
		t.Errorf("a pod with the label alone: %+v", response.Result)
	}
}

// mpirun starts ranks over ssh, without the variables of their pods.
func TestWorkloadWebhookSaysWhatMPIRunHasToPass(t *testing.T) {
	const mpi = `{"apiVersion":"kubeflow.org/v2beta1","kind":"KIND","metadata":{"name":"train","annotations":{"evenkeel.dev/profile":"default"}},"spec":{MORE"mpiReplicaSpecs":{
	  "Launcher":{"template":{"spec":{"containers":[{"name":"mpirun","command":["mpirun",ARGS"train"]}]}}},
	  "Worker":{"replicas":2,"template":{"spec":{"containers":[{"name":"sshd","resources":{"limits":{"nvidia.com/gpu":8}}}]}}}}}}`
	encrypted := profile("default", nil)
	encrypted.Spec.Transport.Encryption = evenkeel.EncryptionRequired
	for _, test := range []struct {
		name, more, args string
		profile          *evenkeel.NetworkProfile
		want             []string
	}{
		{"Open MPI", "", "", profile("default", nil), []string{"-x NCCL_NET_PLUGIN -x NCCL_NET_PLUGIN_REF_COUNT"}},
		{"encrypted", `"mpiImplementation":"OpenMPI",`, "", encrypted, []string{"-x EVENKEEL_ENCRYPTION", "-x EVENKEEL_JOB_KEY_FILE", "-x NCCL_NET "}},
		{"passed already", "", `"-x","NCCL_NET_PLUGIN",`, encrypted, nil},
		{"passed by a variable of Open MPI", "", `"train"],"env":[{"name":"OMPI_MCA_mca_base_env_list","value":"NCCL_NET_PLUGIN;NCCL_DEBUG"}],"args":[`, encrypted, nil},
		{"set for the launcher only", "", `"train"],"env":[{"name":"NCCL_NET_PLUGIN","value":"evenkeel"}],"args":[`, encrypted, []string{"-x NCCL_NET_PLUGIN "}},
		{"another one passed", "", `"-x","NCCL_NET_PLUGIN_REF_COUNT",`, encrypted, []string{"-x NCCL_NET_PLUGIN "}},
		{"an MPI that passes all", `"mpiImplementation":"Intel",`, "", encrypted, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			reader := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(test.profile).Build()
			text := strings.NewReplacer("KIND", "MPIJob", "MORE", test.more, "ARGS", test.args).Replace(mpi)
			response := Workloads(reader, reader, reductionImage).Handler.Handle(t.Context(), job{raw: text}.request(t, admissionv1.Create))
			warnings := strings.Join(response.Warnings, "\n")
			if !response.Allowed || strings.Contains(warnings, "mpirun") != (len(test.want) > 0) {
				t.Errorf("allowed %t, %v, warnings %q", response.Allowed, response.Result, warnings)
			}
			for _, want := range test.want {
				if !strings.Contains(warnings, want) {
					t.Errorf("no %q in %q", want, warnings)
				}
			}
		})
	}
}

func TestWorkloadWebhookRDMADevices(t *testing.T) {
	const mpi = `{"apiVersion":"kubeflow.org/v2beta1","kind":"MPIJob","metadata":{"name":"train","annotations":{"evenkeel.dev/profile":"default"EXTRA}},"spec":{"mpiReplicaSpecs":{
	  "Launcher":{"template":{"spec":{"containers":[{"name":"mpirun"}]}}},
	  "Worker":{"replicas":2,"template":{"metadata":{"annotations":{"kubectl.kubernetes.io/default-container":"DEFAULT","evenkeel.dev/rdma-networks":"of another job"}},"spec":{"containers":[{"name":"sshd","resources":{"limits":{"cpu":"1000m"GPU}}},{"name":"logger"}]}}}}}}`
	const gpu = `,"nvidia.com/gpu":8`
	offered := profile("default", nil)
	offered.Status.RDMAResourceName = "rdma/hca"
	for _, test := range []struct{ name, extra, gpu, want string }{
		{"those with GPUs", "", gpu, "Worker.sshd"},
		{"one of each pod, without GPUs", "", "", "Launcher.mpirun Worker.sshd"},
		{"the default container", "", "", "Launcher.mpirun Worker.logger"},
		{"the chosen", `,"evenkeel.dev/containers":"mpirun,logger"`, gpu, "Launcher.mpirun Worker.logger"},
	} {
		t.Run(test.name, func(t *testing.T) {
			reader := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(offered).Build()
			byDefault := ""
			if test.name == "the default container" {
				byDefault = "logger"
			}
			text := strings.NewReplacer("EXTRA", test.extra, "GPU", test.gpu, "DEFAULT", byDefault).Replace(mpi)
			object := created(t, job{raw: text}, reader, reductionImage)
			templates, err := workload.Templates(object)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, template := range templates {
				spec, err := template.PodSpec()
				if err != nil {
					t.Fatal(err)
				}
				device := false
				for _, c := range spec.Containers {
					if requested := c.Resources.Requests["rdma/hca"]; requested.Value() == 1 {
						got = append(got, strings.Split(template.Path, ".")[2]+"."+c.Name)
						device = true
					}
				}
				if a := template.Annotations(); (a[evenkeel.RDMAResourceKey] == "rdma/hca=1") != device || a[evenkeel.RDMANetworksKey] != "" {
					t.Errorf("%s: %v", template.Path, a)
				}
			}
			slices.Sort(got)
			if strings.Join(got, " ") != test.want {
				t.Errorf("%v, want %s", got, test.want)
			}
			response := Workloads(reader, reader, reductionImage).Handler.Handle(t.Context(), job{raw: text}.request(t, admissionv1.Create))
			for _, p := range response.Patches {
				if p.Operation != "add" && !strings.Contains(p.Path, "rdma-networks") {
					t.Errorf("%s of %s: it may only add", p.Operation, p.Path)
				}
			}
		})
	}
}

func TestWorkloadWebhookRDMAWithoutDevice(t *testing.T) {
	none := int32(0)
	strict := func(change func(*evenkeel.NetworkProfile)) *evenkeel.NetworkProfile {
		p := profile("default", func(s *evenkeel.NetworkProfileSpec) { s.Transport.Mode = evenkeel.TransportRDMA })
		p.Status.RDMANodes = &none
		p.Status.Conditions = []metav1.Condition{{Type: evenkeel.ConditionRDMA, Status: metav1.ConditionFalse, Reason: "NoDevice", Message: "none of 4 nodes"}}
		if change != nil {
			change(p)
		}
		return p
	}
	one := int32(1)
	some := func(mode evenkeel.TransportMode) *evenkeel.NetworkProfile {
		p := profile("default", func(s *evenkeel.NetworkProfileSpec) { s.Transport.Mode = mode })
		p.Status.RDMANodes = &one
		p.Status.Conditions = []metav1.Condition{{Type: evenkeel.ConditionRDMA, Status: metav1.ConditionFalse, Reason: "SomeNodes", Message: "1 of 5 nodes offer rdma/hca; jobs use TCP"}}
		return p
	}
	for _, test := range []struct {
		name            string
		profile         *evenkeel.NetworkProfile
		refused, warned string
	}{
		{"none is known", strict(nil), "requires RDMA and has no device to assign: none of 4 nodes", ""},
		{"nobody has looked", strict(func(p *evenkeel.NetworkProfile) { p.Generation = 1 }), "try again", ""},
		{"named, and no node has it", strict(func(p *evenkeel.NetworkProfile) { p.Spec.Transport.RDMA.ResourceName = "rdma/hca" }), "", "no node offers rdma/hca now"},
		{"Auto", profile("default", nil), "", ""},
		{"Auto, and some nodes offer one", some(""), "", "1 of 5 nodes offer rdma/hca; jobs use TCP"},
		{"TCP, and some nodes offer one", some(evenkeel.TransportTCP), "", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			reader := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(test.profile).Build()
			response := Workloads(reader, reader, reductionImage).Handler.Handle(t.Context(), job{annotations: asks(), templates: masterAndWorker}.request(t, admissionv1.Create))
			if response.Allowed != (test.refused == "") || test.refused != "" && !strings.Contains(response.Result.Message, test.refused) {
				t.Errorf("%+v, want %q", response.Result, test.refused)
			}
			if got := strings.Join(response.Warnings, "\n"); (got != "") != (test.warned != "") || !strings.Contains(got, test.warned) {
				t.Errorf("warned %q, want %q", got, test.warned)
			}
			patches, err := json.Marshal(response.Patches)
			if told := strings.Contains(string(patches), evenkeel.RDMAUnusedKey); err != nil || told != strings.Contains(test.warned, "use TCP") {
				t.Errorf("the controller is told %t: %s", told, patches)
			}
		})
	}
}
