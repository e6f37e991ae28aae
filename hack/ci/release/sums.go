package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// writeSums writes the checksums of all files of a folder into one, as sha256sum does.
func writeSums(folder string) error {
	sums, err := sumsOf(folder)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(folder, sumsFile), []byte(sums), 0o644); err != nil {
		return fmt.Errorf("checksums: %w", err)
	}
	return nil
}

// sumsOf is a line for each file of a folder, sorted by name, without the file of checksums itself and its signature.
func sumsOf(folder string) (string, error) {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return "", fmt.Errorf("checksums: %w", err)
	}
	var lines strings.Builder
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), sumsFile) || e.Name() == publicKeyFile {
			continue
		}
		sum, err := sumOf(filepath.Join(folder, e.Name()))
		if err != nil {
			return "", err
		}
		fmt.Fprintf(&lines, "%s  %s\n", sum, e.Name())
	}
	return lines.String(), nil
}
