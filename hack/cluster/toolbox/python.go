package toolbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

const pipTimeout = 10 * time.Minute

// Python makes sure that python3 is 3.11 or later and can make virtual environments.
func Python(ctx context.Context, progress io.Writer) error {
	try := func() error {
		out, err := exec.CommandContext(ctx, "python3", "-c", "import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))").CombinedOutput()
		if err != nil {
			return fmt.Errorf("python3 of at least 3.11 with venv and ensurepip is needed: %w\n%s", err, out)
		}
		return nil
	}
	if try() == nil {
		return nil
	}
	// dpkg's file lists, as no program of the packages has the same name in every release.
	programs := []Program{{Name: "python3", Package: "python3"}, {Name: "/var/lib/dpkg/info/python3-venv.list", Package: "python3-venv"}}
	if err := EnsurePrograms(ctx, progress, programs); err != nil {
		return err
	}
	return try()
}

// PythonTool returns the path of a program of a PyPI package. It is installed into a virtual environment in the cache,
// together with the packages of with, as in pip ("NAME==VERSION").
func PythonTool(ctx context.Context, progress io.Writer, pkg, version, program string, with ...string) (string, error) {
	if err := Python(ctx, progress); err != nil {
		return "", err
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("cache: %w", err)
	}
	dir := filepath.Join(cache, "evenkeel", "tools", strings.ReplaceAll(strings.Join(append([]string{pkg + "-" + version}, with...), "+"), "==", "-"))
	unlock, err := Lock(ctx, dir+".lock", func() { fmt.Fprintf(progress, "waiting for %s, which is being installed\n", pkg) })
	if err != nil {
		return "", err
	}
	defer unlock()
	// Written last, so that an interrupted installation is repeated.
	whole := filepath.Join(dir, "whole")
	if _, err := os.Stat(whole); err != nil {
		fmt.Fprintf(progress, "installing %s %s\n", pkg, version)
		if _, err := PythonEnvironment(ctx, dir, append([]string{pkg + "==" + version}, with...)...); err != nil {
			return "", err
		}
		if err := os.WriteFile(whole, nil, 0o644); err != nil {
			return "", fmt.Errorf("install %s: %w", pkg, err)
		}
	}
	return filepath.Join(dir, "bin", program), nil
}

// PythonEnvironment creates a virtual environment in dir, which it empties first, with these packages, and returns the
// path of its Python.
func PythonEnvironment(ctx context.Context, dir string, packages ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, pipTimeout)
	defer cancel()
	python := filepath.Join(dir, "bin", "python")
	install := append([]string{"-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"}, packages...)
	for _, cmd := range []*exec.Cmd{
		exec.CommandContext(ctx, "python3", "-m", "venv", "--clear", dir),
		exec.CommandContext(ctx, python, install...),
	} {
		if out, err := cmd.CombinedOutput(); err != nil {
			if ctx.Err() != nil {
				err = errors.Join(err, context.Cause(ctx))
			}
			return "", fmt.Errorf("%s: %w\n%s", cmd, err, lastLines(string(out), 20))
		}
	}
	return python, nil
}
