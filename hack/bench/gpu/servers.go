package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"time"

	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// serverStartTime is how long a reduction server may take until it listens.
const serverStartTime = 30 * time.Second

// servers are reduction servers that run.
type servers struct {
	addresses []string
	commands  []*exec.Cmd
}

var listeningAt = regexp.MustCompile(`^listening at ([^ ,]+)`)

// startServers starts that many reduction servers: one on each of these hosts of the lab, or without a lab all at the loopback
// interface.
func startServers(ctx context.Context, program string, lab *netns.Lab, hosts []netns.Host, count int) (_ *servers, err error) {
	s := &servers{}
	defer func() {
		if err != nil {
			s.stop()
		}
	}()
	for number := range count {
		address := "127.0.0.1:0"
		if lab != nil {
			address = lab.Address(hosts[number]).String() + ":0"
		}
		argv := []string{program, "serve", "--listen", address}
		cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
		if lab != nil {
			if cmd, err = lab.Command(ctx, hosts[number], argv...); err != nil {
				return nil, err
			}
		}
		if address, err = s.start(cmd); err != nil {
			return nil, fmt.Errorf("reduction server %d: %w", number+1, err)
		}
		s.addresses = append(s.addresses, address)
	}
	return s, nil
}

// start starts a server and returns the address that it listens at.
func (s *servers) start(cmd *exec.Cmd) (address string, err error) {
	cmd.Env = withoutSettings(os.Environ())
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = time.Second
	output, err := cmd.StderrPipe()
	if err != nil {
		return "", err
	}
	if err := cmd.Start(); err != nil {
		return "", err
	}
	s.commands = append(s.commands, cmd)
	found, last := make(chan string, 1), ""
	go func() {
		defer close(found)
		for lines := bufio.NewScanner(output); lines.Scan(); { // to its end, so that the server can write
			last = lines.Text()
			if m := listeningAt.FindStringSubmatch(last); m != nil {
				found <- m[1]
			}
		}
	}()
	select {
	case address, ok := <-found:
		if !ok {
			return "", fmt.Errorf("ended before it listened: %s", strings.TrimSpace(last))
		}
		return address, nil
	case <-time.After(serverStartTime):
		return "", errors.New("does not listen within " + serverStartTime.String())
	}
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
