package gpu

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"evenkeel.dev/evenkeel/hack/bench/workload"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// servers are reduction servers that run.
type servers struct {
	addresses []string
	commands  []*exec.Cmd
}

// startServers starts that many reduction servers: each on a host of its own of the lab, or without a lab all at the
// loopback interface.
func startServers(ctx context.Context, program string, lab *netns.Lab, host func(number int) netns.Host, count int) (_ *servers, err error) {
	s := &servers{}
	defer func() {
		if err != nil {
			s.stop()
		}
	}()
	for number := range count {
		address := "127.0.0.1:0"
		if lab != nil {
			address = lab.Address(host(number)).String() + ":0"
		}
		argv := []string{program, "serve", "--listen", address}
		cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
		if lab != nil {
			if cmd, err = lab.Command(ctx, host(number), argv...); err != nil {
				return nil, err
			}
		}
		cmd.Env = withoutSettings(os.Environ())
		line, err := workload.StartServer(cmd)
		if err != nil {
			return nil, fmt.Errorf("reduction server %d: %w", number+1, err)
		}
		address, _, _ = strings.Cut(line, ",")
		s.addresses, s.commands = append(s.addresses, address), append(s.commands, cmd)
	}
	return s, nil
}

// algorithmsByFunction is the first NCCL that takes algorithms for one function only.
const algorithmsByFunction = 22400

// environment makes this version of NCCL use the servers.
func (s *servers) environment(version int) []string {
	algorithm := "allreduce:collnetchain"
	if version < algorithmsByFunction {
		algorithm = "CollNetChain"
	}
	return []string{"NCCL_COLLNET_ENABLE=1", "NCCL_ALGO=" + algorithm, "EVENKEEL_REDUCTION_SERVERS=" + strings.Join(s.addresses, ",")}
}

// kill kills the last server.
func (s *servers) kill() { _ = s.commands[len(s.commands)-1].Process.Kill() }

// stop ends all servers, also those that have ended.
func (s *servers) stop() {
	for _, cmd := range s.commands {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
}
