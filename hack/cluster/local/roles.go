package local

import (
	"fmt"
	"os"
	"strconv"

	"github.com/spf13/cobra"

	"golang.org/x/sys/unix"

	"evenkeel.dev/evenkeel/hack/cluster/pretenddevice"
)

// The names of the hidden commands with which the program runs parts of a cluster.
const (
	roleSupervise     = "supervise"
	roleHold          = "node-hold"
	roleInit          = "node-init"
	roleRun           = "node-run"
	rolePretendDevice = "pretend-device"
)

// Roles returns the hidden commands through which the program runs the parts
// of a cluster. The program that has them is hack/cluster.
func Roles() []*cobra.Command {
	role := func(use string, args int, run func(*cobra.Command, []string) error) *cobra.Command {
		return &cobra.Command{Use: use, Hidden: true, Args: cobra.ExactArgs(args), RunE: run}
	}
	return []*cobra.Command{
		role(roleSupervise+" STATE", 1, func(cmd *cobra.Command, args []string) error {
			// Up passes the two pipes as the first files after stderr.
			return supervise(cmd.Context(), state(args[0]), os.NewFile(3, "report"), os.NewFile(4, "consent"))
		}),
		role(roleHold+" STATE NODE", 2, func(_ *cobra.Command, args []string) error {
			return holdNode(state(args[0]), args[1])
		}),
		role(roleInit+" STATE NODE", 2, func(_ *cobra.Command, args []string) error {
			return initNode(state(args[0]), args[1])
		}),
		role(roleRun+" NODE IP GPUS", 3, func(cmd *cobra.Command, args []string) error {
			gpus, err := strconv.Atoi(args[2])
			if err != nil {
				return fmt.Errorf("number of GPUs: %w", err)
			}
			return runNode(cmd.Context(), args[0], args[1], gpus)
		}),
		role(rolePretendDevice+" RESOURCE COUNT", 2, func(cmd *cobra.Command, args []string) error {
			count, err := strconv.Atoi(args[1])
			if err != nil {
				return fmt.Errorf("number of devices: %w", err)
			}
			// nsenter does not forward SIGKILL.
			if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGTERM), 0, 0, 0); err != nil {
				return fmt.Errorf("exit with the parent process: %w", err)
			}
			return pretenddevice.Run(cmd.Context(), pretenddevice.DefaultDir, args[0], count)
		}),
	}
}
