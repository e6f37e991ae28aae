// Command rdma runs a command in a virtual machine that has RDMA verbs.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"evenkeel.dev/evenkeel/hack/lab/rdma/vm"
)

// Exit statuses other than the command's, as those of timeout(1) and of test harnesses.
const (
	exitMissing = 77
	exitTimeout = 124
	exitFailed  = 125
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	ctx, orphaned := context.WithCancelCause(ctx)
	go watchParent(orphaned)
	var code int
	err := rootCommand(&code).ExecuteContext(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, "lab/rdma:", err)
		code = exitFailed
		switch {
		case errors.As(err, &vm.Missing{}):
			code = exitMissing
		case errors.Is(err, vm.ErrTimeout):
			code = exitTimeout
		}
	}
	os.Exit(code)
}

func rootCommand(code *int) *cobra.Command {
	var c vm.Config
	var topology string
	cmd := &cobra.Command{
		Use:   "rdma [flags] -- COMMAND...",
		Short: "Run a command in a virtual machine that has RDMA verbs (soft-RoCE)",
		Long: `Run a command in a virtual machine that has RDMA verbs (soft-RoCE).

The machine's root is this machine's own file system: its programs, libraries and test binaries are there.
The command runs as root, with this environment, in this working folder. Files that it writes below the shared
folder are kept; all others are lost with the machine. Standard input is not read.

Devices rxe0 (10.77.0.1 on eth0) and rxe1 (10.77.0.2 on eth1) are joined by a virtual Ethernet link with an
MTU of 9000; the GID of index 1 is IPv4's, RoCE v2. Topologies:
  pair    both in one network namespace; traffic between the two passes the link
  hosts   one each in the network namespaces h1 and h2: "ip netns exec h1 COMMAND"
  rails   pair twice: rxe2 (10.77.1.1 on eth2) and rxe3 (10.77.1.2 on eth3) have a link of their own
` + vm.TopologyVariable + ` is set to the topology.

The first run installs QEMU and the RDMA tools with apt, and fetches Debian's kernel into the cache.
The processor is emulated: expect 10 seconds for a boot, and 50 to 100 MB/s.

The exit status is the command's; 124 when it ran past --timeout; 125 when the virtual machine failed; 77 when
this machine lacks something that cannot be installed, after a line that names it.`,
		Example: `  go run ./hack/lab/rdma -- ibv_devinfo
  go run ./hack/lab/rdma -- sh -c 'ib_write_bw -d rxe1 -x 1 -F > /dev/null & sleep 1; ib_write_bw -d rxe0 -x 1 -F 10.77.0.2'
  go run ./hack/lab/rdma --topology hosts -- ip netns exec h1 ping -c 1 10.77.0.2

  # Rust tests, built here and run in the lab, one virtual machine for each test binary:
  go build -o bin/rdmalab ./hack/lab/rdma
  cd plugin && CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="$PWD/../bin/rdmalab --" cargo test -p evenkeel-transport`,
		Args:         cobra.MinimumNArgs(1),
		SilenceUsage: true, SilenceErrors: true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		RunE: func(cmd *cobra.Command, args []string) error {
			lab, err := vm.New(cmd.Context(), os.Stderr)
			if err != nil {
				return err
			}
			c.Topology, c.Command, c.Env = vm.Topology(topology), args, os.Environ()
			c.Stdout, c.Stderr = os.Stdout, os.Stderr
			*code, err = lab.Run(cmd.Context(), c)
			return err
		},
	}
	cmd.Flags().SetInterspersed(false) // flags after COMMAND are the command's
	cmd.Flags().StringVar(&topology, "topology", string(vm.Pair), fmt.Sprintf("how the devices are joined: one of %v", vm.Topologies))
	cmd.Flags().StringVar(&c.Share, "share", "", "the folder that the command writes to (default the working folder)")
	cmd.Flags().DurationVar(&c.Timeout, "timeout", vm.DefaultTimeout, "maximum time of the command")
	cmd.Flags().IntVar(&c.CPUs, "cpus", vm.DefaultCPUs, "processors of the machine")
	cmd.Flags().IntVar(&c.Memory, "memory", vm.DefaultMemory, "memory of the machine, in MiB")
	return cmd
}

// watchParent ends the run when its parent exits. A parent that is killed, such as "go run", cannot forward the signal.
func watchParent(orphaned context.CancelCauseFunc) {
	parent, err := unix.PidfdOpen(os.Getppid(), 0)
	if err != nil {
		return // the parent is not visible, or the kernel is older than 5.3
	}
	defer unix.Close(parent)
	for {
		_, err := unix.Poll([]unix.PollFd{{Fd: int32(parent), Events: unix.POLLIN}}, -1)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		orphaned(errors.New("the parent process has exited"))
		return
	}
}
