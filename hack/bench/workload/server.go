package workload

import (
	"bufio"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// serverStartTime is how long a reduction server may take until it listens.
const serverStartTime = 30 * time.Second

// StartServer starts "evenkeel-reduction-server serve", which ends with this process. It returns the line in which the
// server says where it listens, from the address on. A server that does not listen is ended.
func StartServer(cmd *exec.Cmd) (line string, err error) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = time.Second
	output, err := cmd.StderrPipe()
	if err != nil {
		return "", err
	}
	if err := cmd.Start(); err != nil {
		return "", err
	}
	found, last := make(chan string, 1), ""
	go func() {
		defer close(found)
		listens := false
		for lines := bufio.NewScanner(output); lines.Scan(); { // to its end, so that the server can write
			last = lines.Text()
			if rest, ok := strings.CutPrefix(last, "listening at "); ok && !listens {
				listens = true
				found <- rest
			}
		}
	}()
	timer := time.NewTimer(serverStartTime)
	defer timer.Stop()
	select {
	case line, ok := <-found:
		if ok {
			return line, nil
		}
		err = fmt.Errorf("ended before it listened: %s", strings.TrimSpace(last))
	case <-timer.C:
		err = errors.New("does not listen within " + serverStartTime.String())
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	return "", err
}
