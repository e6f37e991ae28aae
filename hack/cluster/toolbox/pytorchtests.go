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

const (
	// pytorchTestsVersion is that of PyTorch's sources in Debian 13, whose tests of torch.distributed are run. The packages of PyTorch on
	// PyPI have none. Later versions run them too: where one does not, the test fails with Gloo as well.
	pytorchTestsVersion = "2.6.0"
	pytorchTestsArchive = "pool/main/p/pytorch/pytorch_" + pytorchTestsVersion + "+dfsg.orig.tar.xz"
	pytorchTestsSHA256  = "099a9601bc40d67656e75735c44abedb0fbe92d08817852ab7472eebb7e6ddff"
	downloadTimeout     = 10 * time.Minute
)

// PyTorchTests returns the folder test/distributed of PyTorch's sources. It is in the cache, and comes from Debian the first time.
func PyTorchTests(ctx context.Context, progress io.Writer) (_ string, err error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("cache: %w", err)
	}
	dir := filepath.Join(cache, "evenkeel", "tools", "pytorch-tests-"+pytorchTestsVersion)
	unlock, err := Lock(ctx, dir+".lock", func() { fmt.Fprintln(progress, "waiting for PyTorch's tests, which are being downloaded") })
	if err != nil {
		return "", err
	}
	defer unlock()
	tests := filepath.Join(dir, "test", "distributed")
	if _, err := os.Stat(tests); err == nil {
		return tests, nil
	}
	fmt.Fprintf(progress, "downloading PyTorch's tests %s\n", pytorchTestsVersion)
	mirror, err := debianMirror(ctx)
	if err != nil {
		return "", err
	}
	fresh, err := os.MkdirTemp(filepath.Dir(dir), "pytorch-tests-")
	if err != nil {
		return "", fmt.Errorf("folder for PyTorch's tests: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(fresh)) }()
	archive := filepath.Join(fresh, "archive.tar.xz")
	if err := download(ctx, strings.TrimRight(mirror, "/")+"/"+pytorchTestsArchive, pytorchTestsSHA256, archive); err != nil {
		return "", err
	}
	whole := filepath.Join(fresh, "whole")
	if err := os.Mkdir(whole, 0o755); err != nil {
		return "", err
	}
	if _, err := programOutput(ctx, whole, "tar", "-xJf", archive, "--strip-components=1", "--wildcards", "*/test/distributed"); err != nil {
		return "", err
	}
	if err := os.RemoveAll(dir); err != nil {
		return "", err
	}
	return tests, os.Rename(whole, dir)
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
