package artifacts

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestLayoutBecomesOneImageOfAllProcessors(t *testing.T) {
	folder := t.TempDir()
	if err := os.MkdirAll(filepath.Join(folder, "blobs", "sha256"), 0o755); err != nil {
		t.Fatal(err)
	}
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(folder, "index.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	image := func(arch, digest string) string {
		return `{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"sha256:` + digest + `","size":7,"annotations":{"org.opencontainers.image.ref.name":"` + arch + `"}}`
	}
	write(`{"schemaVersion":2,"manifests":[` + image("amd64", "aa") + `,` + image("arm64", "bb") + `]}`)
	digest, err := joinLayout(folder, "0.1.0")
	if err != nil {
		t.Fatal(err)
	}
	read := func(path ...string) (i index) {
		t.Helper()
		text, err := os.ReadFile(filepath.Join(append([]string{folder}, path...)...))
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(text, &i); err != nil {
			t.Fatal(err)
		}
		return i
	}
	top := read("index.json")
	if len(top.Manifests) != 1 || top.Manifests[0].Digest != digest || top.Manifests[0].Annotations[tagOfLayout] != "0.1.0" {
		t.Errorf("index.json is %+v, with the digest %s", top, digest)
	}
	joined := read("blobs", "sha256", strings.TrimPrefix(digest, "sha256:"))
	if len(joined.Manifests) != 2 || joined.MediaType != imageIndex {
		t.Fatalf("index is %+v", joined)
	}
	for i, want := range []struct{ arch, digest string }{{"amd64", "sha256:aa"}, {"arm64", "sha256:bb"}} {
		m := joined.Manifests[i]
		if m.Digest != want.digest || m.Platform == nil || *m.Platform != (platform{want.arch, "linux"}) || m.Annotations != nil || m.Size != 7 {
			t.Errorf("image %d is %+v, want %+v", i, m, want)
		}
	}
	write(`{"schemaVersion":2,"manifests":[` + image("latest", "aa") + `]}`)
	if _, err := joinLayout(folder, "0.1.0"); err == nil || !strings.Contains(err.Error(), `"latest"`) {
		t.Errorf("an image for latest: %v", err)
	}
}
