// Command evenkeel-install SRC DST copies the plugin's files out of its image into a volume, for nodes that cannot
// mount images.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"evenkeel.dev/evenkeel/operator/internal/install"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: evenkeel-install SRC DST\nCopies the files of folder SRC, and what is in its subfolder python, into folder DST, which is made if needed.")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	names, err := install.Copy(ctx, os.Args[1], os.Args[2])
	if err != nil {
		fmt.Fprintln(os.Stderr, "evenkeel-install:", err)
		os.Exit(1)
	}
	fmt.Printf("installed %d files into %s\n", len(names), os.Args[2])
}
