// Command release builds all that a version publishes into one folder, and publishes it.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	root := &cobra.Command{
		Use:   "release",
		Short: "Build all that a version publishes, and publish it",
		Example: `  go run ./hack/ci/release build --version 0.1.0
  go run ./hack/ci/release build --version 0.1.0 --platforms linux/amd64 --registry registry.example.com/evenkeel
  go run ./hack/ci/release verify --version 0.1.0     # build it again somewhere else, and compare
  go run ./hack/ci/release publish dist/release/0.1.0`,
		SilenceUsage: true, SilenceErrors: true,
	}
	root.AddCommand(buildCommand(), verifyCommand(), publishCommand())
	return root
}

// Defaults of where a release is published. The chart and the krew manifest name these places.
const (
	defaultRegistry  = "ghcr.io/evenkeel"
	defaultDownloads = "https://evenkeel.dev/releases/" // and the version
)

func (r *release) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&r.version, "version", "", "version to build, without v; that of plugin/Cargo.toml, the chart and CHANGELOG.md")
	f.StringVar(&r.registry, "registry", defaultRegistry, "where the images are published; the chart names it")
	f.StringVar(&r.downloads, "downloads", "", "address of the folder where the files are published; the krew manifest names it (default: "+defaultDownloads+"VERSION)")
	f.StringSliceVar(&r.platforms, "platforms", []string{"linux/amd64", "linux/arm64"}, "platforms of the images, wheels and the benchmark")
	f.StringVar(&r.ncclTests, "nccl-tests", "", "folder with the source of NVIDIA's nccl-tests, or "+withoutTests+" for no such image (default: the commit in the Dockerfile is fetched)")
	f.BoolVar(&r.dirty, "dirty", false, "build although there are uncommitted changes, for tests")
	if err := cmd.MarkFlagRequired("version"); err != nil {
		panic(err) // the flag is defined above
	}
}

func buildCommand() *cobra.Command {
	r, s := newRelease(), signing{}
	cmd := &cobra.Command{
		Use: "build", Short: "Build a version into dist/release/VERSION", Args: cobra.NoArgs,
		Long: `Build a version into dist/release/VERSION: images, chart, wheels, programs, the krew manifest, SBOMs, release
notes, checksums and a signature of them. It needs root on Debian, as the base of the images is made by debootstrap.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := r.open(cmd.Context()); err != nil {
				return err
			}
			r.folder = filepath.Join(r.root, "dist", "release", r.version)
			if err := r.build(cmd.Context()); err != nil {
				return err
			}
			by, err := s.signer(cmd.Context(), r.progress)
			if err != nil {
				return err
			}
			if err := by.sign(cmd.Context(), filepath.Join(r.folder, sumsFile)); err != nil {
				return err
			}
			fmt.Println(r.folder)
			return nil
		},
	}
	r.flags(cmd)
	s.flags(cmd)
	return cmd
}

func (s *signing) flags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&s.key, "key", "", "private key of cosign that signs; COSIGN_PASSWORD has its password. Default: a key of this user, made at first use")
	cmd.Flags().BoolVar(&s.keyless, "keyless", false, "sign with the identity of a CI, by Sigstore's public service")
	cmd.MarkFlagsMutuallyExclusive("key", "keyless")
}

func verifyCommand() *cobra.Command {
	r := newRelease()
	cmd := &cobra.Command{
		Use: "verify", Short: "Build a version again, from a clone in another folder, and compare it with dist/release/VERSION", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := r.open(cmd.Context()); err != nil {
				return err
			}
			return r.verify(cmd.Context(), filepath.Join(r.root, "dist", "release", r.version))
		},
	}
	r.flags(cmd)
	return cmd
}

func publishCommand() *cobra.Command {
	p, s := publication{progress: os.Stderr}, signing{}
	cmd := &cobra.Command{
		Use: "publish FOLDER", Short: "Push a release's images and chart to the registry that it was built for, and sign the images", Args: cobra.ExactArgs(1),
		Long: `Push the images and the chart of a release to the registry that it was built for, and sign the images there, as whoever has
signed the release. Credentials are those of skopeo, helm and cosign, which read ~/.docker/config.json ("skopeo login" writes it with
REGISTRY_AUTH_FILE). The other files of the folder are for the place that --downloads named.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			box, err := toolbox.New(p.progress)
			if err != nil {
				return err
			}
			if p.helm, err = box.Path(cmd.Context(), "helm"); err != nil {
				return err
			}
			if p.signer, err = s.signer(cmd.Context(), p.progress); err != nil {
				return err
			}
			return p.publish(cmd.Context(), strings.TrimSuffix(args[0], "/"))
		},
	}
	cmd.Flags().StringVar(&p.to, "to", "", "a mirror of that registry, to push to instead")
	s.flags(cmd)
	return cmd
}
