package main

import (
	"context"
	"fmt"
	"path/filepath"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// aarch64Target needs no C compiler, no libraries, and no linker other than Rust's own.
const aarch64Target = "aarch64-unknown-linux-musl"

// aarch64 runs the tests of processor-dependent code on an emulated aarch64, and there the binaries that are shipped
// for it.
func aarch64(ctx context.Context, t *task) error {
	const emulator = "qemu-aarch64-static"
	if err := toolbox.EnsurePrograms(ctx, t.progress(), []toolbox.Program{{Name: emulator, Package: "qemu-user-static"}}); err != nil {
		return err
	}
	if err := t.command(ctx, filepath.Join(t.root, "plugin"), "rustup", "target", "add", aarch64Target); err != nil {
		return fmt.Errorf("the standard library for %s: %w", aarch64Target, err)
	}
	env := []string{
		"CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_LINKER=rust-lld",
		"CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_RUNNER=" + emulator,
	}
	t.cargoTest(ctx, "reductions and protocol", env, "--target", aarch64Target, "-p", "evenkeel-reduction-kernels", "-p", "evenkeel-protocol")
	t.goTest(ctx, nil, "-tags", "aarch64", "-run", "^TestShippedBinariesRunOnArm64$", "-timeout", "60m", "./hack/ci/artifacts")
	return context.Cause(ctx)
}
