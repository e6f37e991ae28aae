// Command images builds Evenkeel's container images with buildah.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/ci/artifacts"
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
	b := artifacts.Builder{Progress: os.Stderr}
	root := &cobra.Command{
		Use:   "images",
		Short: "Build Evenkeel's container images with buildah",
		Example: `  go run ./hack/ci/images dist                # only the binaries, into dist/
  go run ./hack/ci/images all                 # every image except these two, without a registry
  go run ./hack/ci/images all --registry      # on the base images of the Dockerfiles
  go run ./hack/ci/images pytorch             # Debian's PyTorch, as a user's training image
  go run ./hack/ci/images pytorch             # Debian's PyTorch, which the demo trains with
  go run ./hack/ci/images all --arch arm64    # for another processor, with its name in the images' tags
  go run ./hack/ci/images nccl-tests          # NVIDIA's nccl-tests, with the compiler and NCCL from PyPI
  go run ./hack/ci/images nccl-tests --source ~/nccl-tests`,
		SilenceUsage: true, SilenceErrors: true,
	}
	root.PersistentFlags().BoolVar(&b.Registry, "registry", false, "use the base images of the Dockerfiles, instead of one that is built here")
	root.PersistentFlags().StringVar(&b.Arch, "arch", "", "processor to build for, amd64 or arm64; images of another one are built under emulation (default: this machine's)")
	root.AddCommand(
		&cobra.Command{Use: "dist", Short: "Build the binaries and libraries into dist/", Args: cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error { return b.Dist(cmd.Context()) }},
		&cobra.Command{Use: "all", Short: "Build every image except pytorch and nccl-tests, and print their names", Args: cobra.NoArgs,
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
		&cobra.Command{Use: "pytorch", Short: "Build an image with Debian's PyTorch and print its name (5 minutes once, 1.4 GB)", Args: cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				name, err := b.PyTorch(cmd.Context())
				if err == nil {
					fmt.Println(name)
				}
				return err
			}},
		ncclTests(&b),
	)
	return root
}

func ncclTests(b *artifacts.Builder) *cobra.Command {
	var source string
	cmd := &cobra.Command{Use: "nccl-tests", Short: "Build NVIDIA's nccl-tests into an image and print its name (10 to 20 minutes on 2 cores)", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			name, err := b.NCCLTests(cmd.Context(), source)
			if err == nil {
				fmt.Println(name)
			}
			return err
		}}
	cmd.Flags().StringVar(&source, "source", "", "folder with the source of nccl-tests, instead of the commit in the Dockerfile")
	return cmd
}
