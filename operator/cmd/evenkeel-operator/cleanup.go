package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/uninstall"
)

// cleanupTimeout bounds the work, which is some requests for each labeled node and each gated job. It is less than Helm waits for.
const cleanupTimeout = 4 * time.Minute

func cleanupCommand() *cobra.Command {
	check, namespace := false, ""
	cmd := &cobra.Command{
		Use:   "cleanup",
		Short: "Open all gates, and remove from all nodes what pre-flight checks put there",
		Long: `Opens the gates of all jobs that wait for their nodes to be proven, and removes the condition EvenkeelNetworkHealthy, the
label and the taint evenkeel.dev/network from all nodes. CustomResourceDefinitions that stay serve v1alpha1 alone, which needs
no webhook. The chart runs it when it is uninstalled. It may be interrupted and started again. While the Deployment of a controller is there that nobody deletes, it fails and changes nothing.

With --check it changes nothing. It fails if a ClusterQueue of Kueue names an AdmissionCheck of Evenkeel's: such a queue would
admit nothing any more. The chart runs that before it is uninstalled.`,
		Example: `  evenkeel-operator cleanup --check
  evenkeel-operator cleanup`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), cleanupTimeout)
			defer cancel()
			config, err := ctrl.GetConfig()
			if err != nil {
				return fmt.Errorf("no cluster to work on (set KUBECONFIG, or run in a pod): %w", err)
			}
			if err := reach(ctx, config, reachTimeout); err != nil {
				return err
			}
			scheme := runtime.NewScheme()
			if err := errors.Join(clientgoscheme.AddToScheme(scheme), evenkeel.AddToScheme(scheme)); err != nil {
				return fmt.Errorf("kinds: %w", err)
			}
			c, err := client.New(config, client.Options{Scheme: scheme})
			if err != nil {
				return fmt.Errorf("client: %w", err)
			}
			if check {
				return checkQueues(ctx, c)
			}
			// Where manifests are applied with the chart's hooks in them, the Job of an uninstall starts beside the controller.
			if err := uninstall.Gone(ctx, c, namespace); err != nil {
				return fmt.Errorf("nothing was changed: %w. To uninstall, run helm uninstall or kubectl evenkeel uninstall. If the chart's manifests were "+
					"applied, render them with helm template --no-hooks, and delete the Job of this pod", err)
			}
			now := clock.RealClock{}
			steps := append(uninstall.Gates(c, now), uninstall.Leftovers(c, now)...)
			if namespace != "" {
				release := uninstall.Release{Namespace: namespace}
				steps = append(steps, release.Checks(c), release.Conversion(c))
			}
			return uninstall.Run(ctx, cmd.ErrOrStderr(), now, steps...)
		},
	}
	cmd.Flags().BoolVar(&check, "check", false, "change nothing, and fail if a ClusterQueue of Kueue would admit nothing any more")
	cmd.Flags().StringVar(&namespace, "namespace", os.Getenv("POD_NAMESPACE"), "the namespace of the installation, in which checks are ended and no controller may stay (default: the environment's POD_NAMESPACE)")
	return cmd
}

// checkQueues is an error if ClusterQueues name our AdmissionChecks.
func checkQueues(ctx context.Context, c client.Client) error {
	queues, err := uninstall.Queues(c).List(ctx)
	if err != nil {
		return err
	}
	var names []string
	for _, q := range queues {
		names = append(names, q.Name)
	}
	if len(names) == 0 {
		return nil
	}
	return errors.New("without Evenkeel these would admit nothing: " + strings.Join(names, "; ") +
		". Remove the check from their spec.admissionChecksStrategy, or run: kubectl evenkeel uninstall --detach-queues")
}
