// Command net creates networks of unequal, failing paths on this machine, in network namespaces.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	root := &cobra.Command{
		Use:   "net",
		Short: "Create networks of unequal, failing paths on this machine, in network namespaces",
		Long: `Create networks of unequal, failing paths on this machine, in network namespaces.

Two hosts, h1 (10.1.0.2) and h2 (10.2.0.2), are joined by links between two routers. The routers choose
a link by a hash of addresses and ports, as the switches of a data centre do. The hosts' interface to
that network is eth0; ctl0 (10.3.0.1 and 10.3.0.2) joins them directly, outside the network under test.`,
		Example: `  go run ./hack/lab/net demo
  go run ./hack/lab/net up --links 3x1gbit,200mbit
  go run ./hack/lab/net exec h1 ip route get 10.2.0.2
  go run ./hack/lab/net link 2 --state silent
  go run ./hack/lab/net down`,
		SilenceUsage:      true,
		SilenceErrors:     true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	var name string
	root.PersistentFlags().StringVar(&name, "name", "dev", "the lab's name; labs of different names can be up at the same time")
	root.AddCommand(upCommand(&name), downCommand(&name), statusCommand(&name), linkCommand(&name), execCommand(&name), demoCommand(&name), holdCommand())
	if err := root.ExecuteContext(ctx); err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) && exit.ExitCode() > 0 {
			os.Exit(exit.ExitCode()) // the command has printed its own error
		}
		fmt.Fprintln(os.Stderr, "lab/net:", err)
		os.Exit(1)
	}
}

func upCommand(name *string) *cobra.Command {
	var c netns.Config
	var links, flows, star string
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Create a network, which exists until \"down\"",
		Example: `  go run ./hack/lab/net up --links 4x1gbit
  go run ./hack/lab/net up --name clouds --links "" --flow-rates 3x400mbit,100mbit
  go run ./hack/lab/net up --name plain --links "" --mtu 9000
  go run ./hack/lab/net up --name star --star 8x1gbit`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c.Name = *name
			if star != "" {
				if cmd.Flags().Changed("links") {
					return errors.New("--star and --links: one of them")
				}
				links = ""
				var err error
				if c.Star, err = netns.ParseRates(star); err != nil {
					return err
				}
			}
			if links != "" {
				rates, err := netns.ParseRates(links)
				if err != nil {
					return err
				}
				c.Links = netns.Links(rates...)
			}
			if flows != "" {
				var err error
				if c.FlowRates, err = netns.ParseRates(flows); err != nil {
					return err
				}
			}
			lab, err := startHolder(cmd.Context(), c)
			if err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "lab %s is up: %s\n", *name, lab.Config())
			return nil
		},
	}
	cmd.Flags().StringVar(&links, "links", "4x1gbit", `rates of the links between the routers; "" joins the hosts directly, unshaped`)
	cmd.Flags().StringVar(&flows, "flow-rates", "", "caps of a host's TCP connections, assigned in the order in which they are opened, such as 3x400mbit,100mbit")
	cmd.Flags().StringVar(&star, "star", "", "instead of two hosts, one around a switch for each link of these rates, h1 at 10.1.0.2, h2 at 10.2.0.2 and so on")
	cmd.Flags().DurationVar(&c.Queue, "queue", netns.DefaultQueue, "length of each shaped queue")
	cmd.Flags().IntVar(&c.MTU, "mtu", netns.DefaultMTU, "MTU in bytes")
	cmd.Flags().StringVar(&c.Congestion, "congestion", "", "TCP congestion control of the hosts (default the machine's for new namespaces)")
	return cmd
}

func downCommand(name *string) *cobra.Command {
	return &cobra.Command{
		Use:     "down",
		Short:   "Kill all processes in the network and remove it",
		Example: `  go run ./hack/lab/net down --name clouds`,
		Args:    cobra.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return netns.Remove(cmd.Context(), *name) },
	}
}

func statusCommand(name *string) *cobra.Command {
	return &cobra.Command{
		Use:     "status",
		Short:   "List the networks; fails unless the named one is up",
		Example: `  go run ./hack/lab/net status`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			names, err := netns.List()
			if err != nil {
				return err
			}
			for _, n := range names {
				lab, err := netns.Open(n)
				if err != nil {
					fmt.Fprintf(cmd.OutOrStdout(), "%s: not running; \"down\" removes its remains\n", n)
					continue
				}
				fmt.Fprintf(cmd.OutOrStdout(), "%s: %s (process %d)\n", n, lab.Config(), lab.Owner())
				if len(lab.Config().Links) == 0 {
					continue
				}
				sent, err := lab.Sent()
				if err != nil {
					return err
				}
				for link, bytes := range sent {
					fmt.Fprintf(cmd.OutOrStdout(), "  link %d: %d bytes from h1 to h2\n", link, bytes)
				}
			}
			_, err = netns.Open(*name)
			return err
		},
	}
}

func linkCommand(name *string) *cobra.Command {
	var rate, state string
	var loss float64
	cmd := &cobra.Command{
		Use:   "link NUMBER",
		Short: "Change a link",
		Long: `Change a link, in both directions.

A link is up; or down, as far as the routers know, so that they use the others; or silent: it loses
everything and the routers continue to use it.`,
		Example: `  go run ./hack/lab/net link 2 --rate 200mbit
  go run ./hack/lab/net link 0 --state silent
  go run ./hack/lab/net link 1 --loss 0.001`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			link, err := strconv.Atoi(args[0])
			if err != nil {
				return fmt.Errorf("link %q: a number from 0", args[0])
			}
			changed := cmd.Flags().Changed
			if !changed("rate") && !changed("state") && !changed("loss") {
				return errors.New("nothing to change: give --rate, --state or --loss")
			}
			lab, err := netns.Open(*name)
			if err != nil {
				return err
			}
			if changed("rate") {
				r, err := netns.ParseRate(rate)
				if err != nil {
					return err
				}
				if err := lab.SetRate(cmd.Context(), link, r); err != nil {
					return err
				}
			}
			if changed("loss") {
				if err := lab.SetLoss(cmd.Context(), link, loss); err != nil {
					return err
				}
			}
			if changed("state") {
				return lab.SetState(cmd.Context(), link, netns.State(state))
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&rate, "rate", "", `such as 200mbit, or "unlimited"`)
	cmd.Flags().StringVar(&state, "state", "", "up, down or silent")
	cmd.Flags().Float64Var(&loss, "loss", 0, "share of packets to lose at random, from 0 to 1")
	return cmd
}

func execCommand(name *string) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "exec HOST CMD...",
		Short: "Run a command in a host's network",
		Example: `  go run ./hack/lab/net exec h2 ss -ti
  NCCL_SOCKET_IFNAME=eth0 go run ./hack/lab/net exec h1 evenkeel-bench net --help`,
		Args: cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			lab, err := netns.Open(*name)
			if err != nil {
				return err
			}
			host, argv := netns.Host(args[0]), args[1:]
			if argv[0] == "--" {
				argv = argv[1:]
			}
			inside, err := lab.Command(cmd.Context(), host, argv...)
			if err != nil {
				return err
			}
			inside.Stdin, inside.Stdout, inside.Stderr = cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr()
			return inside.Run()
		},
	}
	cmd.Flags().SetInterspersed(false) // flags after HOST are the command's
	return cmd
}

func demoCommand(name *string) *cobra.Command {
	var seconds int
	cmd := &cobra.Command{
		Use:     "demo",
		Short:   "Show plain TCP over four links, of which one is slow and then silent",
		Example: `  go run ./hack/lab/net demo --name show`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if seconds < 1 || seconds > 60 {
				return fmt.Errorf("--seconds %d: from 1 to 60", seconds)
			}
			return demo(cmd.Context(), cmd.OutOrStdout(), *name, time.Duration(seconds)*time.Second)
		},
	}
	cmd.Flags().IntVar(&seconds, "seconds", 2, "length of each measurement")
	return cmd
}
