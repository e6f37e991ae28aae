package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

const (
	// reachTimeout bounds the wait for the API server: a new pod's network may need some seconds.
	reachTimeout = 20 * time.Second
	// kindTimeout bounds the wait for each of our kinds, which are installed in the same step as this program.
	kindTimeout = time.Minute
	// syncTimeout bounds the first listing of what a role watches.
	syncTimeout = 2 * time.Minute
	// readTimeout bounds the question whether the namespace is being deleted, so that a process ends soon without an API
	// server.
	readTimeout = 5 * time.Second
)

// A process is what both roles have.
type process struct {
	metricsAddress, probeAddress, namespace string
}

func (p *process) flags(flags *pflag.FlagSet) {
	flags.StringVar(&p.metricsAddress, "metrics-bind-address", ":8080", `where Prometheus metrics are served; "0" turns them off`)
	flags.StringVar(&p.probeAddress, "health-probe-bind-address", ":8081", `where /healthz and /readyz are served; "0" turns them off`)
	flags.StringVar(&p.namespace, "namespace", os.Getenv("POD_NAMESPACE"), "the namespace of this installation (default: the environment's POD_NAMESPACE)")
}

func (p *process) validate() error {
	for flag, address := range map[string]string{"metrics-bind-address": p.metricsAddress, "health-probe-bind-address": p.probeAddress} {
		if _, _, err := net.SplitHostPort(address); address != "0" && err != nil {
			return fmt.Errorf(`--%s=%q: want HOST:PORT, :PORT or "0"`, flag, address)
		}
	}
	return nil
}

// needs says which of the flags is missing, the first by name.
func needs(when string, flags map[string]string) error {
	missing := ""
	for flag, value := range flags {
		if value == "" && (missing == "" || flag < missing) {
			missing = flag
		}
	}
	if missing == "" {
		return nil
	}
	return fmt.Errorf("%s needs --%s", when, missing)
}

// manager connects to the cluster and creates the manager, once the API server serves the kinds that the role needs. Options have
// what the role adds.
func (p *process) manager(ctx context.Context, options ctrl.Options, kinds ...string) (ctrl.Manager, error) {
	config, err := ctrl.GetConfig()
	if err != nil {
		return nil, fmt.Errorf("no cluster to work on (set KUBECONFIG, or run in a pod): %w", err)
	}
	if err := reach(ctx, config, reachTimeout); err != nil {
		return nil, err
	}
	options.Scheme = runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, apiextensionsv1.AddToScheme, evenkeel.AddToScheme} {
		if err := add(options.Scheme); err != nil {
			return nil, fmt.Errorf("scheme: %w", err)
		}
	}
	options.Metrics = metricsserver.Options{BindAddress: p.metricsAddress}
	options.HealthProbeBindAddress = p.probeAddress
	// Otherwise reading a kind that is not watched would start a watch, which takes more permissions.
	options.Cache.ReaderFailOnMissingInformer = true
	mgr, err := ctrl.NewManager(config, options)
	if err != nil {
		return nil, fmt.Errorf("start: %w", err)
	}
	if err := mgr.AddHealthzCheck("process", healthz.Ping); err != nil {
		return nil, fmt.Errorf("health check: %w", err)
	}
	for _, kind := range kinds {
		if err := waitForKind(ctx, mgr.GetRESTMapper(), kind, kindTimeout); err != nil {
			return nil, err
		}
	}
	return mgr, nil
}

// isLast reports whether the namespace of this installation is being deleted: no other process will come then.
func (p *process) isLast(ctx context.Context, mgr ctrl.Manager) bool {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	namespace := &corev1.Namespace{}
	if err := mgr.GetAPIReader().Get(ctx, client.ObjectKey{Name: p.namespace}, namespace); err != nil {
		mgr.GetLogger().Info("cannot read the own namespace", "reason", err.Error())
		return false
	}
	return namespace.DeletionTimestamp != nil
}

// reach waits until the API server answers. Otherwise the error says why it does not.
func reach(ctx context.Context, config *rest.Config, timeout time.Duration) error {
	config = rest.CopyConfig(config)
	config.Timeout = 5 * time.Second
	client, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		return fmt.Errorf("connect to %s: %w", config.Host, err)
	}
	var last error
	err = wait.PollUntilContextTimeout(ctx, time.Second, timeout, true, func(ctx context.Context) (bool, error) {
		err := client.RESTClient().Get().AbsPath("/version").Do(ctx).Error()
		switch {
		case err == nil, apierrors.IsForbidden(err): // it answers; missing permissions show later
			return true, nil
		case apierrors.IsUnauthorized(err):
			return false, fmt.Errorf("the API server at %s does not accept our credentials: %w", config.Host, err)
		case ctx.Err() == nil || last == nil:
			last = err
		}
		return false, nil
	})
	if wait.Interrupted(err) && last != nil {
		return fmt.Errorf("the API server at %s cannot be reached: %w", config.Host, last)
	}
	return err
}

// waitForKind waits until the API server serves a kind of ours.
func waitForKind(ctx context.Context, mapper meta.RESTMapper, name string, timeout time.Duration) error {
	kind := evenkeel.GroupVersion.WithKind(name)
	err := wait.PollUntilContextTimeout(ctx, time.Second, timeout, true, func(context.Context) (bool, error) {
		_, err := mapper.RESTMapping(kind.GroupKind(), kind.Version)
		if meta.IsNoMatchError(err) {
			return false, nil
		}
		return err == nil, err
	})
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		plural, _ := meta.UnsafeGuessKindToResource(kind)
		return fmt.Errorf("the cluster has no %s (%s): install the CustomResourceDefinition %s.%s, which the chart does unless crds.enabled is false", name, evenkeel.GroupVersion, plural.Resource, kind.Group)
	case err != nil:
		return fmt.Errorf("discover %s: %w", name, err)
	}
	return nil
}
