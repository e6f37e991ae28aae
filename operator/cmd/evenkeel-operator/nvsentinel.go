package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/healthz"

	bridge "evenkeel.dev/evenkeel/operator/internal/controller/nvsentinel"
	"evenkeel.dev/evenkeel/operator/internal/nvsentinel"
)

type nvsentinelRole struct {
	process
	connector nvsentinel.Connector
	strategy  string
}

func nvsentinelCommand() *cobra.Command {
	var n nvsentinelRole
	cmd := &cobra.Command{
		Use:   "nvsentinel",
		Short: "Tell NVSentinel which nodes a check has failed, and when they are cleared",
		Example: `  evenkeel-operator nvsentinel --connector=unix:///var/run/nvsentinel/nvsentinel.sock --token-file=/var/run/secrets/nvsentinel/token
  evenkeel-operator nvsentinel --connector=platform-connector-deployment.nvsentinel.svc:50051 --ca-file=/ca/ca.crt --token-file=/var/run/secrets/nvsentinel/token`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return n.run(cmd.Context()) },
	}
	n.flags(cmd.Flags())
	cmd.Flags().StringVar(&n.connector.Target, "connector", "", "NVSentinel's platform connector: unix:///PATH for that of this node, or HOST:PORT")
	cmd.Flags().StringVar(&n.connector.TokenFile, "token-file", "", "file with the service account's token for the platform connector; none: no token is sent")
	cmd.Flags().StringVar(&n.connector.CAFile, "ca-file", "", "file with the certificates (PEM) that sign that of HOST:PORT")
	cmd.Flags().StringVar(&n.strategy, "processing-strategy", "STORE_ONLY", "what NVSentinel does with a fault: STORE_ONLY records it, EXECUTE_REMEDIATION may cordon and drain the node")
	return cmd
}

func (n *nvsentinelRole) run(ctx context.Context) error {
	if err := n.process.validate(); err != nil {
		return err
	}
	if err := n.connector.Validate(); err != nil {
		return fmt.Errorf("--connector: %w", err)
	}
	strategy, err := nvsentinel.ParseStrategy(n.strategy)
	if err != nil {
		return fmt.Errorf("--processing-strategy: %w", err)
	}
	mgr, err := n.manager(ctx, ctrl.Options{Cache: cache.Options{DefaultTransform: cache.TransformStripManagedFields()}}, "NodeNetworkHealth")
	if err != nil {
		return err
	}
	if err := mgr.AddReadyzCheck("process", healthz.Ping); err != nil {
		return fmt.Errorf("readiness check: %w", err)
	}
	if err := (&bridge.Bridge{Connector: n.connector, Strategy: strategy, Clock: clock.RealClock{}}).SetupWithManager(mgr); err != nil {
		return fmt.Errorf("the bridge to NVSentinel: %w", err)
	}
	if err := mgr.Start(ctx); err != nil {
		return fmt.Errorf("the bridge to NVSentinel: %w", err)
	}
	return nil
}
