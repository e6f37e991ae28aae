package workload

import (
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

func TestFinished(t *testing.T) {
	conditions := func(list ...string) map[string]any {
		var out []any
		for i := 0; i < len(list); i += 2 {
			out = append(out, map[string]any{"type": list[i], "status": list[i+1]})
		}
		return map[string]any{"status": map[string]any{"conditions": out}}
	}
	for name, test := range map[string]struct {
		job      map[string]any
		finished bool
	}{
		"new":                   {job: map[string]any{}},
		"running":               {job: conditions("Created", "True", "Running", "True")},
		"PyTorchJob that ended": {job: conditions("Running", "False", "Succeeded", "True"), finished: true},
		"Job that ended":        {job: conditions("Complete", "True"), finished: true},
		"failed":                {job: conditions("Failed", "True"), finished: true},
		"restarted":             {job: conditions("Failed", "False", "Restarting", "True")},
		"nonsense of a user's":  {job: map[string]any{"spec": "nothing", "status": map[string]any{"conditions": []any{"Complete", int64(7)}}}},
		"Volcano's that ended":  {job: map[string]any{"status": map[string]any{"state": map[string]any{"phase": "Completed"}}}, finished: true},
		"Volcano's that runs":   {job: map[string]any{"status": map[string]any{"state": map[string]any{"phase": "Running"}}}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := Finished(&unstructured.Unstructured{Object: test.job}); got != test.finished {
				t.Errorf("%t, want %t", got, test.finished)
			}
		})
	}
}
