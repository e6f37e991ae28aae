package toolbox

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
)

const (
	// torchVersion is the version of PyTorch for tests and benchmarks.
	torchVersion = "2.15.0"
	// torchNumpyVersion is the version of numpy beside it.
	torchNumpyVersion = "2.4.6"
)

// TorchEnvironment returns a Python with PyTorch, which is installed into the cache the first time, and a new folder with the package
// of the wheel, for PYTHONPATH. The caller removes the folder. So the cached environment stays what it is.
func TorchEnvironment(ctx context.Context, progress io.Writer, wheel string) (python, dir string, err error) {
	python, err = PythonTool(ctx, progress, "torch", torchVersion, "python", "numpy=="+torchNumpyVersion)
	if err != nil {
		return "", "", err
	}
	dir, err = os.MkdirTemp("", "evenkeel-torch-")
	if err != nil {
		return "", "", fmt.Errorf("folder for the package: %w", err)
	}
	install := exec.CommandContext(ctx, python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", dir, wheel)
	if out, err := install.CombinedOutput(); err != nil {
		_ = os.RemoveAll(dir)
		return "", "", fmt.Errorf("%s: %w\n%s", install, err, lastLines(string(out), 20))
	}
	return python, dir, nil
}
