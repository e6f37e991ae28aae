package conversion

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/randfill"
	"sigs.k8s.io/yaml"

	"evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/api/v1beta1"
)

// seeds is the number of random objects of each kind and version.
const seeds = 1000

var (
	alpha = v1alpha1.GroupVersion.String()
	beta  = v1beta1.GroupVersion.String()
)

// versions are a kind's types in both versions.
var versions = map[string]struct{ alpha, beta func() client.Object }{
	"NetworkProfile": {
		func() client.Object { return &v1alpha1.NetworkProfile{} },
		func() client.Object { return &v1beta1.NetworkProfile{} },
	},
	"NetworkCheck": {
		func() client.Object { return &v1alpha1.NetworkCheck{} },
		func() client.Object { return &v1beta1.NetworkCheck{} },
	},
	"NetworkCheckPolicy": {
		func() client.Object { return &v1alpha1.NetworkCheckPolicy{} },
		func() client.Object { return &v1beta1.NetworkCheckPolicy{} },
	},
}

// filler fills objects with what the API server could store. No text that is there is empty, as lists and maps, and
// enumerations have values of their own.
func filler(seed int64) *randfill.Filler {
	choose := func(c randfill.Continue, values ...string) string { return values[c.Intn(len(values))] }
	return randfill.NewWithSeed(seed).NilChance(0.4).NumElements(1, 3).MaxDepth(12).Funcs(
		func(q *resource.Quantity, c randfill.Continue) {
			*q = resource.MustParse(fmt.Sprintf("%dM", c.Intn(1<<20)))
		},
		func(s *string, c randfill.Continue) { *s = "x" + c.String(8) },
		func(t *metav1.Time, c randfill.Continue) { *t = metav1.Unix(c.Int63n(1<<32), 0) },
		func(m *metav1.ObjectMeta, c randfill.Continue) {
			m.Name, m.UID, m.Generation = c.String(10), "1", c.Int63()
			c.Fill(&m.Labels)
			c.Fill(&m.Annotations)
		},
		func(m *metav1.TypeMeta, _ randfill.Continue) { *m = metav1.TypeMeta{} },
		func(e *v1alpha1.Encryption, c randfill.Continue) {
			*e = v1alpha1.Encryption(choose(c, "", "Off", "Required", "Later"))
		},
		func(e *v1beta1.Encryption, c randfill.Continue) {
			*e = v1beta1.Encryption(choose(c, "", "Disabled", "Required", "Later"))
		},
		func(m *v1alpha1.ReductionMode, c randfill.Continue) {
			*m = v1alpha1.ReductionMode(choose(c, "", "Off", "OnRequest", "Always"))
		},
		func(m *v1beta1.ReductionMode, c randfill.Continue) {
			*m = v1beta1.ReductionMode(choose(c, "", "Disabled", "OnRequest", "Always"))
		},
		func(p *v1beta1.UnavailablePolicy, c randfill.Continue) {
			*p = v1beta1.UnavailablePolicy(choose(c, "", "Fallback", "Fail"))
		},
	)
}

// generic is the object as JSON has it.
func generic(t *testing.T, object client.Object, apiVersion, kind string) map[string]any {
	t.Helper()
	text, err := json.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	var all map[string]any
	if err := utiljson.Unmarshal(text, &all); err != nil {
		t.Fatal(err)
	}
	all["apiVersion"], all["kind"] = apiVersion, kind
	return all
}

// typed decodes into the version's type, which has to know every field.
func typed(object map[string]any, into client.Object) error {
	text, err := json.Marshal(object)
	if err != nil {
		return err
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	return decoder.Decode(into)
}

// TestRoundTripOfRandomObjects converts objects with any fields set to the other version and back. The other version's
// type has all that comes out, and what comes back is what was there.
func TestRoundTripOfRandomObjects(t *testing.T) {
	for kind, types := range versions {
		for _, way := range []struct {
			from, to string
			fill     func() client.Object
			into     func() client.Object
		}{{alpha, beta, types.alpha, types.beta}, {beta, alpha, types.beta, types.alpha}} {
			t.Run(kind+" from "+way.from, func(t *testing.T) {
				for seed := range int64(seeds) {
					filled := way.fill()
					filler(seed).Fill(filled)
					want := generic(t, filled, way.from, kind)
					got := generic(t, filled, way.from, kind)
					if err := Convert(got, way.to); err != nil {
						t.Fatalf("seed %d: %v", seed, err)
					}
					into := way.into()
					if err := typed(got, into); err != nil {
						t.Fatalf("seed %d: %s lacks what it is converted to: %v", seed, way.to, err)
					}
					// By way of the type, as a client reads and writes it.
					back := generic(t, into, way.to, kind)
					if err := Convert(back, way.from); err != nil {
						t.Fatalf("seed %d: %v", seed, err)
					}
					if diff := cmp.Diff(want, back); diff != "" {
						t.Fatalf("seed %d does not come back (-was +is):\n%s", seed, diff)
					}
				}
			})
		}
	}
}

// pairs are objects in both versions, with every field that differs.
var pairs = []struct{ kind, alpha, beta string }{
	{"NetworkProfile", `
environment: [{name: A, value: b}]
imagePullSecrets: [one, two]
plugin: {strict: true, path: /plugin}
transport: {encryption: "Off", rdma: {network: Trusted, networks: sriov, count: 2}}
reduction: {mode: "Off", server: {memory: 1024Mi, cpu: 2}}`, `
env: [{name: A, value: b}]
imagePullSecrets: [{name: one}, {name: two}]
plugin: {unavailablePolicy: Fail, path: /plugin}
transport: {encryption: Disabled, rdma: {networkTrust: Trusted, additionalNetworks: sriov, count: 2}}
reduction: {mode: Disabled, server: {bufferMemory: 1024Mi, cpu: 2}}`},
	{"NetworkProfile", `plugin: {strict: false}`, `plugin: {unavailablePolicy: Fallback}`},
	{"NetworkCheck", `
nodes: {selector: {}}
rails: 8
runner:
  type: Bench
  resources: {requests: {cpu: 0.5}}
  environment: [{name: A, value: b}]
  podLabels: {a: b}
  podAnnotations: {c: d}
  tolerations: [{key: k, operator: Exists}]
  imagePullSecrets: [{name: one}]
  runtimeClassName: nvidia
  supplementalGroups: [44]`, `
nodes: {selector: {}}
railsPerNode: 8
runner:
  type: Bench
  resources: {requests: {cpu: 0.5}}
  env: [{name: A, value: b}]
  podTemplate:
    metadata: {labels: {a: b}, annotations: {c: d}}
    spec:
      tolerations: [{key: k, operator: Exists}]
      imagePullSecrets: [{name: one}]
      runtimeClassName: nvidia
      securityContext: {supplementalGroups: [44]}`},
	{"NetworkCheckPolicy", `
history: 3
onFail: {maxUnhealthyPercent: 10}
check: {rails: 4, runner: {podLabels: {a: b}}}`, `
historyLimit: 3
maxUnhealthyPercent: 10
check: {railsPerNode: 4, runner: {podTemplate: {metadata: {labels: {a: b}}}}}`},
}

func object(t *testing.T, apiVersion, kind, spec string) map[string]any {
	t.Helper()
	var fields map[string]any
	if err := yaml.Unmarshal([]byte(spec), &fields); err != nil {
		t.Fatal(err)
	}
	return map[string]any{"apiVersion": apiVersion, "kind": kind, "metadata": map[string]any{"name": "n"}, "spec": fields}
}

// TestEveryDifference compares both versions of objects. Values are as they were written: a quantity is not rewritten.
func TestEveryDifference(t *testing.T) {
	for _, pair := range pairs {
		for _, way := range [][4]string{{alpha, pair.alpha, beta, pair.beta}, {beta, pair.beta, alpha, pair.alpha}} {
			got := object(t, way[0], pair.kind, way[1])
			if err := Convert(got, way[2]); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(object(t, way[2], pair.kind, way[3]), got); diff != "" {
				t.Errorf("%s from %s (-want +got):\n%s", pair.kind, way[0], diff)
			}
		}
	}
}

// TestOddObjectsCanBeRead: what the schema of an earlier version let in must not make a list unreadable.
func TestOddObjectsCanBeRead(t *testing.T) {
	for _, spec := range []string{
		`{}`, `{environment: 5, imagePullSecrets: [3, {a: b}, {name: x, y: z}], plugin: text, transport: {encryption: 7}}`,
		`{plugin: {strict: "yes"}, transport: {rdma: []}, reduction: {server: null}, fromTheFuture: {a: [1]}}`,
	} {
		want, got := object(t, alpha, "NetworkProfile", spec), object(t, alpha, "NetworkProfile", spec)
		for _, version := range []string{beta, alpha} {
			if err := Convert(got, version); err != nil {
				t.Fatal(err)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s does not come back: %s", spec, diff)
		}
	}
}

func TestOtherKindsAndVersionsAreErrors(t *testing.T) {
	for _, test := range [][3]string{
		{alpha, "NodeNetworkHealth", beta}, {alpha, "NetworkCheck", "evenkeel.dev/v2"}, {"v1", "NetworkCheck", beta},
	} {
		if err := Convert(object(t, test[0], test[1], "{}"), test[2]); err == nil {
			t.Errorf("%q are converted", test)
		}
	}
}

// TestDefinitionsAreOfTheKinds: each kind of the table has its definition.
func TestDefinitionsAreOfTheKinds(t *testing.T) {
	if got := slices.Sorted(maps.Keys(kinds)); len(got) != len(Definitions()) || !slices.IsSorted(Definitions()) {
		t.Errorf("definitions %q of kinds %q", Definitions(), got)
	}
	for kind := range versions {
		if kinds[kind] == nil {
			t.Errorf("%s has no moves", kind)
		}
	}
}
