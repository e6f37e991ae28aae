package toolbox

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

const cargoTimeout = 30 * time.Minute

// CargoTool returns the path of the program of a crate that has the crate's name, such as cargo-deny. It is built once,
// with the dependencies of the crate's own lock file, and kept in the cache.
func CargoTool(ctx context.Context, progress io.Writer, crate, version string) (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("cache: %w", err)
	}
	dir := filepath.Join(cache, "evenkeel", "tools", crate+"-"+version)
	program := filepath.Join(dir, "bin", crate)
	unlock, err := Lock(ctx, dir+".lock", func() { fmt.Fprintf(progress, "waiting for %s, which is being built\n", crate) })
	if err != nil {
		return "", err
	}
	defer unlock()
	// cargo moves it there when it is whole.
	if exists(program) {
		return program, nil
	}
	fmt.Fprintf(progress, "building %s %s (a few minutes the first time)\n", crate, version)
	ctx, cancel := context.WithTimeout(ctx, cargoTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "cargo", "install", "--locked", "--root", dir, crate+"@"+version)
	// Outside of any workspace, so that its settings do not apply.
	cmd.Dir = os.TempDir()
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("cargo install %s %s: %w\n%s", crate, version, err, lastLines(string(out), 20))
	}
	return program, nil
}
