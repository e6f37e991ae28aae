// Package build makes Evenkeel's binaries and container images.
//
// The binaries are built on this machine into dist/ and copied into the images, so an image build needs no compiler
// and, with a base made here, no registry.
package build

import (
	"bytes"
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
	"strings"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// Names of the images, as buildah's local storage knows them.
const (
	Operator = "localhost/evenkeel-operator:dev"
	Plugin   = "localhost/evenkeel-plugin:dev"
	Bench    = "localhost/evenkeel-bench:dev"
	Server   = "localhost/evenkeel-reduction-server:dev"
	Training = "localhost/evenkeel-training:dev"
	base     = "localhost/evenkeel-base:dev"
)

// PluginDir is where the plugin's files lie inside the plugin image.
const PluginDir = "/plugin"

// A Builder builds from the checkout that the working directory is in.
type Builder struct {
	// Registry uses the base images that the Dockerfiles name, which a registry has to serve.
	Registry bool
	// Progress receives one line per step and the output of a step that fails.
	Progress io.Writer
}

// Dist builds every binary and library into dist/.
func (b Builder) Dist(ctx context.Context) error {
	root, err := toolbox.Root()
	if err != nil {
		return err
	}
	dist := filepath.Join(root, "dist")
	if err := os.MkdirAll(filepath.Join(dist, "plugin"), 0o755); err != nil {
		return fmt.Errorf("make dist: %w", err)
	}
	b.say("building the plugin, evenkeel-bench and the reduction server (cargo, release)")
	if err := b.run(ctx, filepath.Join(root, "plugin"), nil, "cargo", "build", "--release", "--locked", "-p", "evenkeel-nccl", "-p", "evenkeel-bench", "-p", "evenkeel-reduction-server"); err != nil {
		return err
	}
	release := filepath.Join(root, "plugin", "target", "release")
	if target := os.Getenv("CARGO_TARGET_DIR"); target != "" {
		release = filepath.Join(target, "release")
	}
	library := filepath.Join(dist, "plugin", "libnccl-net-evenkeel.so")
	for _, c := range [][2]string{
		{filepath.Join(release, "libnccl_net_evenkeel.so"), library},
		{filepath.Join(release, "libnccl_net_evenkeel.so"), filepath.Join(dist, "plugin", "libnccl-net.so")},
		{filepath.Join(release, "evenkeel-bench"), filepath.Join(dist, "evenkeel-bench")},
		{filepath.Join(release, "evenkeel-reduction-server"), filepath.Join(dist, "evenkeel-reduction-server")},
	} {
		if err := copyFile(c[0], c[1]); err != nil {
			return err
		}
	}
	if err := writeManifest(ctx, root, library, filepath.Join(dist, "plugin", "manifest.json")); err != nil {
		return err
	}
	b.say("building the operator (go, static)")
	return b.run(ctx, root, []string{"CGO_ENABLED=0"}, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", dist+"/",
		"./operator/cmd/evenkeel-operator", "./operator/cmd/evenkeel-install")
}

// Base lays out dist/base: busybox with its applets, and the C library and loader of this machine. It is enough to run
// a dynamically linked program built here, and serves as the base image where no registry can be reached.
func (b Builder) Base(ctx context.Context) error {
	root, err := toolbox.Root()
	if err != nil {
		return err
	}
	dir := filepath.Join(root, "dist", "base")
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("clear %s: %w", dir, err)
	}
	for _, d := range []string{"bin", "usr/bin", "usr/local/bin", "etc", "tmp", "lib64"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return fmt.Errorf("make base: %w", err)
		}
	}
	if err := os.Chmod(filepath.Join(dir, "tmp"), 0o1777); err != nil {
		return fmt.Errorf("make base: %w", err)
	}
	if err := toolbox.EnsurePrograms(ctx, b.progress(), []toolbox.Program{{Name: "busybox", Package: "busybox-static"}}); err != nil {
		return err
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return fmt.Errorf("base: %w", err)
	}
	if err := copyFile(busybox, filepath.Join(dir, "bin", "busybox")); err != nil {
		return err
	}
	applets, err := exec.CommandContext(ctx, busybox, "--list").Output()
	if err != nil {
		return fmt.Errorf("list busybox's applets: %w", err)
	}
	for _, a := range strings.Fields(string(applets)) {
		if a == "busybox" {
			continue
		}
		if err := os.Symlink("busybox", filepath.Join(dir, "bin", a)); err != nil {
			return fmt.Errorf("link applet %s: %w", a, err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "etc", "passwd"), []byte("root:x:0:0::/:/bin/sh\nnonroot:x:65532:65532::/:/bin/sh\n"), 0o644); err != nil {
		return fmt.Errorf("make base: %w", err)
	}
	libraries, err := sharedLibraries(ctx, filepath.Join(root, "dist", "evenkeel-bench"))
	if err != nil {
		return err
	}
	for _, lib := range libraries {
		if err := copyFile(lib, filepath.Join(dir, lib)); err != nil {
			return err
		}
	}
	return nil
}

// All builds every image and returns their names.
func (b Builder) All(ctx context.Context) ([]string, error) {
	if err := toolbox.EnsurePrograms(ctx, b.progress(), []toolbox.Program{{Name: "buildah", Package: "buildah"}}); err != nil {
		return nil, err
	}
	if err := b.Dist(ctx); err != nil {
		return nil, err
	}
	operatorBase, benchBase := "", ""
	if !b.Registry {
		if err := b.Base(ctx); err != nil {
			return nil, err
		}
		if err := b.image(ctx, "images/base/Dockerfile", base); err != nil {
			return nil, err
		}
		operatorBase, benchBase = "scratch", base
	}
	for _, i := range []struct {
		file, name string
		args       []string
	}{
		{"Dockerfile", Operator, []string{"BASE_IMAGE=" + operatorBase}},
		{"images/plugin/Dockerfile", Plugin, nil},
		{"images/bench/Dockerfile", Bench, []string{"BASE_IMAGE=" + benchBase}},
		{"images/reduction-server/Dockerfile", Server, []string{"BASE_IMAGE=" + benchBase}},
		{"images/training/Dockerfile", Training, []string{"BASE_IMAGE=" + Bench, "PLUGIN_IMAGE=" + Plugin}},
	} {
		if err := b.image(ctx, i.file, i.name, i.args...); err != nil {
			return nil, err
		}
	}
	return []string{Operator, Plugin, Bench, Server, Training}, nil
}

func (b Builder) image(ctx context.Context, file, name string, args ...string) error {
	root, err := toolbox.Root()
	if err != nil {
		return err
	}
	b.say("building image " + name)
	// chroot isolation needs neither user namespaces nor a container runtime; a fixed time keeps digests equal for equal content.
	argv := []string{"build", "--isolation", "chroot", "--layers=false", "--timestamp", "0", "-f", file, "-t", name}
	if !b.Registry {
		argv = append(argv, "--pull=never")
	}
	for _, a := range args {
		if !strings.HasSuffix(a, "=") {
			argv = append(argv, "--build-arg", a)
		}
	}
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

func (b Builder) say(line string) { fmt.Fprintln(b.progress(), line) }

func (b Builder) progress() io.Writer {
	if b.Progress == nil {
		return io.Discard
	}
	return b.Progress
}

// writeManifest describes the library for the operator and for people: version, commit, ABI versions, checksum.
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

// sharedLibraries lists what a program needs at run time, the loader included, plus the resolver's modules, which the
// C library opens by itself.
func sharedLibraries(ctx context.Context, program string) ([]string, error) {
	out, err := exec.CommandContext(ctx, "ldd", program).Output()
	if err != nil {
		return nil, fmt.Errorf("ldd %s: %w", program, err)
	}
	libs := regexp.MustCompile(`(/\S+)\s+\(0x`).FindAllStringSubmatch(string(out), -1)
	var paths []string
	for _, l := range libs {
		paths = append(paths, l[1])
	}
	if len(paths) == 0 {
		return nil, fmt.Errorf("ldd %s: no libraries found in %q", program, out)
	}
	for _, name := range []string{"libnss_dns.so.2", "libnss_files.so.2", "libresolv.so.2"} {
		path := filepath.Join(filepath.Dir(paths[0]), name)
		if _, err := os.Stat(path); err == nil {
			paths = append(paths, path)
		} else if !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("resolver module: %w", err)
		}
	}
	return paths, nil
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
