// Command demo shows Evenkeel on a real Kubernetes cluster, and prints one page with the results. An annotated
// PyTorchJob trains a model in an image of Debian's PyTorch, over the backend that was injected. Others all-reduce over
// the plugin, and with reduction servers. Then a node's link is slowed: a check names the node, and the next job avoids
// it. When the link is restored, a check clears the node.
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

//go:embed train.yaml
var trainManifest string

//go:embed train.py
var trainScript string

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
		// With three nodes, a slow one can be identified, and a job of two pods can avoid it.
		Name: "local", Nodes: 3, Progress: os.Stderr,
	}}
	var which string
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Run an annotated PyTorchJob over Evenkeel on a real cluster and print the results",
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
	cmd.Flags().BoolVar(&config.Torch, "train", true, "train with PyTorch too, whose image takes 5 minutes the first time, and 6 GB of disk")
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
	if config.Torch {
		fmt.Fprintln(config.Progress, "==> PyTorchJob that trains")
		if err := train(ctx, cluster, out, config.Progress); err != nil {
			return err
		}
	}
	fmt.Fprintln(config.Progress, "\n==> PyTorchJob that all-reduces")
	manifest := strings.ReplaceAll(jobManifest, "TRAINING_IMAGE", cluster.Images.Bench)
	result, err := runJob(ctx, cluster, manifest, config.Progress)
	if err != nil {
		return err
	}
	if err := page(out, result); err != nil {
		return err
	}
	fmt.Fprintln(config.Progress, "\n==> The same with reduction servers")
	reductionResult, err := runJob(ctx, cluster, withReduction(manifest), config.Progress)
	if err != nil {
		return err
	}
	if err := reductionPage(out, reductionResult); err != nil {
		return err
	}
	fmt.Fprintln(config.Progress, "\n==> Pre-flight")
	preflight, err := newPreflight(ctx, cluster, out, config.Progress)
	if err != nil {
		return err
	}
	if err := preflight.run(ctx, func(ctx context.Context) (*jobResult, error) {
		// The links are limited now, so the job sends less.
		return runJob(ctx, cluster, strings.ReplaceAll(manifest, `"64M"`, `"1M"`), config.Progress)
	}); err != nil {
		return err
	}
	next(out, cluster, result, preflight.plugin)
	_, err = fmt.Fprintf(out, "\nThe whole run took %s.\n", time.Since(started).Round(time.Second))
	return err
}
