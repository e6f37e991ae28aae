package defaults

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
)

const good = `
apiVersion: evenkeel.dev/v1alpha1
kind: NetworkProfile
metadata: {name: default}
spec: {plugin: {delivery: Preinstalled}}
`

func file(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "profile.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestDefaultProfileInvalidFileIsReported(t *testing.T) {
	for name, test := range map[string]struct{ text, want string }{
		"an unknown field": {strings.Replace(good, "delivery", "delivry", 1), "delivry"},
		"another kind":     {strings.Replace(good, "NetworkProfile", "ConfigMap", 1), `"ConfigMap"`},
		"no name":          {strings.Replace(good, "name: default", "", 1), "metadata.name"},
		"no YAML":          {"{", "profile.yaml"},
		"nothing":          {"", `kind ""`},
	} {
		asked, conditions, err := start(t.Context(), t, test.text, nil)
		if err != nil || asked != 0 {
			t.Errorf("%s: applied %d times, %v", name, asked, err)
		}
		if p, err := Load(file(t, test.text), nil); err != nil || p.problem == nil || !strings.Contains(p.problem.Error(), test.want) {
			t.Errorf("%s: %v, problem %v, want one about %s", name, err, p.problem, test.want)
		}
		if named := name == "an unknown field" || name == "another kind"; named != (len(conditions) == 1 && strings.HasPrefix(conditions[0], "False Invalid ")) {
			t.Errorf("%s: conditions %q", name, conditions)
		}
	}
	if _, err := Load(filepath.Join(t.TempDir(), "absent"), nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing file: %v", err)
	}
}

// start runs a Profile against an API server that gives these answers, the last one forever. It returns how often the profile was
// applied, and the conditions that were written.
func start(ctx context.Context, t *testing.T, content string, answers ...error) (asked int, conditions []string, err error) {
	t.Helper()
	c := fake.NewClientBuilder().WithInterceptorFuncs(interceptor.Funcs{
		Apply: func(context.Context, client.WithWatch, runtime.ApplyConfiguration, ...client.ApplyOption) error {
			asked++
			return answers[min(asked, len(answers))-1]
		},
		SubResourceApply: func(_ context.Context, _ client.Client, _ string, o runtime.ApplyConfiguration, _ ...client.SubResourceApplyOption) error {
			text, err := json.Marshal(o)
			if err != nil {
				return err
			}
			var object struct {
				Status struct{ Conditions []metav1.Condition }
			}
			if err := json.Unmarshal(text, &object); err != nil {
				return err
			}
			for _, c := range object.Status.Conditions {
				conditions = append(conditions, fmt.Sprintf("%s %s %s", c.Status, c.Reason, c.Message))
			}
			return nil
		},
	}).Build()
	p, err := Load(file(t, content), c)
	if err != nil {
		t.Fatal(err)
	}
	p.retry = wait.Backoff{Duration: time.Millisecond}
	err = p.Start(ctx)
	return asked, conditions, err
}

func TestDefaultProfileWaitsForCRD(t *testing.T) {
	notServed := &meta.NoKindMatchError{GroupKind: schema.GroupKind{Group: "evenkeel.dev", Kind: "NetworkProfile"}}
	if asked, conditions, err := start(t.Context(), t, good, notServed, notServed, notServed, nil); err != nil || asked != 4 || len(conditions) != 1 || !strings.HasPrefix(conditions[0], "True Applied") {
		t.Errorf("asked %d times: %q %v", asked, conditions, err)
	}
}

// A controller that ends would close all gates, and the CRD of the next version may accept the profile.
func TestDefaultProfileRefusedIsCondition(t *testing.T) {
	refused := apierrors.NewInvalid(schema.GroupKind{Kind: "NetworkProfile"}, "default", nil)
	asked, conditions, err := start(t.Context(), t, good, refused, refused, nil)
	if err != nil || asked != 3 || len(conditions) != 3 || !strings.HasPrefix(conditions[0], "False Invalid ") || !strings.HasPrefix(conditions[2], "True Applied ") {
		t.Errorf("asked %d times: %q %v", asked, conditions, err)
	}
}

func TestDefaultProfileStops(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, _, err := start(ctx, t, good, errors.New("the API server is away")); err != nil {
		t.Errorf("error %v", err)
	}
}
