//go:build release

package main

// cosign takes minutes to build, so these tests run in the stage that needs it anyway.

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/registry"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// newSigner has a key of its own.
func newSigner(t *testing.T) signer {
	t.Helper()
	box, err := toolbox.New(os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	cosign, err := box.Path(t.Context(), "cosign")
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	if err := runCosign(t.Context(), cosign, folder, "generate-key-pair"); err != nil {
		t.Fatal(err)
	}
	return signer{cosign: cosign, key: filepath.Join(folder, "cosign.key")}
}

// signedRelease is a folder with what is looked at of a release that the signer has signed.
func signedRelease(t *testing.T, by signer) (folder string) {
	t.Helper()
	folder = t.TempDir()
	sums := filepath.Join(folder, sumsFile)
	if err := os.WriteFile(sums, []byte("0  a\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := by.sign(t.Context(), sums); err != nil {
		t.Fatal(err)
	}
	return folder
}

// newImages pushes indexes, of no platforms, to a registry, and returns how each is named by its digest.
func newImages(t *testing.T, names ...string) (references []string) {
	t.Helper()
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(server.Close)
	const mediaType = "application/vnd.oci.image.index.v1+json"
	for _, name := range names {
		index := fmt.Sprintf(`{"schemaVersion": 2, "mediaType": %q, "manifests": [], "annotations": {"name": %q}}`, mediaType, name)
		digest := fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(index)))
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPut, server.URL+"/v2/evenkeel/"+name+"/manifests/"+digest, strings.NewReader(index))
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set("Content-Type", mediaType)
		response, err := server.Client().Do(request)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		if response.StatusCode != http.StatusCreated {
			t.Fatalf("push %s: %s", name, response.Status)
		}
		references = append(references, strings.TrimPrefix(server.URL, "http://")+"/evenkeel/"+name+"@"+digest)
	}
	return references
}

// pageVerifies runs the command with which docs/releasing.md verifies an image, in a release's folder.
func pageVerifies(ctx context.Context, cosign, folder, reference string) error {
	root, err := toolbox.Root()
	if err != nil {
		return err
	}
	page, err := os.ReadFile(filepath.Join(root, "docs", "releasing.md"))
	if err != nil {
		return err
	}
	const program, image = "cosign verify --key ", "REGISTRY/evenkeel-operator@sha256:DIGEST"
	_, rest, found := strings.Cut(string(page), "\n"+program)
	line, _, _ := strings.Cut(rest, "\n")
	if !found || !strings.Contains(line, image) {
		return fmt.Errorf("docs/releasing.md has no line %q with %q", program, image)
	}
	args := strings.Fields("verify --key " + strings.Replace(line, image, reference, 1))
	cmd := exec.CommandContext(ctx, cosign, args...)
	cmd.Dir = folder
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w\n%s", err, bytes.TrimSpace(out))
	}
	return nil
}

// Each image of a registry has a signature of its own, which the release's public key verifies and no other key.
func TestReleaseSignaturesOfImages(t *testing.T) {
	by, other := newSigner(t), newSigner(t)
	folder, foreign := signedRelease(t, by), signedRelease(t, other)
	images := newImages(t, "evenkeel-operator", "evenkeel-plugin")
	if err := pageVerifies(t.Context(), by.cosign, folder, images[0]); err == nil || !strings.Contains(err.Error(), "no signatures found") {
		t.Errorf("before it is signed: %v", err)
	}
	if err := by.signImage(t.Context(), images[0]); err != nil {
		t.Fatal(err)
	}
	if err := pageVerifies(t.Context(), by.cosign, folder, images[0]); err != nil {
		t.Error(err)
	}
	for what, err := range map[string]error{
		"another key":   pageVerifies(t.Context(), by.cosign, foreign, images[0]),
		"another image": pageVerifies(t.Context(), by.cosign, folder, images[1]),
	} {
		if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) {
			t.Errorf("%s: %v", what, err)
		}
	}
	// Where admission controllers look: the tag that cosign's SIGNATURE_SPEC.md names.
	image, digest, _ := strings.Cut(images[0], "@")
	host, path, _ := strings.Cut(image, "/")
	tag := "http://" + host + "/v2/" + path + "/manifests/" + strings.Replace(digest, ":", "-", 1) + ".sig"
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, tag, nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		t.Errorf("no signature at %s: %s", tag, response.Status)
	}
}

// Images are signed by whoever has signed the files, and by nobody else.
func TestReleaseImagesAreSignedAsItsFiles(t *testing.T) {
	by, other := newSigner(t), newSigner(t)
	keyed, keyless := signedRelease(t, by), t.TempDir()
	for _, c := range []struct {
		what   string
		signer signer
		folder string
		want   string // of the error
	}{
		{"the same key", by, keyed, ""},
		{"another key", other, keyed, "is not the key of"},
		{"a CI, after a key", signer{cosign: by.cosign}, keyed, "--key"},
		{"a CI, after a CI", signer{cosign: by.cosign}, keyless, ""},
		{"a key, after a CI", by, keyless, "--keyless"},
	} {
		if err := c.signer.hasSigned(t.Context(), c.folder); (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want an error with %q", c.what, err, c.want)
		}
	}
}
