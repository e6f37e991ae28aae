// Command cluster runs a real Kubernetes cluster on this machine, in Linux namespaces.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/cluster/local"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	root := &cobra.Command{
		Use:   "cluster",
		Short: "Run a real Kubernetes cluster on this machine, in Linux namespaces",
		Example: `  go run ./hack/cluster up
  export KUBECONFIG=$(go run ./hack/cluster kubeconfig)
  $(go run ./hack/cluster tool kubectl) get nodes
  go run ./hack/cluster down`,
		SilenceUsage:      true,
		SilenceErrors:     true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	var name string
	root.PersistentFlags().StringVar(&name, "name", "dev", "the cluster's name; clusters of different names can run at the same time")
	root.AddCommand(upCommand(&name), downCommand(&name), statusCommand(&name), loadCommand(&name),
		kubeconfigCommand(&name), execCommand(&name), linkCommand(&name), toolCommand())
	root.AddCommand(local.Roles()...)
	if err := root.ExecuteContext(ctx); err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) && exit.ExitCode() > 0 {
			os.Exit(exit.ExitCode()) // the command has printed its own error
		}
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
}

func upCommand(name *string) *cobra.Command {
	var c local.Config
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Start the cluster, unless it runs already",
		Example: `  go run ./hack/cluster up
  go run ./hack/cluster up --nodes 4 --gpus 8
  go run ./hack/cluster up --name slow --link-rate 500mbit`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			start := time.Now()
			c.Name, c.Progress = *name, cmd.ErrOrStderr()
			running, err := local.Up(cmd.Context(), c)
			if err != nil {
				return err
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "cluster %s is up (%s)\n", *name, time.Since(start).Round(100*time.Millisecond))
			fmt.Fprintf(cmd.OutOrStdout(), "export KUBECONFIG=%s\n", running.Kubeconfig())
			return nil
		},
	}
	cmd.Flags().IntVar(&c.Nodes, "nodes", 2, fmt.Sprintf("number of nodes, at most %d", local.MaxNodes))
	cmd.Flags().IntVar(&c.GPUs, "gpus", 0, "pretend GPUs on each node")
	cmd.Flags().StringVar(&c.LinkRate, "link-rate", "", "speed of each node's link in both directions, like 500mbit or 10gbit (default unlimited)")
	return cmd
}

func downCommand(name *string) *cobra.Command {
	return &cobra.Command{
		Use:   "down",
		Short: "Stop the cluster and remove all of it",
		Example: `  go run ./hack/cluster down
  go run ./hack/cluster down --name slow`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return local.Down(cmd.Context(), *name) },
	}
}

func linkCommand(name *string) *cobra.Command {
	return &cobra.Command{
		Use:   "link NODE [RATE]",
		Short: "Limit a node's link in both directions; without a rate, restore the rate of the start",
		Example: `  go run ./hack/cluster link n3 50mbit
  go run ./hack/cluster link n3`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := local.Open(*name)
			if err != nil {
				return err
			}
			return c.LimitLink(cmd.Context(), args[0], strings.Join(args[1:], ""))
		},
	}
}

func statusCommand(name *string) *cobra.Command {
	return &cobra.Command{
		Use:     "status",
		Short:   "List the clusters and their health; fails unless the named one is healthy",
		Example: `  go run ./hack/cluster status`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			names, err := local.List()
			if err != nil {
				return err
			}
			result := fmt.Errorf("no cluster %q: start it with \"go run ./hack/cluster up --name %s\"", *name, *name)
			for _, n := range names {
				health := report(cmd, n)
				if n == *name {
					result = health
				}
			}
			return result
		},
	}
}

// report prints the health of one cluster, and returns nil if it is healthy.
func report(cmd *cobra.Command, name string) error {
	out := cmd.OutOrStdout()
	c, err := local.Open(name)
	if err != nil {
		fmt.Fprintf(out, "%s: stopped; \"down\" removes its remains\n", name)
		return fmt.Errorf("cluster %s does not run", name)
	}
	state := "well"
	health := c.Healthy(cmd.Context())
	if health != nil {
		state = health.Error()
		health = fmt.Errorf("cluster %s is not healthy", name)
	}
	fmt.Fprintf(out, "%s: %s\n  settings:   %s\n  kubeconfig: %s\n  logs:       %s\n", name, state, c.Config(), c.Kubeconfig(), c.Logs())
	return health
}

func loadCommand(name *string) *cobra.Command {
	return &cobra.Command{
		Use:   "load IMAGE",
		Short: "Put an image into the cluster's registry and print its reference for pods",
		Example: `  go run ./hack/cluster load localhost/plugin:dev
  go run ./hack/cluster load dist/plugin.tar`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := local.Open(*name)
			if err != nil {
				return err
			}
			pinned, err := c.Load(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), pinned)
			return nil
		},
	}
}

func kubeconfigCommand(name *string) *cobra.Command {
	return &cobra.Command{
		Use:     "kubeconfig",
		Short:   "Print the path of the cluster's kubeconfig",
		Example: `  export KUBECONFIG=$(go run ./hack/cluster kubeconfig)`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := local.Open(*name)
			if err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), c.Kubeconfig())
			return nil
		},
	}
}

func execCommand(name *string) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "exec NODE CMD...",
		Short: "Run a command inside a node",
		Example: `  go run ./hack/cluster exec n1 ctr -n k8s.io images ls
  go run ./hack/cluster exec n2 ip addr`,
		Args: cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := local.Open(*name)
			if err != nil {
				return err
			}
			node, argv := args[0], args[1:]
			if argv[0] == "--" { // as with kubectl exec
				argv = argv[1:]
			}
			inside, err := c.Command(cmd.Context(), node, argv...)
			if err != nil {
				return err
			}
			inside.Stdin, inside.Stdout, inside.Stderr = cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr()
			return inside.Run()
		},
	}
	cmd.Flags().SetInterspersed(false) // flags after NODE are the command's
	return cmd
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
