package local

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// A state is the folder with all files of a cluster:
//
//	cluster.json      settings and the programs in use
//	supervisor.json   the owner of the running cluster
//	kubeconfig        for clients in the machine's own network
//	bin/ pki/ logs/   the program with the roles, keys, one log per process
//	etcd/ registry/   data
//	nodes/NAME/       a node's configuration and its /var
type state string

// stateRoot is the folder of all clusters' state folders.
func stateRoot() (string, error) {
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "evenkeel", "cluster"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("no folder for the cluster's state: %w", err)
	}
	return filepath.Join(home, ".local", "state", "evenkeel", "cluster"), nil
}

func stateOf(name string) (state, error) {
	if err := checkName(name); err != nil {
		return "", err
	}
	root, err := stateRoot()
	if err != nil {
		return "", err
	}
	return state(filepath.Join(root, name)), nil
}

func (s state) path(parts ...string) string {
	return filepath.Join(append([]string{string(s)}, parts...)...)
}

func (s state) kubeconfig() string { return s.path("kubeconfig") }
func (s state) logs() string       { return s.path("logs") }
func (s state) program() string    { return s.path("bin", "cluster") }
func (s state) cgroupList() string { return s.path("cgroups") }
func (s state) shared() string     { return s.path("shared") }
func (s state) lockFile() string   { return string(s) + ".lock" }

func (s state) node(name string, parts ...string) string {
	return s.path(append([]string{"nodes", name}, parts...)...)
}

// settings is the content of cluster.json: the configuration for the supervisor and the nodes.
type settings struct {
	Config Config
	Tools  tools
}

// tools are the folders of the programs the cluster runs.
type tools struct {
	Kubernetes, Etcd, Containerd, CoreDNS, Pause string
}

func (s state) settings() (settings, error) {
	var v settings
	return v, readJSON(s.path("cluster.json"), &v)
}

// An owner is the record of a running process. Its start time distinguishes it from a later process with the same PID.
type owner struct {
	PID   int
	Start uint64 // clock ticks since boot
	// Port on 127.0.0.1 where the supervisor forwards to the API server; zero
	// in a node's record.
	Port int
}

// self is the record of a process that runs now.
func processOwner(pid int) (owner, error) {
	start, err := processStart(pid)
	return owner{PID: pid, Start: start}, err
}

// alive reports whether the process still runs.
func (o owner) alive() bool {
	start, err := processStart(o.PID)
	return err == nil && start == o.Start
}

// processStart returns the start time of a process, in clock ticks since boot. A zombie counts as gone.
func processStart(pid int) (uint64, error) {
	if pid <= 0 {
		return 0, fmt.Errorf("process %d: %w", pid, fs.ErrNotExist)
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	return parseStat(string(text))
}

func parseStat(text string) (uint64, error) {
	// The command's name, in parentheses, may have any character, so fields count from its end.
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(fields) < 20 {
		return 0, fmt.Errorf("cannot read a process's stat line %q", text)
	}
	if fields[0] == "Z" || fields[0] == "X" {
		return 0, fmt.Errorf("process has exited: %w", fs.ErrNotExist)
	}
	return strconv.ParseUint(fields[19], 10, 64)
}

// supervisor returns the record of the cluster's supervisor; ok is false if there is none or it has exited.
func (s state) supervisor() (o owner, ok bool) {
	if readJSON(s.path("supervisor.json"), &o) != nil {
		return owner{}, false
	}
	return o, o.alive()
}

func readJSON(path string, v any) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, v); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// writeJSON replaces a file atomically.
func writeJSON(path string, v any) error {
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return writeFile(path, append(text, '\n'), 0o644)
}

// writeFile replaces a file atomically, creating its folder if needed.
func writeFile(path string, text []byte, mode fs.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	temporary := path + ".new"
	if err := os.WriteFile(temporary, text, mode); err != nil {
		return err
	}
	return os.Rename(temporary, path)
}

// poll calls check until it returns nil. It returns the last error at the timeout, and errStopped when it is stopped.
func poll(timeout, every time.Duration, stop <-chan struct{}, check func() error) error {
	deadline := time.Now().Add(timeout)
	for {
		err := check()
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("not within %s: %w", timeout, err)
		}
		select {
		case <-stop:
			return errors.Join(errStopped, err)
		case <-time.After(every):
		}
	}
}

var errStopped = errors.New("stopped")
