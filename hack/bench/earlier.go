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
type earlier struct {
	file  string
	cases []caseResult
}

// readEarlier reads what there is. What cannot be read, or is of another
// machine, is as good as nothing: it is measured again.
func readEarlier(m machine, o options) (*earlier, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return nil, fmt.Errorf("results of before: %w", err)
	}
	length := "full"
	if o.quick {
		length = "quick"
	}
	e := &earlier{file: filepath.Join(cache, "evenkeel", "bench", "tcp-"+length+".json")}
	text, err := os.ReadFile(e.file)
	if errors.Is(err, fs.ErrNotExist) {
		return e, nil
	} else if err != nil {
		return nil, fmt.Errorf("results of before: %w", err)
	}
	var all []caseResult
	if json.Unmarshal(text, &all) != nil {
		return e, nil
	}
	for _, result := range all {
		known := slices.IndexFunc(cases(o.quick), func(c benchCase) bool { return c.name == result.Name })
		if known < 0 || !result.Machine.is(m) {
			continue
		}
		lab := result.Lab
		result.Case = cases(o.quick)[known]
		result.Case.lab = lab
		e.cases = append(e.cases, result)
	}
	return e, nil
}

// add puts a result in place of an earlier one, and keeps it.
func (e *earlier) add(result caseResult) error {
	result.Name, result.Lab = result.Case.name, result.Case.lab
	e.cases = slices.DeleteFunc(e.cases, func(old caseResult) bool { return old.Name == result.Name })
	e.cases = append(e.cases, result)
	order := caseNames()
	slices.SortFunc(e.cases, func(a, b caseResult) int { return slices.Index(order, a.Name) - slices.Index(order, b.Name) })
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
