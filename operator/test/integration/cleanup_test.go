package integration

import (
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/operator/api/v1beta1"
	"evenkeel.dev/evenkeel/operator/test/apiserver"
)

// newCleanup installs what the chart's hook after an uninstall has beside its Job, and returns what runs the program as the Job does.
func newCleanup(t *testing.T) (run func() (output string, err error)) {
	t.Helper()
	objects, err := apiserver.Chart(install.root, systemNamespace)
	if err != nil {
		t.Fatal(err)
	}
	var job *unstructured.Unstructured
	for _, object := range objects {
		if object.GetAnnotations()["helm.sh/hook"] != "post-delete" {
			continue
		}
		if object.GetKind() == "Job" {
			job = object
			continue
		}
		if err := admin.Create(t.Context(), object); err != nil {
			t.Fatal(err)
		}
		remove(t, object)
	}
	spec, _, err := unstructured.NestedMap(job.Object, "spec", "template", "spec")
	if err != nil {
		t.Fatal(err)
	}
	containers, _, err := unstructured.NestedSlice(spec, "containers")
	if err != nil {
		t.Fatal(err)
	}
	args, _, err := unstructured.NestedStringSlice(containers[0].(map[string]any), "args")
	if err != nil {
		t.Fatal(err)
	}
	kubeconfig, err := install.kubeconfig(spec["serviceAccountName"].(string))
	if err != nil {
		t.Fatal(err)
	}
	return func() (output string, err error) {
		// The authorizer reads new roles a moment later.
		eventually(t, "the hook has its permissions", func(ctx context.Context) (bool, error) {
			cmd := exec.CommandContext(ctx, install.binary, args...)
			cmd.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig, "POD_NAMESPACE="+systemNamespace)
			var text []byte
			text, err = cmd.CombinedOutput()
			output = string(text)
			return !strings.Contains(output, "forbidden"), nil
		})
		return output, err
	}
}

// restoreController applies the Deployment of the controller again, which a test has deleted.
func restoreController(t *testing.T) {
	t.Helper()
	manifests, err := install.manifests()
	if err != nil {
		t.Error(err)
		return
	}
	controller := install.objects["Deployment/evenkeel-controller"].DeepCopy()
	// There is no garbage collector, which would do this when the pods are gone.
	patch := client.RawPatch(types.MergePatchType, []byte(`{"metadata": {"finalizers": null}}`))
	if err := admin.Patch(context.Background(), controller, patch); client.IgnoreNotFound(err) != nil {
		t.Error(err)
	}
	for _, manifest := range manifests {
		if manifest.GetKind() != "Deployment" || manifest.GetName() != controller.GetName() {
			continue
		}
		err := wait.PollUntilContextTimeout(context.Background(), 50*time.Millisecond, waitTimeout, true, func(ctx context.Context) (bool, error) {
			live, err := applied(ctx, manifest)
			return err == nil && live.GetDeletionTimestamp() == nil, err
		})
		if err != nil {
			t.Errorf("the controller's Deployment is not there again: %v", err)
		}
	}
}

// The Job of an uninstall opens no gate under a controller that stays, as where manifests with the hooks are applied as they are.
func TestCleanupRefusesBesideController(t *testing.T) {
	_, pool, ns := newGate(t, "kept", waitRegardless)
	jobs := gatedJobs(t, ns, pool)
	cleanup := newCleanup(t)
	said, err := cleanup()
	if err == nil || strings.Count(said, "\n") != 1 {
		t.Errorf("beside a controller it ends with %v, and says\n%s", err, said)
	}
	for _, want := range []string{"Deployment evenkeel-system/evenkeel-controller", "helm uninstall", "helm template --no-hooks"} {
		if !strings.Contains(said, want) {
			t.Errorf("it does not name %q: %s", want, said)
		}
	}
	for _, job := range jobs {
		if got, err := stateOf(t.Context(), job); err != nil || got != "suspended, gated true" {
			t.Errorf("the %s is %s, %v", job.GetKind(), got, err)
		}
	}

	// While the Deployment waits for its pods to be deleted, as by helm uninstall --cascade=foreground, nobody needs it any more.
	t.Cleanup(func() { restoreController(t) })
	t.Cleanup(func() { restoreDefinitions(t) })
	controller := install.objects["Deployment/evenkeel-controller"].DeepCopy()
	if err := admin.Delete(t.Context(), controller, client.PropagationPolicy(metav1.DeletePropagationForeground)); err != nil {
		t.Fatal(err)
	}
	if err := admin.Get(t.Context(), client.ObjectKeyFromObject(controller), controller); err != nil || controller.GetDeletionTimestamp() == nil {
		t.Fatalf("the Deployment is not being deleted: %v", err)
	}
	if said, err := cleanup(); err != nil {
		t.Errorf("the controller is being deleted: %v\n%s", err, said)
	}
	for _, job := range jobs {
		isStateOf(t, job, "runs")
	}
	// Nobody converts objects any more.
	eventually(t, "the CRDs serve the stored version alone", func(ctx context.Context) (bool, error) {
		var profiles v1beta1.NetworkProfileList
		err := admin.List(ctx, &profiles)
		return meta.IsNoMatchError(err) || apierrors.IsNotFound(err), nil
	})
}
