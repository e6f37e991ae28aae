// Package artifacts builds Evenkeel's binaries, container images and Python package.
//
// The binaries are built on this machine into dist/ and copied into the images. So an image build needs no compiler
// and, with a base image that is built here, no registry.
package artifacts

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// Names of the images in buildah's local storage.
const (
	Operator = "localhost/evenkeel-operator:dev"
	Plugin   = "localhost/evenkeel-plugin:dev"
	Bench    = "localhost/evenkeel-bench:dev"
	Server   = "localhost/evenkeel-reduction-server:dev"
	Training = "localhost/evenkeel-training:dev"
	// NVSentinelCheck is a preflight check for NVSentinel.
	NVSentinelCheck = "localhost/evenkeel-nvsentinel-check:dev"
	// NCCLTests is built by [Builder.NCCLTests], and not by [Builder.All].
	NCCLTests = "localhost/evenkeel-nccl-tests:dev"
	// PyTorch stands for a user's training image. It is built by [Builder.PyTorch], and holds nothing of Evenkeel.
	PyTorch = "localhost/evenkeel-pytorch:dev"

	debianImage  = "localhost/evenkeel-debian:dev"
	testingImage = "localhost/evenkeel-debian-testing:dev"
	mpiImage     = "localhost/evenkeel-mpi:dev"
)

// keyLabel is an image's label with a hash of its inputs.
const keyLabel = "evenkeel.dev/made-from"

// PluginDir is where the plugin's files lie inside the plugin image.
const PluginDir = "/plugin"

// Libraries are the file names of the plugin in images and wheel. NCCL, and RCCL on AMD's GPUs, find the first and
// third by the plugin's name, and load the others without being asked. Settings that take a path name the first.
var Libraries = []string{"libnccl-net-evenkeel.so", "libnccl-net.so", RCCLLibrary, "librccl-net.so"}

// RCCLLibrary is the name by which RCCL finds the plugin for NCCL_NET_PLUGIN=evenkeel.
const RCCLLibrary = "librccl-net-evenkeel.so"

// MPILibrary is the library with the functions of MPI that nccl-tests use. Programs are linked with it as libmpi.so.
const MPILibrary = "libevenkeel-mpi.so"

// A Builder builds from the checkout that the working directory is in.
type Builder struct {
	// Registry uses the base images of the Dockerfiles, from their registries, instead of one that is built here.
	Registry bool
	// Arch is the processor that is built for, as Go names it: amd64 or arm64. Empty: this machine's. What is for another
	// one is in dist/linux-ARCH, and its images have that in their tags.
	Arch string
	// Quick leaves out what takes most of a build and changes only how fast the programs are: link-time optimization of
	// Rust's, and inlining in Go's. It is for tests and for trying things out.
	Quick bool
	// Stamp writes the commit into Go's programs, which takes a repository of git.
	Stamp bool
	// Progress receives one line per step and the output of a step that fails.
	Progress io.Writer
}

// Dist builds every binary and library into dist/.
func (b Builder) Dist(ctx context.Context) error {
	root, err := toolbox.Root()
	if err != nil {
		return err
	}
	dist := filepath.Join(root, b.Folder())
	if err := os.MkdirAll(filepath.Join(dist, "plugin"), 0o755); err != nil {
		return fmt.Errorf("create dist: %w", err)
	}
	b.report("building the plugin, evenkeel-bench, the library for nccl-tests, the reduction server and the Python package (cargo, " + profile(b.Quick) + ")")
	t, err := newToolchain(ctx, root, b.progress(), b.arch())
	if err != nil {
		return err
	}
	built, err := t.programs(ctx, b.progress(), b.Quick, b.Stamp)
	if err != nil {
		return err
	}
	copies := [][2]string{
		{filepath.Join(built, "evenkeel-bench"), filepath.Join(dist, "evenkeel-bench")},
		{filepath.Join(built, "evenkeel-reduction-server"), filepath.Join(dist, "evenkeel-reduction-server")},
		{filepath.Join(built, "libevenkeel_mpi.so"), filepath.Join(dist, "mpi", "lib", MPILibrary)},
	}
	for _, name := range Libraries {
		copies = append(copies, [2]string{filepath.Join(built, "libnccl_net_evenkeel.so"), filepath.Join(dist, "plugin", name)})
	}
	for _, c := range copies {
		if err := CheckGlibc(c[0], GlibcVersion); err != nil {
			return err
		}
		if err := copyFile(c[0], c[1]); err != nil {
			return err
		}
	}
	if err := mpiHome(root, filepath.Join(dist, "mpi")); err != nil {
		return err
	}
	wheel, err := t.wheel(ctx, b.progress(), b.Quick, filepath.Join(root, "dist", "wheel"), filepath.Join(built, "libnccl_net_evenkeel.so"))
	if err != nil {
		return err
	}
	if err := unpackWheel(wheel, filepath.Join(dist, "plugin", "python")); err != nil {
		return err
	}
	if err := writeManifest(ctx, root, filepath.Join(dist, "plugin", Libraries[0]), filepath.Join(dist, "plugin", "manifest.json")); err != nil {
		return err
	}
	b.report("building the operator (go, static)")
	return b.Go(ctx, root, "linux", b.arch(), dist+"/", "./operator/cmd/evenkeel-operator", "./operator/cmd/evenkeel-install", "./operator/cmd/evenkeel-nvsentinel-check")
}

// Go builds programs of the operator's module for an operating system and a processor: static, and without paths of
// this machine. To is a file, or a folder with a slash behind it.
func (b Builder) Go(ctx context.Context, root, goos, goarch, to string, packages ...string) error {
	args, flags := []string{"build", "-ldflags", "-s -w", "-o", to}, toolbox.GoReleaseFlags
	if b.Quick {
		flags = toolbox.GoFlags
	}
	if b.Stamp {
		args = append(args, "-buildvcs=true")
	}
	return b.run(ctx, root, []string{"CGO_ENABLED=0", "GOFLAGS=" + flags, "GOOS=" + goos, "GOARCH=" + goarch}, "go", append(args, packages...)...)
}

// arch is the processor that is built for.
func (b Builder) arch() string { return cmp.Or(b.Arch, runtime.GOARCH) }

// foreign reports whether that is another processor than this machine's.
func (b Builder) foreign() bool { return b.arch() != runtime.GOARCH }

// Folder is where the binaries are, from the checkout.
func (b Builder) Folder() string {
	if b.foreign() {
		return filepath.Join("dist", "linux-"+b.arch())
	}
	return "dist"
}

// tagged is the name of an image for the builder's processor.
func (b Builder) tagged(name string) string {
	if b.foreign() {
		return name + "-" + b.arch()
	}
	return name
}

// own is the name of an image that is not a base. Those of a release have other names, so that no other build replaces
// them meanwhile.
func (b Builder) own(name string) string {
	if b.Stamp {
		name += "-release"
	}
	return b.tagged(name)
}

// mpiHome adds what compilers look for to the folder that has the library for nccl-tests: the header, and the name of
// every MPI.
func mpiHome(root, home string) error {
	if err := copyFile(filepath.Join(root, "plugin", "bindings", "mpi", "include", "mpi.h"), filepath.Join(home, "include", "mpi.h")); err != nil {
		return err
	}
	link := filepath.Join(home, "lib", "libmpi.so")
	if err := os.Remove(link); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("link the library for nccl-tests: %w", err)
	}
	if err := os.Symlink(MPILibrary, link); err != nil {
		return fmt.Errorf("link the library for nccl-tests: %w", err)
	}
	return nil
}

// debian builds a minimal image of Debian, where no registry can be reached. It has the release of this machine, so
// that binaries that are built here run in it. It returns the image's id.
func (b Builder) debian(ctx context.Context, root string) (string, error) {
	release, err := codename("/etc/os-release")
	if err != nil {
		return "", err
	}
	return b.debianRelease(ctx, root, release, b.tagged(debianImage))
}

// debianRelease builds a minimal image of a release of Debian, unless it exists, and returns its id.
func (b Builder) debianRelease(ctx context.Context, root, release, name string) (string, error) {
	i := image{file: "images/base/Dockerfile", name: name}
	key, err := i.key(root, release)
	if err != nil {
		return "", err
	}
	if b.has(ctx, name, key) {
		return b.id(ctx, name)
	}
	i.args = []string{"BASE=" + filepath.Join(b.Folder(), "base-"+release)}
	dir := filepath.Join(root, b.Folder(), "base-"+release)
	defer os.RemoveAll(dir) // best effort: the image has it
	if err := b.debootstrap(ctx, release, dir, "--arch="+b.arch()); err != nil {
		return "", err
	}
	for _, unused := range []string{"var/cache/apt/archives", "var/lib/apt/lists", "var/log", "usr/share/doc", "usr/share/info", "usr/share/locale", "usr/share/man"} {
		// The folders themselves are kept, as apt needs some of them.
		entries, err := os.ReadDir(filepath.Join(dir, unused))
		if err != nil {
			return "", fmt.Errorf("make base: %w", err)
		}
		for _, e := range entries {
			if err := os.RemoveAll(filepath.Join(dir, unused, e.Name())); err != nil {
				return "", fmt.Errorf("make base: %w", err)
			}
		}
	}
	if err := b.build(ctx, root, i, key); err != nil {
		return "", err
	}
	return b.id(ctx, name)
}

// debootstrap makes the root of a release of Debian in dir, in the place of what is there. Flags are for another
// distribution.
func (b Builder) debootstrap(ctx context.Context, release, dir string, flags ...string) error {
	if err := toolbox.EnsurePrograms(ctx, b.progress(), []toolbox.Program{{Name: "debootstrap", Package: "debootstrap"}}); err != nil {
		return err
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("clear %s: %w", dir, err)
	}
	b.report("making a root of " + release + " (a minute or two, once)")
	args := append(slices.Clone(flags), "--variant=minbase", release, dir)
	return b.run(ctx, filepath.Dir(dir), nil, "debootstrap", args...)
}

// codename is the name of the Debian release that a file like /etc/os-release describes.
func codename(path string) (string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("read the release of Debian: %w", err)
	}
	name := regexp.MustCompile(`(?m)^VERSION_CODENAME="?([a-z]+)"?$`).FindSubmatch(text)
	if name == nil || !regexp.MustCompile(`(?m)^ID=debian$`).Match(text) {
		return "", fmt.Errorf("%s does not describe a release of Debian, for the base of the images: build with --registry instead", path)
	}
	return string(name[1]), nil
}

// mpi builds the base of the images for MPIJobs, unless it exists.
func (b Builder) mpi(ctx context.Context) error {
	root, err := toolbox.Root()
	if err != nil {
		return err
	}
	i, parent := image{file: "images/mpi/Dockerfile", name: b.tagged(mpiImage)}, ""
	if !b.Registry {
		if parent, err = b.debian(ctx, root); err != nil {
			return err
		}
		i.args = []string{"BASE_IMAGE=" + b.tagged(debianImage)}
	}
	key, err := i.key(root, parent)
	if err != nil || b.has(ctx, i.name, key) {
		return err
	}
	return b.build(ctx, root, i, key)
}

// All builds every image that the chart and the tests need, and returns their names.
func (b Builder) All(ctx context.Context) ([]string, error) {
	names, err := b.Shipped(ctx)
	if err != nil {
		return nil, err
	}
	root, err := toolbox.Root()
	if err != nil {
		return nil, err
	}
	training := image{file: "images/training/Dockerfile", name: b.own(Training),
		args: []string{"BASE_IMAGE=" + b.own(Bench), "PLUGIN_IMAGE=" + b.own(Plugin)}}
	return append(names, training.name), b.build(ctx, root, training, "")
}

// Shipped builds the images that are published, and returns their names: operator, plugin, benchmark, reduction server
// and the check for NVSentinel.
func (b Builder) Shipped(ctx context.Context) ([]string, error) {
	if b.foreign() {
		stop, err := emulate(ctx, b.progress(), b.arch())
		if err != nil {
			return nil, err
		}
		defer stop()
	}
	if err := b.ready(ctx); err != nil {
		return nil, err
	}
	root, err := toolbox.Root()
	if err != nil {
		return nil, err
	}
	operator := image{file: "Dockerfile", name: Operator}
	// The installed packages are kept as a layer, for the next build.
	server := image{file: "images/reduction-server/Dockerfile", name: Server, flags: []string{"--layers"}}
	if !b.Registry {
		operator.args = []string{"BASE_IMAGE=scratch"}
		server.args = []string{"BASE_IMAGE=" + b.tagged(debianImage)}
	}
	protocol, err := Protocol(root)
	if err != nil {
		return nil, err
	}
	server.flags = append(server.flags, speaks(protocol)...)
	var names []string
	for _, i := range []image{
		operator,
		{file: "images/plugin/Dockerfile", name: Plugin, flags: speaks(protocol)},
		{file: "images/bench/Dockerfile", name: Bench, args: []string{"BASE_IMAGE=" + b.tagged(mpiImage)}},
		server,
		{file: "images/nvsentinel-check/Dockerfile", name: NVSentinelCheck, args: []string{"BENCH_IMAGE=" + b.own(Bench), "PLUGIN_IMAGE=" + b.own(Plugin)}},
	} {
		i.name = b.own(i.name)
		if err := b.build(ctx, root, i, ""); err != nil {
			return nil, err
		}
		names = append(names, i.name)
	}
	b.report("plugin and reduction servers speak protocol " + protocol + ": in a registry, let their tags end with -p" + protocol)
	return names, nil
}

// PyTorch builds the image with Debian's PyTorch, unless it exists, and returns its name. It downloads 250 MB.
func (b Builder) PyTorch(ctx context.Context) (string, error) {
	if err := toolbox.EnsurePrograms(ctx, b.progress(), []toolbox.Program{{Name: "buildah", Package: "buildah"}}); err != nil {
		return "", err
	}
	root, err := toolbox.Root()
	if err != nil {
		return "", err
	}
	i, parent := image{file: "images/pytorch/Dockerfile", name: PyTorch}, ""
	if !b.Registry {
		// The release of this machine may have an older PyTorch, without backends in Python.
		if parent, err = b.debianRelease(ctx, root, "testing", testingImage); err != nil {
			return "", err
		}
		i.args = []string{"BASE_IMAGE=" + testingImage}
	}
	key, err := i.key(root, parent)
	if err != nil || b.has(ctx, i.name, key) {
		return i.name, err
	}
	return i.name, b.build(ctx, root, i, key)
}

// speaks are buildah's flags for the label of an image that speaks a protocol.
func speaks(protocol string) []string { return []string{"--label", protocolLabel + "=" + protocol} }

// NCCLTests builds NVIDIA's nccl-tests into an image and returns its name. folder has their source; if it is empty, the
// commit in the Dockerfile is fetched.
func (b Builder) NCCLTests(ctx context.Context, folder string) (string, error) {
	if err := b.ready(ctx); err != nil {
		return "", err
	}
	root, err := toolbox.Root()
	if err != nil {
		return "", err
	}
	protocol, err := Protocol(root)
	if err != nil {
		return "", err
	}
	if err := b.build(ctx, root, image{file: "images/plugin/Dockerfile", name: b.own(Plugin), flags: speaks(protocol)}, ""); err != nil {
		return "", err
	}
	i := image{file: "images/nccl-tests/Dockerfile", name: b.own(NCCLTests), args: []string{"MPI_IMAGE=" + b.tagged(mpiImage), "PLUGIN_IMAGE=" + b.own(Plugin)}}
	if folder != "" {
		// Into the build context of buildah.
		source := filepath.Join("dist", "nccl-tests")
		if err := os.RemoveAll(filepath.Join(root, source)); err != nil {
			return "", fmt.Errorf("clear %s: %w", source, err)
		}
		if err := os.CopyFS(filepath.Join(root, source), os.DirFS(folder)); err != nil {
			return "", fmt.Errorf("copy the source of nccl-tests: %w", err)
		}
		i.args = append(i.args, "NCCL_TESTS_FOLDER="+source)
	}
	if certificates := os.Getenv("PIP_CERT"); certificates != "" {
		// The certificate of a proxy, which images lack.
		const inside = "/run/certificates.pem"
		i.args, i.flags = append(i.args, "PIP_CERT="+inside), []string{"--volume", certificates + ":" + inside + ":ro"}
	}
	return i.name, b.build(ctx, root, i, "")
}

// ready builds the inputs of all images.
func (b Builder) ready(ctx context.Context) error {
	if err := toolbox.EnsurePrograms(ctx, b.progress(), []toolbox.Program{{Name: "buildah", Package: "buildah"}}); err != nil {
		return err
	}
	// Compilers use the processors, and the base waits for downloads and the disk.
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return b.Dist(ctx) })
	group.Go(func() error { return b.mpi(ctx) })
	return group.Wait()
}

// An image is one Dockerfile of the checkout.
type image struct {
	file, name string
	args       []string // NAME=VALUE
	flags      []string // for buildah, in addition to those of every image
}

// key is a hash of an image's inputs: the Dockerfile's folder, the arguments and from. An image with the same key is
// not rebuilt.
func (i image) key(root string, from string) (string, error) {
	hash := sha256.New()
	fmt.Fprintf(hash, "%q %q\n", i.args, from)
	folder := filepath.Join(root, filepath.Dir(i.file))
	entries, err := os.ReadDir(folder)
	if err != nil {
		return "", fmt.Errorf("image %s: %w", i.name, err)
	}
	for _, e := range entries {
		text, err := os.ReadFile(filepath.Join(folder, e.Name()))
		if err != nil {
			return "", fmt.Errorf("image %s: %w", i.name, err)
		}
		fmt.Fprintf(hash, "%s %d\n%s", e.Name(), len(text), text)
	}
	return hex.EncodeToString(hash.Sum(nil)), nil
}

// has reports whether buildah has the image with this key.
func (b Builder) has(ctx context.Context, name, key string) bool {
	out, err := exec.CommandContext(ctx, "buildah", "inspect", "--type", "image", "--format", `{{index .OCIv1.Config.Labels "`+keyLabel+`"}}`, name).Output()
	return err == nil && strings.TrimSpace(string(out)) == key
}

// id is an image's id, which depends on its content.
func (b Builder) id(ctx context.Context, name string) (string, error) {
	out, err := exec.CommandContext(ctx, "buildah", "inspect", "--type", "image", "--format", "{{.FromImageID}}", name).Output()
	if err != nil {
		return "", fmt.Errorf("inspect image %s: %w", name, err)
	}
	return strings.TrimSpace(string(out)), nil
}

// build builds the image, with the key as a label if there is one.
func (b Builder) build(ctx context.Context, root string, i image, key string) error {
	b.report("building image " + i.name)
	// chroot isolation needs neither user namespaces nor a container runtime; a fixed time keeps digests equal for equal
	// content.
	argv := []string{"build", "--isolation", "chroot", "--layers=false", "--timestamp", "0", "-f", i.file, "-t", i.name}
	if !b.Registry {
		argv = append(argv, "--pull=never")
	}
	if key != "" {
		argv = append(argv, "--label", keyLabel+"="+key)
	}
	if b.foreign() {
		argv = append(argv, "--arch", b.arch())
	}
	for _, a := range append([]string{"DIST=" + b.Folder()}, i.args...) {
		argv = append(argv, "--build-arg", a)
	}
	argv = append(argv, i.flags...)
	return b.run(ctx, root, nil, "buildah", append(argv, ".")...)
}

func (b Builder) run(ctx context.Context, dir string, env []string, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), env...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, bytes.TrimSpace(out.Bytes()))
	}
	return nil
}

func (b Builder) report(line string) { fmt.Fprintln(b.progress(), line) }

func (b Builder) progress() io.Writer {
	if b.Progress == nil {
		return io.Discard
	}
	return b.Progress
}

// writeManifest writes the library's version, commit, ABI versions and checksum, for the operator and for users.
func writeManifest(ctx context.Context, root, library, path string) error {
	content, err := os.ReadFile(library)
	if err != nil {
		return fmt.Errorf("manifest: %w", err)
	}
	cargo, err := os.ReadFile(filepath.Join(root, "plugin", "Cargo.toml"))
	if err != nil {
		return fmt.Errorf("manifest: %w", err)
	}
	version := regexp.MustCompile(`(?m)^version = "([^"]+)"`).FindSubmatch(cargo)
	if version == nil {
		return errors.New("manifest: plugin/Cargo.toml states no version")
	}
	commit, err := exec.CommandContext(ctx, "git", "-C", root, "rev-parse", "HEAD").Output()
	if err != nil {
		commit = []byte("unknown") // an exported tree is not a repository
	}
	var abi []string
	for v := 6; v <= 12; v++ {
		if bytes.Contains(content, fmt.Appendf(nil, "ncclNetPlugin_v%d\x00", v)) {
			abi = append(abi, fmt.Sprintf("v%d", v))
		}
	}
	if len(abi) == 0 {
		return fmt.Errorf("manifest: %s exports no ncclNetPlugin symbol", library)
	}
	sum := sha256.Sum256(content)
	manifest, err := json.MarshalIndent(map[string]any{
		"name": "Evenkeel", "version": string(version[1]), "commit": strings.TrimSpace(string(commit)),
		"ncclNet": abi, "libraries": map[string]string{filepath.Base(library): hex.EncodeToString(sum[:])},
	}, "", "  ")
	if err != nil {
		return fmt.Errorf("manifest: %w", err)
	}
	if err := os.WriteFile(path, append(manifest, '\n'), 0o644); err != nil {
		return fmt.Errorf("manifest: %w", err)
	}
	return nil
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return fmt.Errorf("copy: %w", err)
	}
	defer in.Close()
	info, err := in.Stat()
	if err != nil {
		return fmt.Errorf("copy: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return fmt.Errorf("copy: %w", err)
	}
	if err := os.Remove(to); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("copy: %w", err)
	}
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_EXCL, info.Mode().Perm())
	if err != nil {
		return fmt.Errorf("copy: %w", err)
	}
	if _, err := io.Copy(out, in); err != nil {
		out.Close()
		return fmt.Errorf("copy %s: %w", from, err)
	}
	if err := out.Close(); err != nil {
		return fmt.Errorf("copy %s: %w", from, err)
	}
	return nil
}
