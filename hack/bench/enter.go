package main

import (
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
