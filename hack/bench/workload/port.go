package workload

import (
	"context"
	"fmt"
	"net"
	"os"
	"strings"
	"time"
)

func freePort() (int, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer listener.Close()
	return listener.Addr().(*net.TCPAddr).Port, nil
}

// awaitPort waits until a program listens at a port. It does not connect, as perftest accepts one connection only.
func awaitPort(ctx context.Context, port int) error {
	wanted := fmt.Sprintf(":%04X", port)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		for _, table := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
			text, err := os.ReadFile(table)
			if err != nil {
				return err
			}
			for line := range strings.Lines(string(text)) {
				// Local address, peer's address, state: 0A is listening.
				fields := strings.Fields(line)
				if len(fields) > 3 && strings.HasSuffix(fields[1], wanted) && fields[3] == "0A" {
					return nil
				}
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("no program listens at port %d: %w", port, context.Cause(ctx))
		case <-tick.C:
		}
	}
}
