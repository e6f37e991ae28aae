// Package integration runs the operator's program against a real API server, installed by what the chart renders: its
// objects, its arguments, its permissions. There are no nodes and no job controllers; the tests make what they need.
package integration

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
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
	assets := os.Getenv("KUBEBUILDER_ASSETS")
	if assets == "" {
		return 1, errors.New("KUBEBUILDER_ASSETS is not set: KUBEBUILDER_ASSETS=$(go run ./hack/cluster tool envtest) go test ./operator/test/..., or make test-operator")
	}
	root, err := toolbox.Root()
	if err != nil {
		return 1, err
	}
	work, err := os.MkdirTemp("", "evenkeel-integration-")
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(work)
	if err := mortal(assets, work); err != nil {
		return 1, err
	}
	if err := os.Setenv("KUBEBUILDER_ASSETS", work); err != nil {
		return 1, err
	}
	crds, err := trainingOperatorCRDs(root)
	if err != nil {
		return 1, err
	}
	environment := &envtest.Environment{
		ErrorIfCRDPathMissing: true,
		CRDDirectoryPaths:     []string{filepath.Join(crds, "kubeflow.org_pytorchjobs.yaml")},
	}
	if config, err = environment.Start(); err != nil {
		return 1, fmt.Errorf("start the API server: %w", err)
	}
	defer func() { err = errors.Join(err, environment.Stop()) }()
	config.QPS, config.Burst = 200, 400
	if admin, err = client.New(config, client.Options{Scheme: scheme}); err != nil {
		return 1, err
	}
	binary := filepath.Join(work, "evenkeel-operator")
	if err := command(root, nil, "go", "build", "-o", binary, "./operator/cmd/evenkeel-operator"); err != nil {
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

// mortal puts programs of the same names as the assets into the folder, which end when this process does, however it
// ends: nobody would stop a database that a killed test left behind.
func mortal(assets, dir string) error {
	for _, name := range []string{"etcd", "kube-apiserver", "kubectl"} {
		path, err := filepath.Abs(filepath.Join(assets, name))
		if err != nil {
			return err
		}
		if _, err := os.Stat(path); err != nil {
			return fmt.Errorf("KUBEBUILDER_ASSETS=%s: %w", assets, err)
		}
		script := fmt.Sprintf("#!/bin/sh\nexec setpriv --pdeathsig KILL '%s' \"$@\"\n", path)
		if err := os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755); err != nil {
			return err
		}
	}
	return nil
}

// trainingOperatorCRDs is the folder of the training-operator's own definitions, in the module that the demo runs.
func trainingOperatorCRDs(root string) (string, error) {
	var out bytes.Buffer
	folder := filepath.Join(root, "hack", "cluster", "tools", "training-operator")
	if err := command(folder, &out, "go", "mod", "download", "-json", "github.com/kubeflow/training-operator"); err != nil {
		return "", err
	}
	var module struct{ Dir string }
	if err := json.Unmarshal(out.Bytes(), &module); err != nil {
		return "", fmt.Errorf("go mod download: %w", err)
	}
	return filepath.Join(module.Dir, "manifests", "base", "crds"), nil
}

// helm returns what the chart renders.
func helm(root, namespace string, args ...string) (string, error) {
	path := os.Getenv("HELM")
	if path == "" {
		box, err := toolbox.New(os.Stderr)
		if err != nil {
			return "", err
		}
		if path, err = box.Path(context.Background(), "helm"); err != nil {
			return "", err
		}
	}
	var out bytes.Buffer
	args = append([]string{"template", "evenkeel", filepath.Join("charts", "evenkeel"), "--namespace", namespace}, args...)
	err := command(root, &out, path, args...)
	return out.String(), err
}

// command runs a program; out, if not nil, gets what it prints.
func command(dir string, out *bytes.Buffer, name string, args ...string) error {
	var errors bytes.Buffer
	cmd := exec.Command(name, args...)
	cmd.Dir, cmd.Stderr = dir, &errors
	if out != nil {
		cmd.Stdout = out
	}
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", filepath.Base(name), strings.Join(args, " "), err, errors.String())
	}
	return nil
}
