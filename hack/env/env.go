// Package env installs everything that the demo and the end-to-end tests need: the local cluster (or uses an existing one), the
// images, the training-operator and the chart.
package env

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"evenkeel.dev/evenkeel/hack/ci/artifacts"
	"evenkeel.dev/evenkeel/hack/cluster/local"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// Names of the installed chart.
const (
	Release   = "evenkeel"
	Namespace = "evenkeel-system"
)

// A Config describes the environment.
type Config struct {
	// Existing uses the cluster of KUBECONFIG, with images in Registry, instead of the local cluster.
	Existing bool
	// Registry receives the images for an existing cluster, such as registry.example.com/evenkeel.
	Registry string
	// Cluster describes the local cluster.
	Cluster local.Config
	// MPIOperator installs the mpi-operator too, so that checks run as MPIJobs.
	MPIOperator bool
	// Kueue installs Kueue too.
	Kueue bool
	// Torch makes the image with PyTorch available too, and gives jobs of the default profile the Python package.
	Torch bool
	// Kinds installs the controllers of JobSet, LeaderWorkerSet, TrainJob and Ray too, and lets Kueue manage pods.
	Kinds bool
	// Progress receives one line per step.
	Progress io.Writer
}

// Images are the pinned references (name@sha256:...) that the cluster's nodes can pull.
type Images struct {
	Operator, Plugin, Bench, Server, Training, NVSentinelCheck string
	PyTorch                                                    string // with Torch
}

// A Cluster is a cluster with Evenkeel and the training-operator installed.
type Cluster struct {
	Images     Images
	Kubeconfig string
	// Local is nil for an existing cluster.
	Local *local.Cluster
	// Client reads and writes any object; Clientset reads logs and runs commands in pods.
	Client    client.Client
	Clientset *kubernetes.Clientset

	config        Config
	kubectl, helm string
}

// Start installs everything that is missing or not current.
func Start(ctx context.Context, config Config) (*Cluster, error) {
	// Without a logger the client library prints a long warning.
	log.SetLogger(logr.Discard())
	e := &Cluster{config: config}
	type step struct {
		name string
		do   func(context.Context) error
	}
	steps := []step{
		{"Tools", e.tools},
		{"Cluster", e.cluster},
		{"Images", e.images},
		{"Training operator", e.trainingOperator},
		{"Evenkeel chart", func(ctx context.Context) error { return e.InstallChart(ctx) }},
	}
	if config.MPIOperator {
		steps = append(steps, step{"MPI operator", e.mpiOperator})
	}
	if config.Kueue {
		steps = append(steps, step{"Kueue", e.kueue})
	}
	if config.Kinds {
		steps = append(steps, step{"Controllers of further kinds of jobs", e.kinds})
	}
	for _, step := range steps {
		started := time.Now()
		fmt.Fprintf(config.Progress, "==> %s\n", step.name)
		if err := step.do(ctx); err != nil {
			return nil, fmt.Errorf("%s: %w", strings.ToLower(step.name), err)
		}
		fmt.Fprintf(config.Progress, "    done in %s\n", time.Since(started).Round(100*time.Millisecond))
	}
	return e, nil
}

// KubectlPath is the kubectl that Kubectl runs.
func (e *Cluster) KubectlPath() string { return e.kubectl }

// Kubectl runs kubectl against the cluster and returns its output.
func (e *Cluster) Kubectl(ctx context.Context, args ...string) (string, error) {
	return e.command(ctx, "", e.kubectl, args...)
}

// KubectlInput is Kubectl with text on standard input.
func (e *Cluster) KubectlInput(ctx context.Context, input string, args ...string) (string, error) {
	return e.command(ctx, input, e.kubectl, args...)
}

// Helm runs helm against the cluster and returns its output.
func (e *Cluster) Helm(ctx context.Context, args ...string) (string, error) {
	return e.command(ctx, "", e.helm, args...)
}

// InstallChart installs or upgrades the chart with the images just built, and waits until it is ready.
func (e *Cluster) InstallChart(ctx context.Context, extra ...string) error {
	root, err := toolbox.Root()
	if err != nil {
		return err
	}
	return e.InstallChartOf(ctx, filepath.Join(root, "charts", "evenkeel"), e.Images.Operator, extra...)
}

// InstallChartOf is InstallChart for a chart and an image of the operator of another version.
func (e *Cluster) InstallChartOf(ctx context.Context, chart, operator string, extra ...string) error {
	repository, digest, _ := strings.Cut(operator, "@")
	args := append([]string{
		"upgrade", "--install", Release, chart,
		"--namespace", Namespace, "--create-namespace", "--wait", "--timeout", "3m",
		"--set", "image.repository=" + repository, "--set", "image.digest=" + digest,
		"--set", "defaultProfile.spec.plugin.image=" + e.Images.Plugin,
		"--set", "preflight.benchImage=" + e.Images.Bench,
		"--set", "reduction.image=" + e.Images.Server,
	}, extra...)
	if e.config.Torch {
		args = append(args, "--set", "defaultProfile.spec.plugin.python=Enabled")
	}
	if e.Local != nil {
		// Its nodes share this machine's processors, so servers request little.
		args = append(args, "--set-string", "defaultProfile.spec.reduction.server.cpu=250m")
	}
	if _, err := e.Helm(ctx, args...); err != nil {
		return err
	}
	return e.DefaultProfile(ctx)
}

// DefaultProfile waits until jobs can use the default profile, which the operator makes once it is the leader.
func (e *Cluster) DefaultProfile(ctx context.Context) error {
	for _, state := range []string{"create", "condition=Ready"} {
		if _, err := e.Kubectl(ctx, "wait", "networkprofile/default", "--for="+state, "--timeout=60s"); err != nil {
			return err
		}
	}
	return nil
}

func (e *Cluster) tools(ctx context.Context) error {
	box, err := toolbox.New(e.config.Progress)
	if err != nil {
		return err
	}
	for name, path := range map[string]*string{"kubectl": &e.kubectl, "helm": &e.helm} {
		if found, err := exec.LookPath(name); err == nil && e.config.Existing {
			*path = found
			continue
		}
		if *path, err = box.Path(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

func (e *Cluster) cluster(ctx context.Context) error {
	if e.config.Existing {
		e.Kubeconfig = os.Getenv("KUBECONFIG")
		if e.Kubeconfig == "" || e.config.Registry == "" {
			return errors.New("an existing cluster needs KUBECONFIG (its kubeconfig) and REGISTRY (from which its nodes pull images, such as registry.example.com/evenkeel)")
		}
	} else {
		c, err := local.Up(ctx, e.config.Cluster)
		if err != nil {
			return err
		}
		e.Local, e.Kubeconfig = c, c.Kubeconfig()
	}
	rest, err := clientcmd.BuildConfigFromFlags("", e.Kubeconfig)
	if err != nil {
		return fmt.Errorf("kubeconfig %s: %w", e.Kubeconfig, err)
	}
	rest.QPS, rest.Burst = 50, 100
	if e.Clientset, err = kubernetes.NewForConfig(rest); err != nil {
		return fmt.Errorf("client: %w", err)
	}
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), evenkeel.AddToScheme(scheme)); err != nil {
		return fmt.Errorf("kinds: %w", err)
	}
	if e.Client, err = client.New(rest, client.Options{Scheme: scheme}); err != nil {
		return fmt.Errorf("client: %w", err)
	}
	return nil
}

func (e *Cluster) images(ctx context.Context) error {
	builder := artifacts.Builder{Registry: e.config.Existing, Progress: indent{e.config.Progress}}
	if _, err := builder.All(ctx); err != nil {
		return err
	}
	images := map[string]*string{
		artifacts.Operator: &e.Images.Operator, artifacts.Plugin: &e.Images.Plugin,
		artifacts.Bench: &e.Images.Bench, artifacts.Server: &e.Images.Server, artifacts.Training: &e.Images.Training,
		artifacts.NVSentinelCheck: &e.Images.NVSentinelCheck,
	}
	if e.config.Torch {
		name, err := builder.PyTorch(ctx)
		if err != nil {
			return err
		}
		images[name] = &e.Images.PyTorch
	}
	for name, pinned := range images {
		var err error
		if *pinned, err = e.push(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

// push makes an image of buildah's local storage available to the cluster's nodes and returns its pinned reference.
func (e *Cluster) push(ctx context.Context, image string) (string, error) {
	if e.Local != nil {
		return e.Local.Load(ctx, image)
	}
	name := strings.TrimPrefix(strings.TrimSuffix(image, ":dev"), "localhost/")
	target := strings.TrimSuffix(e.config.Registry, "/") + "/" + name
	digestFile := filepath.Join(os.TempDir(), fmt.Sprintf("%s-%d.digest", name, os.Getpid()))
	defer os.Remove(digestFile)
	if _, err := e.command(ctx, "", "buildah", "push", "--digestfile", digestFile, image, "docker://"+target+":dev"); err != nil {
		return "", err
	}
	digest, err := os.ReadFile(digestFile)
	if err != nil {
		return "", fmt.Errorf("push %s: %w", image, err)
	}
	return target + "@" + strings.TrimSpace(string(digest)), nil
}

func (e *Cluster) command(ctx context.Context, input, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+e.Kubeconfig)
	cmd.Stdin = strings.NewReader(input)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s %s: %w: %s", filepath.Base(name), strings.Join(args, " "), err, bytes.TrimSpace(stderr.Bytes()))
	}
	return stdout.String(), nil
}

// indent indents the lines of a step below its name.
type indent struct{ w io.Writer }

func (i indent) Write(p []byte) (int, error) {
	for line := range strings.Lines(string(p)) {
		if _, err := fmt.Fprint(i.w, "    ", line); err != nil {
			return 0, err
		}
	}
	return len(p), nil
}
