package toolbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

const aptTimeout = 10 * time.Minute

// A Program is a program or file of a Debian package, by its name on the search path or by an absolute path.
type Program struct {
	Name    string // "runc", or "/usr/lib/cni/bridge"
	Package string // Debian's package that has it
}

// EnsurePrograms installs the Debian packages of programs that the machine lacks, and reports which. Where it cannot
// (not Debian, not root, no package source), the error names the packages to install by hand.
func EnsurePrograms(ctx context.Context, progress io.Writer, programs []Program) error {
	if len(missing(programs)) == 0 {
		return nil
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return fmt.Errorf("cache: %w", err)
	}
	unlock, err := Lock(ctx, filepath.Join(cache, "evenkeel", "tools", "apt.lock"), func() {})
	if err != nil {
		return err
	}
	defer unlock()
	absent := missing(programs)
	if len(absent) == 0 {
		return nil // another run has installed them meanwhile
	}
	list := strings.Join(absent, " ")
	byHand := fmt.Sprintf("install them by hand and run this again: apt-get install --no-install-recommends %s", list)
	if _, err := exec.LookPath("apt-get"); err != nil {
		return fmt.Errorf("this machine lacks programs of the Debian packages %s and has no apt-get: install what provides them and run this again", list)
	}
	if os.Geteuid() != 0 {
		return fmt.Errorf("missing Debian packages: %s; only root can install them; %s", list, byHand)
	}
	fmt.Fprintf(progress, "installing Debian packages: %s\n", list)
	restore, err := forbidServiceStart()
	if err != nil {
		return err
	}
	defer restore()
	ctx, cancel := context.WithTimeout(ctx, aptTimeout)
	defer cancel()
	for _, args := range [][]string{
		{"update"},
		append([]string{"install", "-y", "--no-install-recommends"}, absent...),
	} {
		cmd := exec.CommandContext(ctx, "apt-get", append([]string{"-q", "-o", "DPkg::Lock::Timeout=300"}, args...)...)
		cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
		if output, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("apt-get %s: %w\n%s\n%s", args[0], err, lastLines(string(output), 10), byHand)
		}
	}
	if still := missing(programs); len(still) > 0 {
		return fmt.Errorf("after apt-get install, programs of these packages are still missing: %s", strings.Join(still, " "))
	}
	return nil
}

// missing returns the packages of the missing programs, sorted.
func missing(programs []Program) []string {
	var packages []string
	for _, p := range programs {
		var err error
		if filepath.IsAbs(p.Name) {
			_, err = os.Stat(p.Name)
		} else {
			_, err = exec.LookPath(p.Name)
		}
		if err != nil {
			packages = append(packages, p.Package)
		}
	}
	slices.Sort(packages)
	return slices.Compact(packages)
}

// forbidServiceStart prevents package installation from starting services, such as docker-registry's, until the
// returned function is called. It does not change a policy that the machine already has.
func forbidServiceStart() (restore func(), err error) {
	const policy = "/usr/sbin/policy-rc.d"
	file, err := os.OpenFile(policy, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755)
	if errors.Is(err, fs.ErrExist) {
		return func() {}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("prevent packages from starting services: %w", err)
	}
	restore = func() { os.Remove(policy) }
	// 101 is "action forbidden by policy".
	if _, err := file.WriteString("#!/bin/sh\nexit 101\n"); err != nil {
		file.Close()
		restore()
		return nil, fmt.Errorf("prevent packages from starting services: %w", err)
	}
	return restore, file.Close()
}
