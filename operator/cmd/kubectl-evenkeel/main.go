// Command kubectl-evenkeel is kubectl's plugin for Evenkeel: it runs network checks and explains the state of nodes and
// jobs. In PATH, it is `kubectl evenkeel`.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"evenkeel.dev/evenkeel/operator/internal/cli"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := cli.Run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}
