// Package install copies a folder of libraries so that a reader sees each file whole or not at all.
package install

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
)

// pythonFolder is the subfolder with the Python package.
const pythonFolder = "python"

// Copy copies the regular files of src, and what lies below its subfolder python, into dst and returns their names. It leaves other
// subfolders out, and makes dst and its parents. A link is followed when it stays inside its folder, and is an error when it leads out.
// Every file appears in dst by a rename, so a copy that was cut short and started again leaves no half-written library behind.
func Copy(ctx context.Context, src, dst string) ([]string, error) {
	from, err := os.OpenRoot(src)
	if err != nil {
		return nil, fmt.Errorf("source folder: %w", err)
	}
	defer from.Close()
	if err := os.MkdirAll(dst, 0o755); err != nil {
		return nil, fmt.Errorf("target folder: %w", err)
	}
	to, err := os.OpenRoot(dst)
	if err != nil {
		return nil, fmt.Errorf("target folder: %w", err)
	}
	defer to.Close()

	names, err := copyFolder(ctx, from, to, func(folder string) bool { return folder == pythonFolder })
	if err != nil {
		return nil, fmt.Errorf("copy %s to %s: %w", src, dst, err)
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("%s has no files: the plugin image keeps its libraries elsewhere, set the profile's plugin.path to that folder", src)
	}
	slices.Sort(names)
	return names, nil
}

// copyFolder copies the regular files of a folder, and the subfolders that are wanted with all that is below them.
func copyFolder(ctx context.Context, from, to *os.Root, wanted func(folder string) bool) ([]string, error) {
	entries, err := fs.ReadDir(from.FS(), ".")
	if err != nil {
		return nil, fmt.Errorf("list: %w", err)
	}
	var names []string
	for _, entry := range entries {
		name := entry.Name()
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("stopped: %w", err)
		}
		if entry.IsDir() {
			if !wanted(name) {
				continue
			}
			below, err := copySubfolder(ctx, from, to, name)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
			for _, file := range below {
				names = append(names, path.Join(name, file))
			}
			continue
		}
		copied, err := copyFile(from, to, name)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		if copied {
			names = append(names, name)
		}
	}
	return names, nil
}

// copySubfolder copies a subfolder with all that is below it.
func copySubfolder(ctx context.Context, from, to *os.Root, name string) ([]string, error) {
	inner, err := from.OpenRoot(name)
	if err != nil {
		return nil, err
	}
	defer inner.Close()
	if err := to.MkdirAll(name, 0o755); err != nil {
		return nil, err
	}
	// The training container runs as another user, and the mask here is not ours to trust.
	if err := to.Chmod(name, 0o755); err != nil {
		return nil, err
	}
	target, err := to.OpenRoot(name)
	if err != nil {
		return nil, err
	}
	defer target.Close()
	return copyFolder(ctx, inner, target, func(string) bool { return true })
}

// copyFile reports whether name is a regular file, and so was copied.
func copyFile(from, to *os.Root, name string) (copied bool, err error) {
	info, err := from.Stat(name) // before opening: opening a pipe would block
	if err != nil {
		return false, err
	}
	if !info.Mode().IsRegular() {
		return false, nil
	}
	source, err := from.Open(name)
	if err != nil {
		return false, err
	}
	defer source.Close()

	temporary := "." + name + ".partial"
	// One that a killed run left may be in the way; it is ours alone.
	if err := to.Remove(temporary); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	target, err := to.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_EXCL, info.Mode().Perm())
	if err != nil {
		return false, err
	}
	defer func() {
		if err != nil {
			_ = target.Close() // the error that led here says more
			err = errors.Join(err, to.Remove(temporary))
		}
	}()
	if _, err := io.Copy(target, source); err != nil {
		return false, err
	}
	// The training container runs as another user, and the mask here is not ours to trust.
	if err := target.Chmod(info.Mode().Perm() | 0o444); err != nil {
		return false, err
	}
	if err := target.Close(); err != nil {
		return false, err
	}
	return true, to.Rename(temporary, name)
}
