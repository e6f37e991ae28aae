// Command wheel builds the Python package evenkeel, with the NCCL plugin in it, into dist/.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"evenkeel.dev/evenkeel/hack/ci/artifacts"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	root, err := toolbox.Root()
	if err == nil {
		var wheel string
		if wheel, err = artifacts.Wheel(ctx, root, os.Stderr, false); err == nil {
			fmt.Println(wheel)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "wheel:", err)
		os.Exit(1)
	}
}
