// Package apiserver starts real API servers for tests and installs what the chart renders on them.
package apiserver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utilversion "k8s.io/apimachinery/pkg/util/version"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/yaml"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// startTimeout and stopTimeout bound the start and the end of the API server and of etcd, on a busy machine.
const startTimeout, stopTimeout = 2 * time.Minute, time.Minute

// Start starts etcd and an API server with the definitions in the files, and returns how to reach it as its administrator.
// The work folder is the caller's, and empty. To webhooks, the API server presents the certificate in [IdentityFile].
func Start(work string, definitions ...string) (config *rest.Config, stop func() error, err error) {
	assets := os.Getenv("KUBEBUILDER_ASSETS")
	if assets == "" {
		return nil, nil, errors.New("KUBEBUILDER_ASSETS is not set: KUBEBUILDER_ASSETS=$(go run ./hack/cluster tool envtest) go test ./operator/test/..., or make test STAGE=operator")
	}
	if err := mortal(assets, work); err != nil {
		return nil, nil, err
	}
	environment := &envtest.Environment{
		BinaryAssetsDirectory: work, ErrorIfCRDPathMissing: true, CRDDirectoryPaths: definitions,
		ControlPlaneStartTimeout: startTimeout, ControlPlaneStopTimeout: stopTimeout,
	}
	admission, err := identity(work)
	if err != nil {
		return nil, nil, fmt.Errorf("identity of the API server: %w", err)
	}
	environment.ControlPlane.GetAPIServer().Configure().Set("admission-control-config-file", admission)
	if config, err = environment.Start(); err != nil {
		return nil, nil, fmt.Errorf("start the API server: %w", err)
	}
	config.QPS, config.Burst = 200, 400
	return config, environment.Stop, nil
}

// mortal puts programs of the same names as the assets into the folder, which end when this process does, however it
// ends: otherwise a killed test would leave a database running.
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

// Operator is the path of the operator's program in the folder, which is built if it is not there yet.
func Operator(root, folder string) (string, error) {
	path := filepath.Join(folder, "evenkeel-operator")
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	return path, Command(root, nil, "go", "build", "-o", path, "./operator/cmd/evenkeel-operator")
}

// Helm is the path of the helm that HELM names, or of one that is built if need be.
func Helm() (string, error) {
	if path := os.Getenv("HELM"); path != "" {
		return path, nil
	}
	box, err := toolbox.New(os.Stderr)
	if err != nil {
		return "", err
	}
	return box.Path(context.Background(), "helm")
}

// version asks the API server's program.
var version = sync.OnceValues(func() (string, error) {
	var out bytes.Buffer
	if err := Command(".", &out, filepath.Join(os.Getenv("KUBEBUILDER_ASSETS"), "kube-apiserver"), "--version"); err != nil {
		return "", fmt.Errorf("version of the API server in KUBEBUILDER_ASSETS: %w", err)
	}
	said, ok := strings.CutPrefix(strings.TrimSpace(out.String()), "Kubernetes ")
	if !ok {
		return "", fmt.Errorf("version of the API server: kube-apiserver --version prints %q", out.String())
	}
	return said, nil
})

// AtLeast reports whether the API server is of the version, such as "1.36", or a later one.
func AtLeast(t testing.TB, oldest string) bool {
	t.Helper()
	said, err := version()
	if err != nil {
		t.Fatal(err)
	}
	is, err := utilversion.ParseSemantic(said)
	if err != nil {
		t.Fatal(err)
	}
	return is.AtLeast(utilversion.MustParseGeneric(oldest))
}

// Older reports whether the API server is of a minor version before the local cluster's.
func Older(t testing.TB) bool {
	t.Helper()
	said, err := version()
	if err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(toolbox.OlderKubernetes, func(minor string) bool { return strings.HasPrefix(said, "v"+minor+".") })
}

// Needs skips a test on API servers older than the version, which lack something.
func Needs(t testing.TB, oldest, lacks string) {
	t.Helper()
	if !AtLeast(t, oldest) {
		t.Skipf("Kubernetes before %s lacks %s", oldest, lacks)
	}
}

// rendered has what helm printed, by its arguments.
var rendered struct {
	sync.Mutex
	text map[string]string
}

// Chart returns the objects that the chart renders for the API server's version. With the same arguments, helm runs once.
func Chart(root, namespace string, args ...string) ([]*unstructured.Unstructured, error) {
	kubernetes, err := version()
	if err != nil {
		return nil, err
	}
	text, err := render(root, append([]string{"template", "evenkeel", filepath.Join("charts", "evenkeel"), "--namespace", namespace, "--kube-version", kubernetes}, args...))
	if err != nil {
		return nil, err
	}
	var objects []*unstructured.Unstructured
	for document := range strings.SplitSeq(text, "\n---\n") {
		object := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(document), &object.Object); err != nil {
			return nil, fmt.Errorf("the chart renders what is not YAML: %w\n%s", err, document)
		}
		if len(object.Object) > 0 {
			objects = append(objects, object)
		}
	}
	return objects, nil
}

func render(root string, args []string) (string, error) {
	rendered.Lock()
	defer rendered.Unlock()
	key := strings.Join(append([]string{root}, args...), "\x00")
	if text, done := rendered.text[key]; done {
		return text, nil
	}
	path, err := Helm()
	if err != nil {
		return "", err
	}
	var out bytes.Buffer
	if err := Command(root, &out, path, args...); err != nil {
		return "", err
	}
	if rendered.text == nil {
		rendered.text = map[string]string{}
	}
	rendered.text[key] = out.String()
	return out.String(), nil
}

// Source is the folder of a third-party program's own files, in the module that the local cluster builds it from.
func Source(root, tool, module string) (string, error) {
	var out bytes.Buffer
	folder := filepath.Join(root, "hack", "cluster", "tools", tool)
	if err := Command(folder, &out, "go", "mod", "download", "-json", module); err != nil {
		return "", err
	}
	var found struct{ Dir string }
	if err := json.Unmarshal(out.Bytes(), &found); err != nil {
		return "", fmt.Errorf("go mod download: %w", err)
	}
	return found.Dir, nil
}

// As acts as a service account of the namespace, with its permissions and no others.
func As(config *rest.Config, namespace, account string) *rest.Config {
	config = rest.CopyConfig(config)
	config.Impersonate = rest.ImpersonationConfig{
		UserName: fmt.Sprintf("system:serviceaccount:%s:%s", namespace, account),
		Groups:   []string{"system:serviceaccounts", "system:serviceaccounts:" + namespace, "system:authenticated"},
	}
	return config
}

// Command runs a program; out, if not nil, gets what it prints.
func Command(dir string, out *bytes.Buffer, name string, args ...string) error {
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
