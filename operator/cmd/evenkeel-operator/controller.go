package main

import (
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"evenkeel.dev/evenkeel/operator/internal/controller/defaults"
	"evenkeel.dev/evenkeel/operator/internal/controller/injectionevents"
	"evenkeel.dev/evenkeel/operator/internal/controller/jobgate"
	"evenkeel.dev/evenkeel/operator/internal/controller/jobgate/kueue"
	"evenkeel.dev/evenkeel/operator/internal/controller/jobgate/suspend"
	"evenkeel.dev/evenkeel/operator/internal/controller/jobkey"
	"evenkeel.dev/evenkeel/operator/internal/controller/networkcheck"
	"evenkeel.dev/evenkeel/operator/internal/controller/networkcheckpolicy"
	"evenkeel.dev/evenkeel/operator/internal/controller/networkprofile"
	"evenkeel.dev/evenkeel/operator/internal/controller/nodenetworkhealth"
	"evenkeel.dev/evenkeel/operator/internal/controller/pluginreports"
	"evenkeel.dev/evenkeel/operator/internal/controller/reductionservice"
	"evenkeel.dev/evenkeel/operator/internal/controller/suspicions"
	"evenkeel.dev/evenkeel/operator/internal/kube/debounce"
	"evenkeel.dev/evenkeel/operator/internal/metrics"
	"evenkeel.dev/evenkeel/operator/internal/nodeuse"
	"evenkeel.dev/evenkeel/operator/internal/uninstall"
)

const (
	// checkPoll is the interval at which a running check's pods are read. The end of a run is watched; reasons of waiting are polled.
	checkPoll = 3 * time.Second
	// suspicionPoll is the interval at which the pods of a job are read that suspects a node's network: they may have terminated.
	suspicionPoll = 10 * time.Second
	// kindPoll is the interval at which the cluster is asked for kinds of jobs that were installed meanwhile.
	kindPoll = 10 * time.Second
	// electionRetry is the interval at which a replica tries to become the leader, or to stay it.
	electionRetry = 2 * time.Second
	// releaseTimeout bounds the release of everything that waits, and is less than the pod's grace period.
	releaseTimeout = 55 * time.Second
)

type controllerRole struct {
	process
	elect, jobKeys                                                                         bool
	electionID, defaultProfile, benchImage, ncclTestsImage, rcclTestsImage, reductionImage string
	webhookConfiguration, gateBinding                                                      string
	checkPriorityClass                                                                     string
	reportAddress                                                                          string
	imagePullSecrets                                                                       []string
	delays                                                                                 float64
}

func controllerCommand() *cobra.Command {
	var c controllerRole
	cmd := &cobra.Command{
		Use:   "controller",
		Short: "Reconcile NetworkProfiles, NetworkChecks and their policies, open the gates of jobs, create reduction servers, and record Events",
		Example: `  evenkeel-operator controller --namespace=evenkeel-system --default-profile=/etc/evenkeel/default-profile.yaml
  evenkeel-operator controller --namespace=evenkeel-system --leader-elect --leader-election-id=evenkeel-controller`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := c.validate(); err != nil {
				return err
			}
			return c.run(cmd.Context())
		},
	}
	c.flags(cmd.Flags())
	cmd.Flags().BoolVar(&c.elect, "leader-elect", false, "elect a leader: one of several replicas works at a time")
	cmd.Flags().StringVar(&c.electionID, "leader-election-id", "", "name of the Lease of the leader election")
	cmd.Flags().StringVar(&c.webhookConfiguration, "webhook-config", "", "the MutatingWebhookConfiguration and the ValidatingWebhookConfiguration to delete when the controller's namespace is deleted; none: they stay")
	cmd.Flags().StringVar(&c.gateBinding, "gate-binding", "", "the MutatingAdmissionPolicyBinding that gates pods, to delete when the controller's namespace is deleted; none: they stay")
	cmd.Flags().StringVar(&c.defaultProfile, "default-profile", "", "file with the NetworkProfile to apply at the start")
	cmd.Flags().StringVar(&c.benchImage, "bench-image", "", "image with evenkeel-bench, for NetworkChecks that name none")
	cmd.Flags().StringVar(&c.ncclTestsImage, "nccl-tests-image", "", "image with NVIDIA's nccl-tests, for NetworkChecks with the runner NCCLTests that name none")
	cmd.Flags().StringVar(&c.rcclTestsImage, "rccl-tests-image", "", "image with AMD's rccl-tests, for NetworkChecks with the runner RCCLTests that name none")
	cmd.Flags().StringVar(&c.checkPriorityClass, "check-priority-class", "", "PriorityClass of the pods of NetworkChecks, which should give way to all others; none: the cluster's default")
	cmd.Flags().StringSliceVar(&c.imagePullSecrets, "image-pull-secrets", nil, "names of Secrets of this namespace to pull the images of NetworkChecks with")
	cmd.Flags().StringVar(&c.reportAddress, "report-bind-address", "0", `where the plugin's reports are received (UDP), such as :9640; "0" turns that off`)
	cmd.Flags().BoolVar(&c.jobKeys, "job-keys", false, "make keys for jobs whose profile requires encryption, which the webhook names")
	cmd.Flags().StringVar(&c.reductionImage, "reduction-image", "", "image of the reduction servers; without one, no job gets any")
	cmd.Flags().Float64Var(&c.delays, "delay-scale", 1, "factor for the delays by which changes are collected, and for the intervals of polling")
	_ = cmd.Flags().MarkHidden("delay-scale") // for tests; the flag exists
	return cmd
}

func (c *controllerRole) validate() error {
	if err := c.process.validate(); err != nil {
		return err
	}
	if _, _, err := net.SplitHostPort(c.reportAddress); c.reportAddress != "0" && err != nil {
		return fmt.Errorf(`--report-bind-address=%q: want HOST:PORT, :PORT or "0"`, c.reportAddress)
	}
	if c.delays <= 0 {
		return fmt.Errorf("--delay-scale=%g: want more than 0", c.delays)
	}
	if c.defaultProfile != "" {
		if _, err := defaults.Load(c.defaultProfile, nil); err != nil {
			return err
		}
	}
	if err := needs("the controller", map[string]string{"namespace": c.namespace}); err != nil || !c.elect {
		return err
	}
	return needs("--leader-elect", map[string]string{"leader-election-id": c.electionID})
}

func (c *controllerRole) run(ctx context.Context) error {
	delays := debounce.Scale(c.delays)
	retry, poll := delays.Of(electionRetry), delays.Of(kindPoll)
	byObject := networkprofile.Cached()
	maps.Copy(byObject, injectionevents.Cached())
	maps.Copy(byObject, networkcheck.Cached(c.namespace))
	kinds := []string{"NetworkProfile", "NetworkCheck", "NetworkCheckPolicy", "NodeNetworkHealth"}
	if c.reductionImage != "" {
		kinds = append(kinds, "ReductionService")
	}
	mgr, err := c.manager(ctx, ctrl.Options{
		Cache:                   cache.Options{ByObject: byObject, DefaultTransform: cache.TransformStripManagedFields()},
		LeaderElection:          c.elect,
		LeaderElectionID:        c.electionID,
		LeaderElectionNamespace: c.namespace,
		// The process ends with its manager, so the next one need not wait for the lease to run out.
		LeaderElectionReleaseOnCancel: true,
		RetryPeriod:                   &retry,
	}, kinds...)
	if err != nil {
		return err
	}
	if err := mgr.AddReadyzCheck("process", healthz.Ping); err != nil {
		return fmt.Errorf("readiness check: %w", err)
	}
	if err := (&networkprofile.Reconciler{ReductionImage: c.reductionImage, Delays: delays}).SetupWithManager(mgr); err != nil {
		return fmt.Errorf("networkprofile controller: %w", err)
	}
	if err := (&injectionevents.Reconciler{}).SetupWithManager(mgr); err != nil {
		return fmt.Errorf("injectionevents controller: %w", err)
	}
	clientset, err := kubernetes.NewForConfig(mgr.GetConfig())
	if err != nil {
		return fmt.Errorf("client: %w", err)
	}
	use := nodeuse.New(c.namespace, clock.RealClock{})
	use.Delays = delays
	checks := &networkcheck.Reconciler{Namespace: c.namespace, BenchImage: c.benchImage, NCCLTestsImage: c.ncclTestsImage, RCCLTestsImage: c.rcclTestsImage, PriorityClass: c.checkPriorityClass, Use: use, ImagePullSecrets: c.imagePullSecrets, Logs: networkcheck.PodLogs{Clientset: clientset}, Clock: clock.RealClock{}, Poll: delays.Of(checkPoll), Delays: delays}
	requests := networkcheckpolicy.NewCheckRequests()
	evaluator := jobgate.Evaluator{Namespace: c.namespace, Requests: requests, Use: use, Clock: clock.RealClock{}, Poll: poll, Delays: delays}
	controllers := map[string]interface{ SetupWithManager(manager.Manager) error }{
		"nodeuse":                   use,
		"networkcheck":              checks,
		"nodenetworkhealth-results": &nodenetworkhealth.ResultRecorder{},
		"nodenetworkhealth-marker":  &nodenetworkhealth.NodeMarker{Clock: clock.RealClock{}, Delays: delays},
		"metrics":                   &metrics.StateCollector{},
		"networkcheckpolicy":        &networkcheckpolicy.Reconciler{Namespace: c.namespace, Requests: requests, Use: use, Clock: clock.RealClock{}, Delays: delays},
		"jobgate-kueue":             &kueue.Reconciler{Evaluator: evaluator},
		"jobgate-suspend":           &suspend.Reconciler{Evaluator: evaluator},
	}
	if c.reportAddress != "0" {
		controllers["pluginreports-receiver"] = &pluginreports.Receiver{Address: c.reportAddress, Clock: clock.RealClock{}, Delays: delays}
		controllers["pluginreports"] = &pluginreports.Reconciler{Clock: clock.RealClock{}, Times: pluginreports.DefaultTimes, Delays: delays}
		controllers["suspicions"] = &suspicions.Reconciler{Clock: clock.RealClock{}, Poll: delays.Of(suspicionPoll)}
	}
	if c.jobKeys {
		controllers["jobkey"] = &jobkey.Reconciler{KindPoll: poll}
	}
	if c.reductionImage != "" {
		controllers["reductionservice"] = &reductionservice.Reconciler{Image: c.reductionImage, Clock: clock.RealClock{}, KindPoll: poll}
	}
	for name, controller := range controllers {
		if err := controller.SetupWithManager(mgr); err != nil {
			return fmt.Errorf("%s controller: %w", name, err)
		}
	}
	if c.defaultProfile != "" {
		apply, err := defaults.Load(c.defaultProfile, mgr.GetClient())
		if err != nil {
			return err
		}
		if err := mgr.Add(apply); err != nil {
			return fmt.Errorf("default profile: %w", err)
		}
	}
	if err := mgr.Start(ctx); err != nil {
		return fmt.Errorf("controller: %w", err)
	}
	return c.release(context.WithoutCancel(ctx), mgr)
}

// release opens all gates if this namespace is being deleted: no other controller will come that does. It deletes the webhook
// configuration first, since the webhook goes too, and would leave the jobs without pods; or the binding of the policy that gates pods. The pods of a namespace end before the
// rest of it is deleted, so the permissions last.
func (c *controllerRole) release(ctx context.Context, mgr manager.Manager) error {
	ctx, cancel := context.WithTimeout(ctx, releaseTimeout)
	defer cancel()
	if !c.isLast(ctx, mgr) {
		return nil
	}
	live, err := client.New(mgr.GetConfig(), client.Options{Scheme: mgr.GetScheme()})
	if err != nil {
		return fmt.Errorf("client: %w", err)
	}
	now := clock.RealClock{}
	var steps []uninstall.Step
	if c.webhookConfiguration != "" {
		steps = append(steps, uninstall.WebhookConfiguration(live, c.webhookConfiguration))
	}
	if c.gateBinding != "" {
		steps = append(steps, uninstall.GateBinding(live, c.gateBinding))
	}
	steps = append(steps, uninstall.Gates(live, now)...)
	if err := uninstall.Run(ctx, os.Stderr, now, append(steps, uninstall.Leftovers(live, now)...)...); err != nil {
		return fmt.Errorf("the namespace %s is being deleted, and not everything that waits for this controller could be opened: kubectl evenkeel uninstall does it: %w", c.namespace, err)
	}
	return nil
}
