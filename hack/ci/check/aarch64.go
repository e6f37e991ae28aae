package main

import (
	"context"
	"fmt"
	"os"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// aarch64Target needs no C compiler, no libraries, and no linker other than Rust's own.
const aarch64Target = "aarch64-unknown-linux-musl"

// aarch64 runs the tests of processor-dependent code on an emulated aarch64, and there the binaries that are shipped for it.
func aarch64(ctx context.Context, root string) (counts, error) {
	const emulator = "qemu-aarch64-static"
	if err := toolbox.EnsurePrograms(ctx, os.Stderr, []toolbox.Program{{Name: emulator, Package: "qemu-user-static"}}); err != nil {
		return counts{}, err
	}
	if err := stream(command(ctx, pluginDir(root), "rustup", "target", "add", aarch64Target), nil); err != nil {
		return counts{}, fmt.Errorf("the standard library for %s: %w", aarch64Target, err)
	}
	env := []string{
		"CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_LINKER=rust-lld",
		"CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_RUNNER=" + emulator,
	}
	kernels, err := cargoTest(ctx, root, env, "--target", aarch64Target, "-p", "evenkeel-reduction-kernels", "-p", "evenkeel-protocol")
	if err != nil {
		return kernels, err
	}
	shipped, err := goTest(ctx, root, nil, "-tags", "aarch64", "-run", "^TestShippedBinariesRunOnArm64$", "-timeout", "60m", "./hack/ci/artifacts")
	kernels.add(shipped)
	return kernels, err
}
