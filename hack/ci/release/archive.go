package main

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// A member is a file of an archive: its name there, its permissions, and the file that it is read from.
type member struct {
	name string
	mode int64
	from string
}

// writeTarball writes a compressed archive whose bytes depend on the names, permissions and contents of its members alone.
func writeTarball(to string, made time.Time, members ...member) error {
	return writeFile(to, func(out io.Writer) error {
		compressed, err := gzip.NewWriterLevel(out, gzip.BestCompression)
		if err != nil {
			return err
		}
		if err := writeTar(compressed, made, members); err != nil {
			return err
		}
		return compressed.Close()
	})
}

// writeTarFile writes such an archive, uncompressed.
func writeTarFile(to string, made time.Time, members []member) error {
	return writeFile(to, func(out io.Writer) error { return writeTar(out, made, members) })
}

func writeFile(to string, write func(io.Writer) error) error {
	out, err := os.Create(to)
	if err != nil {
		return fmt.Errorf("archive: %w", err)
	}
	if err := errors.Join(write(out), out.Close()); err != nil {
		return fmt.Errorf("archive %s: %w", to, err)
	}
	return nil
}

func writeTar(to io.Writer, made time.Time, members []member) error {
	members = slices.Clone(members)
	slices.SortFunc(members, func(a, b member) int { return strings.Compare(a.name, b.name) })
	w := tar.NewWriter(to)
	for _, m := range members {
		if err := addFile(w, made, m); err != nil {
			return err
		}
	}
	return w.Close()
}

func addFile(w *tar.Writer, made time.Time, m member) error {
	in, err := os.Open(m.from)
	if err != nil {
		return err
	}
	defer in.Close()
	info, err := in.Stat()
	if err != nil {
		return err
	}
	header := &tar.Header{Typeflag: tar.TypeReg, Name: m.name, Mode: m.mode, Size: info.Size(), ModTime: made.Truncate(time.Second), Format: tar.FormatPAX}
	if err := w.WriteHeader(header); err != nil {
		return err
	}
	_, err = io.Copy(w, in)
	return err
}

// filesBelow are the regular files below a folder as members of an archive, under a name.
func filesBelow(folder, under string) ([]member, error) {
	var members []member
	err := filepath.WalkDir(folder, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		if !entry.Type().IsRegular() {
			return errors.New(path + " is neither a file nor a folder")
		}
		name, err := filepath.Rel(folder, path)
		if err != nil {
			return err
		}
		members = append(members, member{filepath.ToSlash(filepath.Join(under, name)), 0o644, path})
		return nil
	})
	return members, err
}
