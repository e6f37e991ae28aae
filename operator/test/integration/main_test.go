// Package integration runs the operator's program against a real API server, installed by what the chart renders: its
// objects, its arguments, its permissions. There are no nodes and no job controllers; the tests make what they need.
package integration

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/go-logr/logr"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/operator/test/apiserver"
)

// What every test works with: the API server as its administrator, and Evenkeel installed on it.
var (
	admin   client.Client
	config  *rest.Config
	install *installation
)

func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "integration:", err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	log.SetLogger(logr.Discard()) // without a logger the client library prints a warning
	root, err := toolbox.Root()
	if err != nil {
		return 1, err
	}
	work, err := os.MkdirTemp("", "evenkeel-integration-")
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(work)
	var definitions []string
	for _, of := range []struct{ tool, module, file string }{
		{"cluster", "github.com/kubeflow/training-operator", "manifests/base/crds/kubeflow.org_pytorchjobs.yaml"},
		{"volcano", "volcano.sh/volcano", "config/crd/volcano/bases/batch.volcano.sh_jobs.yaml"},
		{"lws", "sigs.k8s.io/lws", "config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml"},
		{"cert-manager", "github.com/cert-manager/cert-manager", "deploy/crds/cert-manager.io_certificates.yaml"},
		{"cert-manager", "github.com/cert-manager/cert-manager", "deploy/crds/cert-manager.io_issuers.yaml"},
	} {
		folder, err := apiserver.Source(root, of.tool, of.module)
		if err != nil {
			return 1, err
		}
		definitions = append(definitions, filepath.Join(folder, filepath.FromSlash(of.file)))
	}
	var stop func() error
	if config, stop, err = apiserver.Start(work, definitions...); err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, stop()) }()
	if admin, err = client.New(config, client.Options{Scheme: scheme}); err != nil {
		return 1, err
	}
	binary, err := apiserver.Operator(root, work)
	if err != nil {
		return 1, err
	}
	if install, err = newInstallation(root, work, binary); err != nil {
		return 1, err
	}
	if err := install.start(); err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, install.stop()) }()
	return m.Run(), nil
}
