// Command evenkeel-nvsentinel-check checks a pod's network before it starts. It is the program of an init container that NVSentinel's
// preflight checks add to pods (docs/node-health.md).
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"k8s.io/utils/clock"

	"evenkeel.dev/evenkeel/operator/internal/nvsentinel/check"
)

const usage = `Checks a pod's network with evenkeel-bench before the pod starts, as one of NVSentinel's preflight checks, and reports to NVSentinel.

It takes no arguments: NVSentinel sets NODE_NAME, PLATFORM_CONNECTOR_SOCKET, PROCESSING_STRATEGY and, for gangs, GANG_ID, GANG_CONFIG_DIR,
GANG_TIMEOUT_SECONDS and POD_NAME. You may set

  BW_THRESHOLD_GBPS  least bus bandwidth, GB/s (default 0: any)
  TEST_SIZE_MB       size of the buffers, MiB (default 64)
  BENCHMARK_ITERS    timed iterations (default 20)
  TIMEOUT_SECONDS    of the run (default 300)

The exit status is 0 passed, 1 failed or too slow, 2 the environment is wrong, 3 the gang is not complete, 4 NVSentinel did not accept the
event. With PROCESSING_STRATEGY=STORE_ONLY, 1 to 3 become 0.

Example:
  NODE_NAME=gpu-17 PLATFORM_CONNECTOR_SOCKET=unix:///var/run/nvsentinel.sock BW_THRESHOLD_GBPS=1 evenkeel-nvsentinel-check
`

func main() {
	if len(os.Args) > 1 {
		fmt.Fprint(os.Stderr, usage)
		if os.Args[1] == "--help" || os.Args[1] == "-h" {
			return
		}
		os.Exit(check.ExitConfig)
	}
	config, err := check.ReadConfig(os.Getenv)
	if err != nil {
		fmt.Fprintln(os.Stderr, "evenkeel-nvsentinel-check:", err)
		os.Exit(check.ExitConfig)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	c := check.Check{Config: config, Bench: "evenkeel-bench", Environment: os.Environ(), Clock: clock.RealClock{}, Sending: check.DefaultSending, Log: os.Stderr}
	status := c.Run(ctx)
	stop()
	os.Exit(status)
}
