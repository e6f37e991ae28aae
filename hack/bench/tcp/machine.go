package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// busyLoad is the load average above which a machine counts as not quiet.
const busyLoad = 0.5

// A machine is what results depend on.
type machine struct {
	Cores     int
	Processor string
	Kernel    string
	Load      float64 // mean of the last minute
}

// is reports whether figures of both can stand beside each other.
func (m machine) is(other machine) bool {
	m.Load, other.Load = 0, 0
	return m == other
}

func describeMachine() machine {
	m := machine{Cores: runtime.NumCPU(), Processor: "unknown processor", Kernel: "unknown kernel"}
	if text, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(text)) {
			if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == "model name" {
				m.Processor = strings.TrimSpace(value)
				break
			}
		}
	}
	var name unix.Utsname
	if unix.Uname(&name) == nil {
		m.Kernel = fmt.Sprintf("%s %s", unix.ByteSliceToString(name.Sysname[:]), unix.ByteSliceToString(name.Release[:]))
	}
	if text, err := os.ReadFile("/proc/loadavg"); err == nil {
		if first, _, ok := strings.Cut(string(text), " "); ok {
			m.Load, _ = strconv.ParseFloat(first, 64)
		}
	}
	return m
}

// ticks is how long all processors together have been idle, and in all.
type ticks struct{ idle, all float64 }

func readTicks() ticks {
	file, err := os.Open("/proc/stat")
	if err != nil {
		return ticks{}
	}
	defer file.Close()
	line, _ := bufio.NewReader(file).ReadString('\n')
	var t ticks
	for i, field := range strings.Fields(line) {
		n, err := strconv.ParseFloat(field, 64)
		if err != nil || i > 8 {
			continue // the heading, and guests, which count as user time already
		}
		t.all += n
		if i == 4 || i == 5 { // idle, and waiting for a disk
			t.idle += n
		}
	}
	return t
}

// busySince is the share of the processors' time that was used.
func (t ticks) busySince() float64 {
	now := readTicks()
	if now.all <= t.all {
		return 0
	}
	return 1 - (now.idle-t.idle)/(now.all-t.all)
}

// buildMissing builds, from this checkout, the plugin and the driver that were not given.
func (o *options) buildMissing(ctx context.Context, root string) error {
	if o.library != "" && o.driver != "" {
		return nil
	}
	library, driver, err := build(ctx, root)
	if err != nil {
		return err
	}
	o.library, o.driver = cmp.Or(o.library, library), cmp.Or(o.driver, driver)
	return nil
}

// build builds the plugin and what drives it, optimised.
func build(ctx context.Context, root string) (library, driver string, err error) {
	dir := filepath.Join(root, "plugin")
	cmd := exec.CommandContext(ctx, "cargo", "build", "--release", "--locked", "-p", "evenkeel-nccl-plugin", "-p", "evenkeel-bench", "-p", "evenkeel-reduction-server")
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, os.Stderr, os.Stderr
	if err := cmd.Run(); err != nil {
		return "", "", fmt.Errorf("cargo build: %w", err)
	}
	cmd = exec.CommandContext(ctx, "cargo", "metadata", "--locked", "--no-deps", "--format-version", "1")
	cmd.Dir = dir
	text, err := cmd.Output()
	if err != nil {
		return "", "", fmt.Errorf("cargo metadata: %w", err)
	}
	var metadata struct {
		TargetDirectory string `json:"target_directory"`
	}
	if err := json.Unmarshal(bytes.TrimSpace(text), &metadata); err != nil {
		return "", "", fmt.Errorf("cargo metadata: %w", err)
	}
	release := filepath.Join(metadata.TargetDirectory, "release")
	return filepath.Join(release, "libnccl_net_evenkeel.so"), filepath.Join(release, "evenkeel-bench"), nil
}
