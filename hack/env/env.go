// Package env installs everything that the demo and the end-to-end tests need: the local cluster (or uses an existing
// one), the images, the training-operator and the chart.
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
	"sync"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"
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

// Start installs everything that is missing or not current. Compilers, and the downloads and unpacking of packages, run
// at the same time.
func Start(ctx context.Context, config Config) (*Cluster, error) {
	// Without a logger the client library prints a long warning.
	log.SetLogger(logr.Discard())
	e := &Cluster{config: config}
	builds := []step{
		{"cluster", func(ctx context.Context, progress io.Writer) error {
			if err := e.tools(ctx, progress); err != nil {
				return err
			}
			// A cluster mostly waits while it starts.
			group, ctx := errgroup.WithContext(ctx)
			group.Go(func() error { return e.cluster(ctx, progress) })
			group.Go(func() error { return e.buildControllers(ctx, progress) })
			return group.Wait()
		}},
		{"images", e.buildImages},
	}
	if config.Torch {
		builds = append(builds, step{"PyTorch", e.buildPyTorch})
	}
	if err := e.together(ctx, builds...); err != nil {
		return nil, err
	}
	if err := e.together(ctx, step{"load", e.load}); err != nil {
		return nil, err
	}
	install := []step{{"chart", func(ctx context.Context, _ io.Writer) error { return e.InstallChart(ctx) }}}
	if config.Torch {
		// Nothing that is installed needs this image, which is ten times as large as the others.
		install = append(install, step{"PyTorch", e.loadPyTorch})
	}
	for _, c := range e.controllers() {
		install = append(install, step{c.name, func(ctx context.Context, progress io.Writer) error { return e.install(ctx, c, progress) }})
	}
	return e, e.together(ctx, install...)
}

// A step is a part of [Start]. Its lines of progress begin with its name.
type step struct {
	name string
	do   func(ctx context.Context, progress io.Writer) error
}

// together runs steps at the same time. When one fails, the others are stopped.
func (e *Cluster) together(ctx context.Context, steps ...step) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, s := range steps {
		group.Go(func() error {
			started := time.Now()
			progress := labelled(e.config.Progress, s.name)
			if err := s.do(ctx, progress); err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
			fmt.Fprintf(progress, "done in %s\n", time.Since(started).Round(100*time.Millisecond))
			return nil
		})
	}
	return group.Wait()
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

// buildControllers builds the controllers that are installed on the local cluster.
func (e *Cluster) buildControllers(ctx context.Context, progress io.Writer) error {
	if e.config.Existing {
		return nil
	}
	box, err := toolbox.New(progress)
	if err != nil {
		return err
	}
	var names []string
	for _, c := range e.controllers() {
		names = append(names, c.name)
	}
	_, err = box.Dirs(ctx, names...)
	return err
}

// tools builds the programs of the cluster, and finds those that talk to it.
func (e *Cluster) tools(ctx context.Context, progress io.Writer) error {
	box, err := toolbox.New(progress)
	if err != nil {
		return err
	}
	if !e.config.Existing {
		if _, err := box.Dirs(ctx, append([]string{"kubectl", "helm"}, local.Tools...)...); err != nil {
			return err
		}
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

func (e *Cluster) cluster(ctx context.Context, progress io.Writer) error {
	if e.config.Existing {
		e.Kubeconfig = os.Getenv("KUBECONFIG")
		if e.Kubeconfig == "" || e.config.Registry == "" {
			return errors.New("an existing cluster needs KUBECONFIG (its kubeconfig) and REGISTRY (from which its nodes pull images, such as registry.example.com/evenkeel)")
		}
	} else {
		config := e.config.Cluster
		config.Progress = progress
		c, err := local.Up(ctx, config)
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

func (e *Cluster) builder(progress io.Writer) artifacts.Builder {
	// An existing cluster may be where somebody measures.
	return artifacts.Builder{Quick: !e.config.Existing, Registry: e.config.Existing, Progress: progress}
}

func (e *Cluster) buildImages(ctx context.Context, progress io.Writer) error {
	_, err := e.builder(progress).All(ctx)
	return err
}

func (e *Cluster) buildPyTorch(ctx context.Context, progress io.Writer) error {
	_, err := e.builder(progress).PyTorch(ctx)
	return err
}

// load makes the images that were built available to the cluster's nodes.
func (e *Cluster) load(ctx context.Context, progress io.Writer) error {
	images := map[string]*string{
		artifacts.Operator: &e.Images.Operator, artifacts.Plugin: &e.Images.Plugin,
		artifacts.Bench: &e.Images.Bench, artifacts.Server: &e.Images.Server, artifacts.Training: &e.Images.Training,
		artifacts.NVSentinelCheck: &e.Images.NVSentinelCheck,
	}
	for name, pinned := range images {
		var err error
		if *pinned, err = e.push(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

func (e *Cluster) loadPyTorch(ctx context.Context, _ io.Writer) (err error) {
	e.Images.PyTorch, err = e.push(ctx, artifacts.PyTorch)
	return err
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

// labelled returns a writer that puts a step's name before each line. Steps that run at the same time write whole lines
// to w.
func labelled(w io.Writer, name string) io.Writer { return &label{w: w, name: name} }

type label struct {
	w    io.Writer
	name string
	lock sync.Mutex
	rest []byte // of a line that is not complete
}

func (l *label) Write(p []byte) (int, error) {
	l.lock.Lock()
	defer l.lock.Unlock()
	l.rest = append(l.rest, p...)
	for {
		line, rest, complete := bytes.Cut(l.rest, []byte{'\n'})
		if !complete {
			return len(p), nil
		}
		if _, err := fmt.Fprintf(l.w, "%-18s %s\n", l.name, line); err != nil {
			return len(p), err
		}
		l.rest = append(l.rest[:0], rest...)
	}
}
