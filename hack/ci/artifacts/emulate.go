package artifacts

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// binfmt is where the kernel is told which program runs binaries of another processor.
const binfmt = "/proc/sys/fs/binfmt_misc"

// emulators are QEMU's for processors that Go names, with the ELF headers that they are for: magic and mask, as the
// kernel takes them.
var emulators = map[string]struct{ program, magic, mask string }{
	"arm64": {"qemu-aarch64-static",
		`\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00`, `\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff`},
	"amd64": {"qemu-x86_64-static",
		`\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\x3e\x00`, `\xff\xff\xff\xff\xff\xfe\xfe\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff`},
}

// emulate has the kernel run binaries of another processor by QEMU, also in other root file systems, until stop is
// called. Where the machine already does, it changes nothing.
func emulate(ctx context.Context, progress io.Writer, goarch string) (stop func(), err error) {
	e, ok := emulators[goarch]
	if !ok {
		return nil, fmt.Errorf("nothing runs binaries of %s here: build on amd64 or arm64", goarch)
	}
	if err := toolbox.EnsurePrograms(ctx, progress, []toolbox.Program{{Name: e.program, Package: "qemu-user-static"}}); err != nil {
		return nil, err
	}
	if _, err := os.Stat(filepath.Join(binfmt, "register")); errors.Is(err, fs.ErrNotExist) {
		if err := unix.Mount("none", binfmt, "binfmt_misc", 0, ""); err != nil {
			return nil, fmt.Errorf("images of %s are built under emulation, which takes root and a kernel with binfmt_misc: mount %s: %w", goarch, binfmt, err)
		}
	}
	// Another run uses the same entry, and only the last one removes it.
	unlock, err := toolbox.Lock(ctx, filepath.Join(os.TempDir(), "evenkeel-emulate.lock"), func() {
		fmt.Fprintln(progress, "waiting: another run builds images of another processor")
	})
	if err != nil {
		return nil, err
	}
	for _, name := range []string{"qemu-aarch64", "qemu-x86_64"} { // those of the distribution
		if _, err := os.Stat(filepath.Join(binfmt, name)); err == nil && name+"-static" == e.program {
			return unlock, nil
		}
	}
	entry := "evenkeel-" + goarch
	// A killed run may have left it.
	remove := func() error {
		err := tellKernel(entry, "-1")
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	if err := remove(); err != nil {
		unlock()
		return nil, fmt.Errorf("remove the emulator of an earlier run: %w", err)
	}
	// F opens the emulator now, so that it needs not be in other root file systems.
	line := fmt.Sprintf(":%s:M::%s:%s:/usr/bin/%s:F", entry, e.magic, e.mask, e.program)
	if err := tellKernel("register", line); err != nil {
		unlock()
		return nil, fmt.Errorf("register %s for binaries of %s: %w", e.program, goarch, err)
	}
	return func() {
		if err := remove(); err != nil {
			fmt.Fprintf(progress, "the emulator %s is still registered: %v\n", entry, err)
		}
		unlock()
	}, nil
}

// tellKernel writes into a file of binfmt_misc, which is not made if it is missing.
func tellKernel(file, text string) error {
	f, err := os.OpenFile(filepath.Join(binfmt, file), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}
