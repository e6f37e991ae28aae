package local

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

const loadTimeout = 10 * time.Minute

// Load puts an image into the cluster's registry and returns the reference
// that pods use, pinned by digest: 10.88.0.1:5000/NAME@sha256:...
//
// The image is a name in buildah's storage (localhost/NAME:TAG), or the path of an archive file of "docker save" or
// "buildah push oci-archive:". An archive's name in the registry is its file's, without extension.
func (c *Cluster) Load(ctx context.Context, image string) (pinned string, err error) {
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	work, err := os.MkdirTemp(c.state.path(), "load-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(work)

	var storage []string // buildah's storage; the default one if empty
	name := image
	if info, statErr := os.Stat(image); statErr == nil && info.Mode().IsRegular() {
		kind, err := archiveKind(image)
		if err != nil {
			return "", err
		}
		// An archive uses a storage of its own, so that the machine's one is not changed.
		storage = []string{"--root", filepath.Join(work, "root"), "--runroot", filepath.Join(work, "run"), "--storage-driver", "vfs"}
		output, err := run(ctx, "", "buildah", append(storage, "pull", "-q", kind+":"+image)...)
		if err != nil {
			return "", fmt.Errorf("load %s: %w", image, err)
		}
		base := filepath.Base(image)
		name = strings.ToLower(strings.TrimSuffix(strings.TrimSuffix(base, filepath.Ext(base)), ".tar"))
		image = strings.TrimSpace(output)
	}
	repository, tag, err := registryName(name)
	if err != nil {
		return "", err
	}
	digestFile := filepath.Join(work, "digest")
	// No compression: the registry is on this machine, its processors are the bottleneck.
	_, err = run(ctx, netnsName(c.config.Name, "cp"), "buildah", append(storage, "push", "-q", "--tls-verify=false", "--disable-compression",
		"--digestfile", digestFile, image, "docker://"+Registry+"/"+repository+":"+tag)...)
	if err != nil {
		return "", fmt.Errorf("load %s: %w", name, err)
	}
	digest, err := os.ReadFile(digestFile)
	if err != nil {
		return "", err
	}
	return Registry + "/" + repository + "@" + strings.TrimSpace(string(digest)), nil
}

var (
	validRepository = regexp.MustCompile(`^[a-z0-9]+([._-][a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*$`)
	validTag        = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$`)
)

// registryName returns an image's repository and tag in the registry: its own, without the host.
func registryName(image string) (repository, tag string, err error) {
	repository, tag = image, "latest"
	if host, rest, ok := strings.Cut(repository, "/"); ok && (host == "localhost" || strings.ContainsAny(host, ".:")) {
		repository = rest
	}
	if i := strings.LastIndexByte(repository, ':'); i >= 0 {
		repository, tag = repository[:i], repository[i+1:]
	}
	if !validRepository.MatchString(repository) || !validTag.MatchString(tag) {
		return "", "", fmt.Errorf("image %q is neither an archive file nor an image's name like localhost/name:tag", image)
	}
	return repository, tag, nil
}

// archiveKind is the format of an image archive, by buildah's name.
func archiveKind(name string) (string, error) {
	f, err := os.Open(name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	for r := tar.NewReader(f); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return "", fmt.Errorf("%s is an archive, but not of an image: it has neither manifest.json nor oci-layout", name)
		}
		if err != nil {
			return "", fmt.Errorf("%s is not an image archive: %w", name, err)
		}
		switch path.Clean(header.Name) {
		case "oci-layout":
			return "oci-archive", nil
		case "manifest.json":
			return "docker-archive", nil
		}
	}
}

// run runs a command in a network namespace, or the machine's own if netns is
// empty, and returns its standard output.
func run(ctx context.Context, netns, program string, args ...string) (string, error) {
	if netns != "" {
		program, args = "nsenter", append([]string{"--net=" + netnsPath(netns), "--", program}, args...)
	}
	cmd := exec.CommandContext(ctx, program, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s: %w: %s", program, err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}
