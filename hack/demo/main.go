// Command demo runs Evenkeel's main job from nothing: a real Kubernetes, the chart, and an annotated PyTorchJob whose
// workers all-reduce over the injected plugin; then the same with an annotation for reduction servers, which add up. Then a
// node's link is slowed: a check names the node, the next job keeps off it, and when the link is restored a check clears it.
// It prints one page that shows what happened.
package main

import (
	"context"
	_ "embed"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/cluster/local"
	"evenkeel.dev/evenkeel/hack/env"
)

//go:embed job.yaml
var jobManifest string

const namespace = "evenkeel-demo"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	config := env.Config{Progress: os.Stderr, Cluster: local.Config{
		// With three, one that is bad can be told from the others, and a job of two pods can keep off it.
		Name: "local", Nodes: 3, Progress: os.Stderr,
	}}
	var which string
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Run an annotated PyTorchJob over Evenkeel on a real cluster and show what happened",
		Example: `  go run ./hack/demo
  KUBECONFIG=~/.kube/config go run ./hack/demo --cluster existing --registry registry.example.com/evenkeel`,
		Args:         cobra.NoArgs,
		SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch which {
			case "local":
			case "existing":
				config.Existing = true
			default:
				return fmt.Errorf("--cluster %q: local or existing", which)
			}
			return run(cmd.Context(), config, cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&which, "cluster", "local", "local: a cluster made on this machine; existing: the one of KUBECONFIG")
	cmd.Flags().StringVar(&config.Registry, "registry", "", "where to push images for an existing cluster")
	cmd.Flags().StringVar(&config.Cluster.LinkRate, "link-rate", "", "limit each node's link, such as 1gbit (local cluster)")
	return cmd
}

func run(ctx context.Context, config env.Config, out io.Writer) error {
	started := time.Now()
	cluster, err := env.Start(ctx, config)
	if err != nil {
		return err
	}
	fmt.Fprintln(config.Progress, "==> PyTorchJob")
	manifest := strings.ReplaceAll(jobManifest, "TRAINING_IMAGE", cluster.Images.Bench)
	result, err := runJob(ctx, cluster, manifest, config.Progress)
	if err != nil {
		return err
	}
	if err := page(out, result); err != nil {
		return err
	}
	fmt.Fprintln(config.Progress, "\n==> The same with reduction servers")
	reduced, err := runJob(ctx, cluster, withReduction(manifest), config.Progress)
	if err != nil {
		return err
	}
	if err := reductionPage(out, reduced); err != nil {
		return err
	}
	fmt.Fprintln(config.Progress, "\n==> Pre-flight")
	second, err := newAct(ctx, cluster, out, config.Progress)
	if err != nil {
		return err
	}
	if err := second.run(ctx, func(ctx context.Context) (*jobResult, error) {
		// Its links are slow, so it sends less.
		return runJob(ctx, cluster, strings.ReplaceAll(manifest, `"64M"`, `"1M"`), config.Progress)
	}); err != nil {
		return err
	}
	next(out, cluster, result, second.plugin)
	_, err = fmt.Fprintf(out, "\nThe whole run took %s.\n", time.Since(started).Round(time.Second))
	return err
}
