package netns

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// folder has one record for each lab, so that other processes find it. A record may outlive its lab; alive tells.
const folder = "/run/evenkeel/netlab"

type record struct {
	Config     Config
	Namespaces map[Host]namespace
}

// alive reports whether the lab's owner still runs.
func (r record) alive() bool {
	for _, s := range r.Namespaces {
		if !s.exists() {
			return false
		}
	}
	return len(r.Namespaces) > 0
}

func (r record) owner() int { return r.Namespaces[H1].PID }

// remove removes the remains of a lab whose owner was killed: its programs, and the record.
func (r record) remove(ctx context.Context) error {
	var all []error
	for _, s := range r.Namespaces {
		all = append(all, s.endProcesses(ctx))
	}
	return errors.Join(append(all, removeRecord(r.Config.Name))...)
}

// endOwner terminates the owner, by SIGKILL if it does not exit in time, and removes the rest.
func (r record) endOwner(ctx context.Context) error {
	if r.alive() {
		if err := unix.Kill(r.owner(), unix.SIGTERM); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("end the lab's owner: %w", err)
		}
		orderly, cancel := context.WithTimeout(ctx, timeout/2)
		defer cancel()
		if r.awaitEnd(orderly) != nil {
			unix.Kill(r.owner(), unix.SIGKILL) // it may just have exited
			if err := r.awaitEnd(ctx); err != nil {
				return err
			}
		}
	}
	unlock, err := lockRecords(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	return r.remove(ctx)
}

func (r record) awaitEnd(ctx context.Context) error {
	return poll(ctx, func() error {
		if r.alive() {
			return fmt.Errorf("process %d, which owns lab %s, still runs", r.owner(), r.Config.Name)
		}
		return nil
	})
}

// Remove takes down the lab of that name, or removes its remains if its owner was killed. It is no error if there is
// none.
func Remove(ctx context.Context, name string) error {
	if !namePattern.MatchString(name) {
		return fmt.Errorf("lab name %q: lower-case letters, digits and dashes, at most 31", name)
	}
	r, err := readRecord(name)
	if isAbsent(err) {
		return nil
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("lab %s: not down within %s", name, timeout))
	defer cancel()
	return r.endOwner(ctx)
}

// List returns the names of all labs that have a record, up or not.
func List() ([]string, error) {
	files, err := filepath.Glob(filepath.Join(folder, "*.json"))
	if err != nil {
		return nil, err
	}
	var names []string
	for _, file := range files {
		names = append(names, strings.TrimSuffix(filepath.Base(file), ".json"))
	}
	return names, nil
}

func recordFile(name string) string { return filepath.Join(folder, name+".json") }

func readRecord(name string) (record, error) {
	text, err := os.ReadFile(recordFile(name))
	if err != nil {
		return record{}, err
	}
	var r record
	if err := json.Unmarshal(text, &r); err != nil {
		return record{}, fmt.Errorf("%s: %w", recordFile(name), err)
	}
	return r, nil
}

// writeRecord replaces a record atomically.
func writeRecord(r record) error {
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	temporary := recordFile(r.Config.Name) + ".new"
	if err := os.WriteFile(temporary, append(text, '\n'), 0o644); err != nil {
		return err
	}
	return os.Rename(temporary, recordFile(r.Config.Name))
}

func removeRecord(name string) error {
	if err := os.Remove(recordFile(name)); !isAbsent(err) {
		return err
	}
	return nil
}

// lockRecords prevents two processes from creating or removing labs at the same time.
func lockRecords(ctx context.Context) (unlock func(), err error) {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return nil, err
	}
	dir, err := os.Open(folder)
	if err != nil {
		return nil, err
	}
	err = poll(ctx, func() error { return unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB) })
	if err != nil {
		dir.Close()
		return nil, fmt.Errorf("another process creates or removes a lab: %w", err)
	}
	return func() { dir.Close() }, nil
}
