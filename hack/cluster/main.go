// Command cluster runs a real Kubernetes cluster on this machine, in
// namespaces of its own.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	root := &cobra.Command{
		Use:           "cluster",
		Short:         "A real Kubernetes cluster on this machine, in namespaces of its own",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.AddCommand(toolCommand())
	if err := root.ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
}

func toolCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "tool NAME",
		Short: "Print the path of a third-party program, building it first if it is not cached",
		Example: `  $(go run ./hack/cluster tool helm) version
  KUBEBUILDER_ASSETS=$(go run ./hack/cluster tool envtest) go test ./operator/...`,
		Args:      cobra.ExactArgs(1),
		ValidArgs: toolbox.Names(),
		RunE: func(cmd *cobra.Command, args []string) error {
			tools, err := toolbox.New(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			path, err := tools.Path(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), path)
			return nil
		},
	}
}
