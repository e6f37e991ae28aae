package toolbox

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"
)

const downloadTimeout = 10 * time.Minute

// cached returns a folder of the cache. The first time, fill fills it, with another folder for its own files, which is
// removed. The folder gets its name at the end, so it is complete if it exists.
func cached(ctx context.Context, progress io.Writer, name string, fill func(work, dir string) error) (_ string, err error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("cache: %w", err)
	}
	dir := filepath.Join(cache, "evenkeel", "tools", name)
	unlock, err := Lock(ctx, dir+".lock", func() { fmt.Fprintf(progress, "waiting for %s, which another run makes\n", name) })
	if err != nil {
		return "", err
	}
	defer unlock()
	if exists(dir) {
		return dir, nil
	}
	work, err := os.MkdirTemp(filepath.Dir(dir), "."+name+"-")
	if err != nil {
		return "", fmt.Errorf("folder for %s: %w", name, err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	whole := filepath.Join(work, "whole")
	if err := os.Mkdir(whole, 0o755); err != nil {
		return "", err
	}
	if err := fill(work, whole); err != nil {
		return "", err
	}
	return dir, os.Rename(whole, dir)
}

// unpackSource unpacks an archive of Debian's sources with this SHA-256 digest into dir, without the folder that
// everything in it is in: all of it, or what matches the patterns.
func unpackSource(ctx context.Context, archive, digest, work, dir string, patterns ...string) error {
	mirror, err := debianMirror(ctx)
	if err != nil {
		return err
	}
	path := filepath.Join(work, "archive.tar.xz")
	if err := download(ctx, strings.TrimRight(mirror, "/")+"/"+archive, digest, path); err != nil {
		return err
	}
	_, err = programOutput(ctx, dir, "tar", append([]string{"-xJf", path, "--strip-components=1", "--wildcards"}, patterns...)...)
	return err
}

// download writes what a URL has to a new file, if it has this SHA-256 digest.
func download(ctx context.Context, url, digest, path string) error {
	ctx, cancel := context.WithTimeout(ctx, downloadTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return fmt.Errorf("download: %w", err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("download %s: %s", url, response.Status)
	}
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	sum := sha256.New()
	_, err = io.Copy(io.MultiWriter(file, sum), response.Body)
	if err := errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("download %s: %w", url, err)
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != digest {
		return fmt.Errorf("download %s: it has the SHA-256 digest %s, not %s", url, got, digest)
	}
	return nil
}
