package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
)

// wheels builds the Python package for every platform.
func (r *release) wheels(ctx context.Context) error {
	work, err := os.MkdirTemp(filepath.Join(r.root, "dist"), "release-")
	if err != nil {
		return fmt.Errorf("wheels: %w", err)
	}
	defer os.RemoveAll(work)
	for _, platform := range r.platforms {
		r.report("building the wheel for %s", platform)
		wheel, err := r.builder(platform).Wheel(ctx, r.root, filepath.Join(work, arch(platform)))
		if err != nil {
			return err
		}
		if err := os.Rename(wheel, filepath.Join(r.folder, filepath.Base(wheel))); err != nil {
			return fmt.Errorf("wheels: %w", err)
		}
	}
	return nil
}
