package defaults

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
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

func TestDefaultProfileLoadErrors(t *testing.T) {
	for name, test := range map[string]struct{ text, want string }{
		"an unknown field": {strings.Replace(good, "delivery", "delivry", 1), "delivry"},
		"another kind":     {strings.Replace(good, "NetworkProfile", "ConfigMap", 1), `"ConfigMap"`},
		"no name":          {strings.Replace(good, "name: default", "", 1), "metadata.name"},
		"no YAML":          {"{", "profile.yaml"},
		"nothing":          {"", `kind ""`},
	} {
		if _, err := Load(file(t, test.text), nil); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v, want one about %s", name, err, test.want)
		}
	}
	if _, err := Load(filepath.Join(t.TempDir(), "absent"), nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing file: %v", err)
	}
}

// start runs a Profile against an API server that gives these answers, the last one forever.
func start(ctx context.Context, t *testing.T, answers ...error) (asked int, err error) {
	t.Helper()
	c := fake.NewClientBuilder().WithInterceptorFuncs(interceptor.Funcs{
		Apply: func(context.Context, client.WithWatch, runtime.ApplyConfiguration, ...client.ApplyOption) error {
			asked++
			return answers[min(asked, len(answers))-1]
		},
	}).Build()
	p, err := Load(file(t, good), c)
	if err != nil {
		t.Fatal(err)
	}
	p.retry = wait.Backoff{Duration: time.Millisecond}
	err = p.Start(ctx)
	return asked, err
}

func TestDefaultProfileWaitsForCRD(t *testing.T) {
	notServed := &meta.NoKindMatchError{GroupKind: schema.GroupKind{Group: "evenkeel.dev", Kind: "NetworkProfile"}}
	if asked, err := start(t.Context(), t, notServed, notServed, notServed, nil); err != nil || asked != 4 {
		t.Errorf("asked %d times: %v", asked, err)
	}
}

func TestDefaultProfileRefusedIsError(t *testing.T) {
	_, err := start(t.Context(), t, apierrors.NewInvalid(schema.GroupKind{Kind: "NetworkProfile"}, "default", nil))
	if err == nil || !strings.Contains(err.Error(), "default profile default") {
		t.Errorf("error %v", err)
	}
}

func TestDefaultProfileStops(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := start(ctx, t, errors.New("the API server is away")); err != nil {
		t.Errorf("error %v", err)
	}
}
