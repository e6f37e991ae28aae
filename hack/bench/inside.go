package main

import (
	"encoding/json"
	"fmt"
	"os"
	"syscall"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/bench/workload"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// enterCommand runs a line of shell on a host of a lab, as ssh does on a real host.
func enterCommand() *cobra.Command {
	return &cobra.Command{
		Use: workload.EnterCommand + " LAB HOST LINE", Hidden: true, Args: cobra.ExactArgs(3),
		RunE: func(cmd *cobra.Command, args []string) error {
			lab, err := netns.Open(args[0])
			if err != nil {
				return err
			}
			inside, err := lab.Command(cmd.Context(), netns.Host(args[1]), "sh", "-c", args[2])
			if err != nil {
				return err
			}
			// The process becomes the command, so that a signal reaches it.
			return syscall.Exec(inside.Path, inside.Args, os.Environ())
		},
	}
}

// rdmaCommand measures in a virtual machine, and prints the figure.
func rdmaCommand() *cobra.Command {
	return &cobra.Command{
		Use: workload.RDMACommand + " RUN", Hidden: true, Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var r workload.RDMARun
			if err := json.Unmarshal([]byte(args[0]), &r); err != nil {
				return fmt.Errorf("what is to be measured: %w", err)
			}
			value, err := r.Measure(cmd.Context())
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), value)
			return err
		},
	}
}
