package workload

import (
	"context"
	"fmt"
	"net"
	"os"
	"strings"
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
	err := until(ctx, func() (bool, error) {
		for _, table := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
			text, err := os.ReadFile(table)
			if err != nil {
				return false, err
			}
			for line := range strings.Lines(string(text)) {
				// Local address, peer's address, state: 0A is listening.
				if fields := strings.Fields(line); len(fields) > 3 && strings.HasSuffix(fields[1], wanted) && fields[3] == "0A" {
					return true, nil
				}
			}
		}
		return false, nil
	})
	if err != nil {
		return fmt.Errorf("no program listens at port %d: %w", port, err)
	}
	return nil
}
