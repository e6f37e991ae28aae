package workload

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"
)

func parse(t *testing.T, text string) *unstructured.Unstructured {
	t.Helper()
	u := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(text), &u.Object); err != nil {
		t.Fatal(err)
	}
	return u
}

const pytorchJob = `{apiVersion: kubeflow.org/v1, kind: PyTorchJob, spec: {pytorchReplicaSpecs: {
  Worker: {template: {spec: {containers: [{name: pytorch}, {name: logger}]}}},
  Master: {template: {metadata: {labels: {app: x}}, spec: {containers: [{name: pytorch}]}}}}}}`

func TestTemplatesAreChangedInPlace(t *testing.T) {
	job := parse(t, pytorchJob)
	templates, err := Templates(job)
	if err != nil {
		t.Fatal(err)
	}
	var paths []string
	for _, template := range templates {
		paths = append(paths, template.Path)
		if err := template.Add(map[string]string{"l": "1"}, map[string]string{"a": "2"}); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff([]string{"spec.pytorchReplicaSpecs.Master.template", "spec.pytorchReplicaSpecs.Worker.template"}, paths); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"pytorch", "logger"}, templates[1].Containers()); diff != "" {
		t.Error(diff)
	}
	want := parse(t, `{apiVersion: kubeflow.org/v1, kind: PyTorchJob, spec: {pytorchReplicaSpecs: {
  Worker: {template: {metadata: {labels: {l: "1"}, annotations: {a: "2"}}, spec: {containers: [{name: pytorch}, {name: logger}]}}},
  Master: {template: {metadata: {labels: {app: x, l: "1"}, annotations: {a: "2"}}, spec: {containers: [{name: pytorch}]}}}}}}`)
	if diff := cmp.Diff(want.Object, job.Object); diff != "" {
		t.Error(diff)
	}
}

func TestTemplatesOfMalformedJobs(t *testing.T) {
	for text, want := range map[string]string{
		`{apiVersion: kubeflow.org/v1, kind: PyTorchJob, spec: {}}`:                                 "spec.pytorchReplicaSpecs is not an object",
		`{apiVersion: kubeflow.org/v1, kind: PyTorchJob, spec: {pytorchReplicaSpecs: {Master: 3}}}`: "spec.pytorchReplicaSpecs.Master is not an object",
		`{apiVersion: batch/v1, kind: Job, spec: {template: []}}`:                                   "spec.template is not an object",
		`{apiVersion: jobset.x-k8s.io/v1alpha2, kind: JobSet, spec: {replicatedJobs: {}}}`:          "spec.replicatedJobs is not a list",
		`{apiVersion: batch.volcano.sh/v1alpha1, kind: Job, spec: {tasks: [{}]}}`:                   "spec.tasks[0].template is not an object",
		`{apiVersion: apps/v1, kind: Deployment, spec: {template: {}}}`:                             "kind Deployment.apps",
	} {
		if _, err := Templates(parse(t, text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

func TestTemplatesOfEveryKind(t *testing.T) {
	const containers = `{spec: {containers: [{name: main}]}}`
	for text, want := range map[string]string{
		`{apiVersion: batch/v1, kind: Job, spec: {template: T}}`:                                                                                 "spec.template",
		`{apiVersion: kubeflow.org/v2beta1, kind: MPIJob, spec: {mpiReplicaSpecs: {Worker: {template: T}}}}`:                                     "spec.mpiReplicaSpecs.Worker.template",
		`{apiVersion: batch.volcano.sh/v1alpha1, kind: Job, spec: {tasks: [{template: T}, {template: T}]}}`:                                      "spec.tasks[0].template spec.tasks[1].template",
		`{apiVersion: jobset.x-k8s.io/v1alpha2, kind: JobSet, spec: {replicatedJobs: [{template: {spec: {template: T}}}]}}`:                      "spec.replicatedJobs[0].template.spec.template",
		`{apiVersion: leaderworkerset.x-k8s.io/v1, kind: LeaderWorkerSet, spec: {leaderWorkerTemplate: {workerTemplate: T}}}`:                    "spec.leaderWorkerTemplate.workerTemplate",
		`{apiVersion: leaderworkerset.x-k8s.io/v1, kind: LeaderWorkerSet, spec: {leaderWorkerTemplate: {leaderTemplate: T, workerTemplate: T}}}`: "spec.leaderWorkerTemplate.leaderTemplate spec.leaderWorkerTemplate.workerTemplate",
	} {
		job := parse(t, strings.ReplaceAll(text, "T}", containers+"}"))
		if strings.Contains(text, "T,") {
			job = parse(t, strings.ReplaceAll(strings.ReplaceAll(text, "T,", containers+","), "T}", containers+"}"))
		}
		templates, err := Templates(job)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		var paths []string
		for _, template := range templates {
			paths = append(paths, template.Path)
			if spec, err := template.PodSpec(); err != nil || len(spec.Containers) != 1 {
				t.Errorf("%s: %+v %v", template.Path, spec, err)
			}
			if err := template.Add(map[string]string{"l": "1"}, nil); err != nil || template.Label("l") != "1" {
				t.Errorf("%s: %v", template.Path, err)
			}
		}
		if got := strings.Join(paths, " "); got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
}

func TestSuspend(t *testing.T) {
	for _, kind := range Suspendable() {
		job := &unstructured.Unstructured{Object: map[string]any{}}
		job.SetGroupVersionKind(kind)
		if is, can := Suspended(job); is || !can {
			t.Errorf("%s: %t %t", kind, is, can)
		}
		for _, yes := range []bool{true, false} {
			if err := Suspend(job, yes); err != nil {
				t.Errorf("%s: %v", kind, err)
			}
			if is, _ := Suspended(job); is != yes {
				t.Errorf("%s: %t, want %t: %v", kind, is, yes, job.Object)
			}
		}
	}
	volcano := parse(t, `{apiVersion: batch.volcano.sh/v1alpha1, kind: Job}`)
	if _, can := Suspended(volcano); can || Suspend(volcano, true) == nil {
		t.Error("Volcano's jobs have no such field")
	}
}

func TestQueued(t *testing.T) {
	for text, want := range map[string]bool{
		`{apiVersion: batch/v1, kind: Job}`: false,
		`{apiVersion: batch/v1, kind: Job, metadata: {labels: {kueue.x-k8s.io/queue-name: team}}}`: true,
	} {
		if got := Queued(parse(t, text)); got != want {
			t.Errorf("%s: %t", text, got)
		}
	}
}

func TestKnown(t *testing.T) {
	if !Known(schema.GroupKind{Group: "batch", Kind: "Job"}) || Known(schema.GroupKind{Group: "apps", Kind: "Deployment"}) {
		t.Error("Jobs are known, Deployments are not")
	}
}

func TestTemplatePods(t *testing.T) {
	for text, want := range map[string][]int{
		`{apiVersion: kubeflow.org/v1, kind: PyTorchJob, spec: {pytorchReplicaSpecs: {Master: {template: {}}, Worker: {replicas: 7, template: {}}}}}`:                                         {1, 7},
		`{apiVersion: batch/v1, kind: Job, spec: {parallelism: 4, template: {}}}`:                                                                                                             {4},
		`{apiVersion: jobset.x-k8s.io/v1alpha2, kind: JobSet, spec: {replicatedJobs: [{replicas: 3, template: {spec: {parallelism: 2, template: {}}}}, {template: {spec: {template: {}}}}]}}`: {6, 1},
		`{apiVersion: leaderworkerset.x-k8s.io/v1, kind: LeaderWorkerSet, spec: {replicas: 2, leaderWorkerTemplate: {size: 4, leaderTemplate: {}, workerTemplate: {}}}}`:                      {2, 6},
		`{apiVersion: leaderworkerset.x-k8s.io/v1, kind: LeaderWorkerSet, spec: {leaderWorkerTemplate: {size: 4, workerTemplate: {}}}}`:                                                       {4},
		`{apiVersion: leaderworkerset.x-k8s.io/v1, kind: LeaderWorkerSet, spec: {leaderWorkerTemplate: {leaderTemplate: {}, workerTemplate: {}}}}`:                                            {1, 0},
		`{apiVersion: batch/v1, kind: Job, spec: {parallelism: four, template: {}}}`:                                                                                                          {1},
	} {
		templates, err := Templates(parse(t, text))
		if err != nil {
			t.Fatal(err)
		}
		var got []int
		for _, template := range templates {
			got = append(got, template.Pods)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s:\n%s", text, diff)
		}
	}
}

func TestTemplateRemove(t *testing.T) {
	job := parse(t, `{apiVersion: batch/v1, kind: Job, spec: {template: {metadata: {labels: {k: "1", l: "2"}, annotations: {k: "3"}}}}}`)
	templates, err := Templates(job)
	if err != nil {
		t.Fatal(err)
	}
	templates[0].Remove("k")
	if templates[0].Label("k") != "" || templates[0].Annotations()["k"] != "" || templates[0].Label("l") != "2" {
		t.Errorf("%v", job.Object)
	}
}

func TestJobOfPod(t *testing.T) {
	yes := true
	owned := func(version, kind string, labels map[string]string) *metav1.ObjectMeta {
		return &metav1.ObjectMeta{Labels: labels, OwnerReferences: []metav1.OwnerReference{{APIVersion: version, Kind: kind, Name: "llama", Controller: &yes}}}
	}
	group := map[string]string{"leaderworkerset.sigs.k8s.io/name": "serve"}
	for name, test := range map[string]struct {
		pod  *metav1.ObjectMeta
		want string
	}{
		"a Volcano job's":                 {owned("batch.volcano.sh/v1alpha1", "Job", nil), "batch.volcano.sh/v1alpha1 Job llama"},
		"a group's, by its StatefulSet":   {owned("apps/v1", "StatefulSet", group), "leaderworkerset.x-k8s.io/v1 LeaderWorkerSet serve"},
		"a StatefulSet's":                 {owned("apps/v1", "StatefulSet", nil), ""},
		"a batch job's, gated as a whole": {owned("batch/v1", "Job", nil), ""},
		"nobody's":                        {&metav1.ObjectMeta{}, ""},
	} {
		got := ""
		if kind, job, ok := OfPod(test.pod); ok {
			got = kind.GroupVersion().String() + " " + kind.Kind + " " + job
		}
		if got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}

func TestWorkloadSameJob(t *testing.T) {
	yes := true
	pod := func(namespace, kind, owner string, labels map[string]string) *metav1.PartialObjectMetadata {
		return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Labels: labels, OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "apps/v1", Kind: kind, Name: owner, UID: types.UID("uid of " + owner), Controller: &yes},
		}}}
	}
	group := map[string]string{"leaderworkerset.sigs.k8s.io/name": "llama"}
	leader := pod("ml", "StatefulSet", "llama", group)
	for name, test := range map[string]struct {
		other *metav1.PartialObjectMetadata
		want  bool
	}{
		"a worker, of another StatefulSet":  {pod("ml", "StatefulSet", "llama-0", group), true},
		"one of another namespace":          {pod("other", "StatefulSet", "llama-0", group), false},
		"one of another LeaderWorkerSet":    {pod("ml", "StatefulSet", "llama", map[string]string{"leaderworkerset.sigs.k8s.io/name": "mistral"}), false},
		"one of a StatefulSet of that name": {pod("ml", "StatefulSet", "llama", nil), false},
	} {
		if got := SameJob(leader, test.other); got != test.want {
			t.Errorf("%s: %t", name, got)
		}
	}
	if a := pod("ml", "ReplicaSet", "a", nil); SameJob(a, pod("ml", "ReplicaSet", "b", nil)) || !SameJob(a, pod("ml", "ReplicaSet", "a", nil)) {
		t.Error("pods of one owner are of one job, and of two are not")
	}
}
