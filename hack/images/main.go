// Command images builds Evenkeel's container images with buildah.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/images/build"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "images:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	b := build.Builder{Progress: os.Stderr}
	root := &cobra.Command{
		Use:   "images",
		Short: "Build Evenkeel's container images with buildah",
		Example: `  go run ./hack/images dist                # only the binaries, into dist/
  go run ./hack/images all                 # every image, on bases that need no registry
  go run ./hack/images all --registry      # on the bases the Dockerfiles name`,
		SilenceUsage: true, SilenceErrors: true,
	}
	root.PersistentFlags().BoolVar(&b.Registry, "registry", false, "use the base images that the Dockerfiles name instead of ones made here")
	root.AddCommand(
		&cobra.Command{Use: "dist", Short: "Build the binaries and libraries into dist/", Args: cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error { return b.Dist(cmd.Context()) }},
		&cobra.Command{Use: "base", Short: "Lay out dist/base, the root file system of the base image", Args: cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error { return b.Base(cmd.Context()) }},
		&cobra.Command{Use: "all", Short: "Build every image and print its name", Args: cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				images, err := b.All(cmd.Context())
				if err != nil {
					return err
				}
				for _, image := range images {
					fmt.Println(image)
				}
				return nil
			}},
	)
	return root
}
