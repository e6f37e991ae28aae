package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
)

// earlier is what was measured before on this machine with the same options,
// so that cases can be measured a few at a time. It lies in
// $XDG_CACHE_HOME/evenkeel/bench (or ~/.cache/evenkeel/bench).
type earlier[T any] struct {
	file  string
	cases []T
	name  func(T) string
	order []string
}

// readEarlier reads what there is of a kind. What cannot be read, or of which
// usable, which may complete it, says no, is as good as nothing: it is measured
// again. Cases are in the order of the names.
func readEarlier[T any](kind string, o options, order []string, name func(T) string, usable func(*T) bool) (*earlier[T], error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return nil, fmt.Errorf("results of before: %w", err)
	}
	length := "full"
	if o.quick {
		length = "quick"
	}
	e := &earlier[T]{file: filepath.Join(cache, "evenkeel", "bench", kind+"-"+length+".json"), name: name, order: order}
	text, err := os.ReadFile(e.file)
	if errors.Is(err, fs.ErrNotExist) {
		return e, nil
	} else if err != nil {
		return nil, fmt.Errorf("results of before: %w", err)
	}
	var all []T
	if json.Unmarshal(text, &all) != nil {
		return e, nil
	}
	for _, result := range all {
		if usable(&result) {
			e.cases = append(e.cases, result)
		}
	}
	return e, nil
}

// readEarlierTCP reads the cases of docs/results/tcp.md.
func readEarlierTCP(m machine, o options) (*earlier[caseResult], error) {
	name := func(r caseResult) string { return r.Name }
	return readEarlier("tcp", o, caseNames(), name, func(r *caseResult) bool {
		known := slices.IndexFunc(cases(o.quick), func(c benchCase) bool { return c.name == r.Name })
		if known < 0 || !r.Machine.is(m) {
			return false
		}
		r.Case = cases(o.quick)[known]
		r.Case.lab = r.Lab
		return true
	})
}

// add puts a result in place of an earlier one, and keeps it.
func (e *earlier[T]) add(result T) error {
	e.cases = slices.DeleteFunc(e.cases, func(old T) bool { return e.name(old) == e.name(result) })
	e.cases = append(e.cases, result)
	slices.SortFunc(e.cases, func(a, b T) int {
		return slices.Index(e.order, e.name(a)) - slices.Index(e.order, e.name(b))
	})
	text, err := json.Marshal(e.cases)
	if err != nil {
		return fmt.Errorf("keep the results: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(e.file), 0o755); err != nil {
		return fmt.Errorf("keep the results: %w", err)
	}
	if err := os.WriteFile(e.file+".new", text, 0o644); err != nil {
		return fmt.Errorf("keep the results: %w", err)
	}
	if err := os.Rename(e.file+".new", e.file); err != nil {
		return fmt.Errorf("keep the results: %w", err)
	}
	return nil
}
