package reduction

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/util/validation"
)

func TestServerNamesFitHosts(t *testing.T) {
	for _, job := range []string{"llama", "7b", "llama.v2", "a", "", strings.Repeat("x", 253), strings.Repeat("a", 35) + "-b", "train-" /* a generateName */} {
		name := Name(job, "creation")
		if errs := validation.IsDNS1035Label(name); errs != nil || len(name) > 52 {
			t.Errorf("%q: %s: %v", job, name, errs)
		}
		if strings.Contains(name, "--") {
			t.Errorf("%q: %s", job, name)
		}
		if name != Name(job, "creation") || name == Name(job, "another") {
			t.Errorf("%q: the name does not follow from the creation", job)
		}
	}
}

func TestEndpoints(t *testing.T) {
	want := []string{"x-0.x.team.svc:7470", "x-1.x.team.svc:7470"}
	if diff := cmp.Diff(want, Endpoints("x", "team", 2)); diff != "" {
		t.Error(diff)
	}
}
