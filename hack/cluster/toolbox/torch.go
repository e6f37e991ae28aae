package toolbox

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

const (
	// torchVersion is the version of PyTorch for tests and benchmarks.
	torchVersion = "2.15.0"
	// torchNumpyVersion is the version of numpy beside it.
	torchNumpyVersion = "2.4.6"
	// torchftVersion is the version of torchft beside it.
	torchftVersion = "0.2.0"
	// expecttestVersion is the version of a package that PyTorch's own tests import.
	expecttestVersion = "0.3.0"
)

// TorchEnvironment returns a Python with PyTorch and torchft, which is installed into the cache the first time, and a new folder
// with the package of the wheel and what PyTorch's own tests need, for PYTHONPATH. The caller removes the folder. So
// the cached environment stays what it is.
func TorchEnvironment(ctx context.Context, progress io.Writer, wheel string) (python, dir string, err error) {
	python, err = PythonTool(ctx, progress, "torch", torchVersion, "python", "numpy=="+torchNumpyVersion, "torchft=="+torchftVersion)
	if err != nil {
		return "", "", err
	}
	tests, err := PythonTool(ctx, progress, "expecttest", expecttestVersion, "python")
	if err != nil {
		return "", "", err
	}
	dir, err = os.MkdirTemp("", "evenkeel-torch-")
	if err != nil {
		return "", "", fmt.Errorf("folder for the package: %w", err)
	}
	if err := copyPackage(ctx, tests, "expecttest", dir); err != nil {
		_ = os.RemoveAll(dir)
		return "", "", err
	}
	install := exec.CommandContext(ctx, python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", dir, wheel)
	if out, err := install.CombinedOutput(); err != nil {
		_ = os.RemoveAll(dir)
		return "", "", fmt.Errorf("%s: %w\n%s", install, err, lastLines(string(out), 20))
	}
	return python, dir, nil
}

// copyPackage copies a package that a Python can import into a folder.
func copyPackage(ctx context.Context, python, name, dir string) error {
	locate := exec.CommandContext(ctx, python, "-c", "import os, sys; print(os.path.dirname(__import__(sys.argv[1]).__file__))", name)
	out, err := locate.Output()
	if err != nil {
		return fmt.Errorf("find package %s: %w", name, err)
	}
	if err := os.CopyFS(filepath.Join(dir, name), os.DirFS(strings.TrimSpace(string(out)))); err != nil {
		return fmt.Errorf("copy package %s: %w", name, err)
	}
	return nil
}
