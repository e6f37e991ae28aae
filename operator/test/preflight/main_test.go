// Package preflight runs checks against a real API server, with the permissions that the chart gives the controller. What
// a cluster's job controller and kubelets would do is done by a [fleet], which decides how each run ends.
package preflight

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/go-logr/logr"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/test/apiserver"
)

const (
	namespace  = "evenkeel-system"
	account    = "evenkeel-controller"
	digest     = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
	pluginName = "registry.example.com/evenkeel-plugin@" + digest
	// checkPriority is the chart's PriorityClass for the pods of checks.
	checkPriority = "evenkeel-check"
	benchName     = "registry.example.com/evenkeel-bench:1"
)

var (
	admin  client.Client
	config *rest.Config
	// work is a folder that goes with the tests.
	work string
	// definitions are the files of the kinds that API servers of these tests serve.
	definitions []string
	scheme      = func() *runtime.Scheme {
		s := runtime.NewScheme()
		if err := errors.Join(clientgoscheme.AddToScheme(s), evenkeel.AddToScheme(s)); err != nil {
			panic(err)
		}
		return s
	}()
)

func TestMain(m *testing.M) {
	// What the controller logs is of interest when a test fails.
	var log bytes.Buffer
	ctrl.SetLogger(logr.FromSlogHandler(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelError})))
	code, err := run(m)
	if code != 0 {
		fmt.Fprint(os.Stderr, log.String())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "preflight:", err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	root, err := toolbox.Root()
	if err != nil {
		return 1, err
	}
	if work, err = os.MkdirTemp("", "evenkeel-preflight-"); err != nil {
		return 1, err
	}
	defer os.RemoveAll(work)
	if definitions, err = filepath.Glob(filepath.Join(root, "charts", "evenkeel", "files", "crds", "*.yaml")); err != nil {
		return 1, err
	}
	mpiOperator, err := apiserver.Source(root, "cluster", "github.com/kubeflow/mpi-operator")
	if err != nil {
		return 1, err
	}
	trainingOperator, err := apiserver.Source(root, "cluster", "github.com/kubeflow/training-operator")
	if err != nil {
		return 1, err
	}
	kueueModule, err := apiserver.Source(root, "kueue", "sigs.k8s.io/kueue")
	if err != nil {
		return 1, err
	}
	for _, kind := range []string{"workloads", "admissionchecks", "resourceflavors", "clusterqueues", "multikueueconfigs"} {
		definitions = append(definitions, filepath.Join(kueueModule, "config", "components", "crd", "bases", "kueue.x-k8s.io_"+kind+".yaml"))
	}
	definitions = append(definitions, filepath.Join(mpiOperator, "manifests", "base", "kubeflow.org_mpijobs.yaml"),
		filepath.Join(trainingOperator, "manifests", "base", "crds", "kubeflow.org_pytorchjobs.yaml"))
	autoscaler, err := apiserver.Source(root, "kueue", "k8s.io/autoscaler/cluster-autoscaler/apis")
	if err != nil {
		return 1, err
	}
	definitions = append(definitions, filepath.Join(autoscaler, "config", "crd", "autoscaling.x-k8s.io_provisioningrequests.yaml"))
	var stop func() error
	if config, stop, err = apiserver.Start(work, definitions...); err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, stop()) }()
	if admin, err = client.New(config, client.Options{Scheme: scheme}); err != nil {
		return 1, err
	}
	if err := prepare(root, admin); err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, stopManagerCluster()) }()
	return m.Run(), nil
}

// prepare makes what every check needs: the namespace, the chart's permissions, a profile.
func prepare(root string, admin client.Client) error {
	// On a machine that has no Helm yet this builds it, for as long as that takes.
	objects, err := apiserver.Chart(root, namespace, "--set", "nvsentinel.connector=unix:///run/nvsentinel.sock", "--api-versions", "kueue.x-k8s.io/v1beta2/AdmissionCheck")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := admin.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace, Labels: map[string]string{
		"pod-security.kubernetes.io/enforce": "restricted",
	}}}); err != nil {
		return err
	}
	for _, object := range objects {
		if group := object.GroupVersionKind().Group; group == "rbac.authorization.k8s.io" || strings.HasPrefix(object.GetKind(), "ValidatingAdmissionPolicy") || object.GetKind() == "PriorityClass" {
			if err := admin.Create(ctx, object); err != nil {
				return err
			}
		}
	}
	profile := &evenkeel.NetworkProfile{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
	profile.Spec.Plugin = evenkeel.PluginSpec{Image: pluginName, Delivery: evenkeel.DeliveryImageVolume}
	return admin.Create(ctx, profile)
}
