package vm

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestInvalidConfigIsRejected(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	good := Config{Dir: dir, Command: []string{"true"}}
	for want, change := range map[string]func(*Config){
		"":                  func(*Config) {},
		"one of":            func(c *Config) { c.Topology = "ring" },
		"no command":        func(c *Config) { c.Command = nil },
		"NUL":               func(c *Config) { c.Command = []string{"a\x00b"} },
		"at least 1s":       func(c *Config) { c.Timeout = time.Millisecond },
		"from 1 to 64":      func(c *Config) { c.CPUs = 65 },
		"at least 512":      func(c *Config) { c.Memory = 1 },
		"no such file":      func(c *Config) { c.Dir = filepath.Join(dir, "absent") },
		"not a folder":      func(c *Config) { c.Share = file },
		"folder elsewhere":  func(c *Config) { c.Share = "/" },
		"share a folder":    func(c *Config) { c.Share = "/dev" },
		"without commas":    func(c *Config) { c.Share = filepath.Join(dir, "a,b") },
		"working folder: ":  func(c *Config) { c.Dir = filepath.Join(file, "below") },
		"shared folder: ":   func(c *Config) { c.Share = filepath.Join(dir, "absent") },
		"processors: from ": func(c *Config) { c.CPUs = -1 },
	} {
		c := good
		change(&c)
		if strings.Contains(c.Share, ",") {
			if err := os.Mkdir(c.Share, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		c, err := c.withDefaults()
		switch {
		case want == "" && (err != nil || c.Topology != Pair || c.Share != c.Dir || c.Timeout != DefaultTimeout):
			t.Errorf("%+v, %v", c, err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n")):
			t.Errorf("want %q: %v", want, err)
		}
	}
}

func TestCommandIsQuoted(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "it's a $(folder)")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	script := commandScript(Config{
		Topology: Hosts, Dir: dir, Env: []string{"PATH=" + os.Getenv("PATH"), "A=1 '2' \"3\"\n$4"},
		Command: []string{"sh", "-c", `pwd; echo "$A"; echo "$0$1"; echo $` + TopologyVariable, "two\nlines", "*"},
	})
	out, err := exec.CommandContext(t.Context(), "bash", "-c", script).CombinedOutput()
	if want := dir + "\n1 '2' \"3\"\n$4\ntwo\nlines*\nhosts\n"; err != nil || string(out) != want {
		t.Errorf("%q %v, want %q", out, err, want)
	}
	program := filepath.Join(dir, "a=b")
	if err := os.WriteFile(program, []byte("#!/bin/sh\nexit 7\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "bash", "-c", commandScript(Config{Dir: dir, Env: os.Environ(), Command: []string{program}}))
	if cmd.Run(); cmd.ProcessState.ExitCode() != 7 {
		t.Errorf("a program with = in its name: %s", cmd.ProcessState)
	}
}

func TestInitramfsIsReadByCpio(t *testing.T) {
	cpio, err := exec.LookPath("cpio")
	if err != nil {
		if cpio, err = exec.LookPath("busybox"); err != nil {
			t.Skip("neither cpio nor busybox is installed")
		}
	}
	var a archive
	a.folder("bin")
	for size := range 6 {
		a.file(fmt.Sprintf("bin/%s", strings.Repeat("x", size+1)), bytes.Repeat([]byte{'y'}, size))
	}
	args := []string{"-idm", "--quiet"}
	if filepath.Base(cpio) == "busybox" {
		args = []string{"cpio", "-idm"}
	}
	cmd := exec.CommandContext(t.Context(), cpio, args...)
	cmd.Dir, cmd.Stdin = t.TempDir(), bytes.NewReader(a.bytes())
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for size := range 6 {
		path := filepath.Join(cmd.Dir, "bin", strings.Repeat("x", size+1))
		content, err := os.ReadFile(path)
		if err != nil || string(content) != strings.Repeat("y", size) {
			t.Errorf("%s: %q %v", path, content, err)
		}
		if info, err := os.Stat(path); err == nil && info.Mode() != 0o755 {
			t.Errorf("%s: %s", path, info.Mode())
		}
	}
}

func TestKernelVersionsThatSeparateHosts(t *testing.T) {
	for version, want := range map[string]bool{"7.2.12+deb13-amd64": true, "7.10.1": true, "8.0.1": true, "7.1.9": false, "6.12.95+deb12-amd64": false, "unknown": false} {
		if got := (kernel{version: version}).separatesHosts(); got != want {
			t.Errorf("%s: %t", version, got)
		}
	}
}

func TestTailKeepsTheEnd(t *testing.T) {
	keep := &tail{limit: 5}
	for _, text := range []string{"abc", "", "defgh", "ij"} {
		if n, err := keep.Write([]byte(text)); n != len(text) || err != nil {
			t.Errorf("%q: %d %v", text, n, err)
		}
	}
	if keep.String() != "fghij" {
		t.Errorf("%q", keep)
	}
}
