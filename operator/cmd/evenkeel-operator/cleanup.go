package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/operator/internal/controller/jobgate/suspend"
	"evenkeel.dev/evenkeel/operator/internal/controller/nodenetworkhealth"
)

// cleanupTimeout bounds the work, which is some requests for each labeled node and each gated job.
const cleanupTimeout = 100 * time.Second

func cleanupCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "cleanup",
		Short: "Open all gates, and remove from all nodes what pre-flight checks put there",
		Long: `Opens the gates of all jobs that wait for their nodes to be proven, and removes the condition EvenkeelNetworkHealthy, the
label and the taint evenkeel.dev/network from all nodes. The chart runs it when it is uninstalled.`,
		Example: "  evenkeel-operator cleanup",
		Args:    cobra.NoArgs,
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
			c, err := client.New(config, client.Options{Scheme: clientgoscheme.Scheme})
			if err != nil {
				return fmt.Errorf("client: %w", err)
			}
			return errors.Join(suspend.OpenAll(ctx, c), nodenetworkhealth.ClearMarkers(ctx, c))
		},
	}
}
