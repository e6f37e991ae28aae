// Command evenkeel-operator is Evenkeel's control plane. It runs in one of four roles: as the webhook that adds the plugin to jobs
// and pods, as the controller of Evenkeel's kinds, as the issuer of the webhook's certificate, or as the bridge to NVSentinel.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"strconv"
	"syscall"

	"github.com/spf13/cobra"
)

func main() {
	if limit := memoryLimit(os.Getenv); limit > 0 {
		debug.SetMemoryLimit(limit)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := rootCommand().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "evenkeel-operator:", err)
		os.Exit(1)
	}
}

// memoryLimit is the soft limit for the garbage collector, in bytes: two thirds of the container's memory. Without it, the heap may
// grow to twice what is in use, and the kernel may kill the container. It is 0 if the container has no limit or GOMEMLIMIT is set.
func memoryLimit(getenv func(string) string) int64 {
	limit, err := strconv.ParseInt(getenv("MEMORY_LIMIT"), 10, 64)
	if err != nil || getenv("GOMEMLIMIT") != "" {
		return 0
	}
	return limit / 3 * 2
}

func rootCommand() *cobra.Command {
	var l logging
	root := &cobra.Command{
		Use:   "evenkeel-operator",
		Short: "Evenkeel's control plane",
		Long: `Evenkeel's control plane, in one of four roles.

It finds the cluster as kubectl does: by KUBECONFIG or ~/.kube/config, or, in a pod, by its service account.`,
		SilenceUsage: true, SilenceErrors: true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		PersistentPreRunE: func(*cobra.Command, []string) error { return l.start(os.Stderr) },
	}
	l.flags(root.PersistentFlags())
	root.AddCommand(webhookCommand(), controllerCommand(), certificatesCommand(), nvsentinelCommand(), cleanupCommand(), &cobra.Command{
		Use:     "version",
		Short:   "Print the version",
		Example: "  evenkeel-operator version",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), version())
			return err
		},
	})
	return root
}

// version is what the Go toolchain wrote into the binary.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "evenkeel-operator, built without module information"
	}
	return fmt.Sprintf("evenkeel-operator %s (%s)", info.Main.Version, info.GoVersion)
}
