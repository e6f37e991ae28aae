// Package resultcache keeps results between runs, so that cases can be measured a few at a time. The files are in
// $XDG_CACHE_HOME/evenkeel/bench (or ~/.cache/evenkeel/bench).
package resultcache

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
)

// A Cache has the results of earlier runs on this machine with the same options.
type Cache[T any] struct {
	// Results are in the order of the names that Open was given.
	Results []T

	file  string
	name  func(T) string
	order []string
}

// Open reads the cached results of a kind. A result that cannot be read is left out, and so is one that usable rejects;
// usable may also complete it.
func Open[T any](kind string, quick bool, order []string, name func(T) string, usable func(*T) bool) (*Cache[T], error) {
	folder, err := os.UserCacheDir()
	if err != nil {
		return nil, fmt.Errorf("cached results: %w", err)
	}
	length := "full"
	if quick {
		length = "quick"
	}
	c := &Cache[T]{file: filepath.Join(folder, "evenkeel", "bench", kind+"-"+length+".json"), name: name, order: order}
	text, err := os.ReadFile(c.file)
	if errors.Is(err, fs.ErrNotExist) {
		return c, nil
	} else if err != nil {
		return nil, fmt.Errorf("cached results: %w", err)
	}
	var all []T
	if json.Unmarshal(text, &all) != nil {
		return c, nil
	}
	for _, result := range all {
		if usable(&result) {
			c.Results = append(c.Results, result)
		}
	}
	return c, nil
}

// Add puts a result in place of an earlier one of its name, and writes the file.
func (c *Cache[T]) Add(result T) error {
	c.Results = slices.DeleteFunc(c.Results, func(old T) bool { return c.name(old) == c.name(result) })
	c.Results = append(c.Results, result)
	slices.SortFunc(c.Results, func(a, b T) int {
		return slices.Index(c.order, c.name(a)) - slices.Index(c.order, c.name(b))
	})
	text, err := json.Marshal(c.Results)
	if err == nil {
		err = os.MkdirAll(filepath.Dir(c.file), 0o755)
	}
	if err == nil {
		err = os.WriteFile(c.file+".new", text, 0o644)
	}
	if err == nil {
		err = os.Rename(c.file+".new", c.file)
	}
	if err != nil {
		return fmt.Errorf("cache the results: %w", err)
	}
	return nil
}
