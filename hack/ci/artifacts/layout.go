package artifacts

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
)

// Types of OCI's image specification.
const (
	imageIndex  = "application/vnd.oci.image.index.v1+json"
	tagOfLayout = "org.opencontainers.image.ref.name"
)

// A descriptor is OCI's reference to a blob (image specification, "Content Descriptors").
type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int64             `json:"size"`
	Annotations map[string]string `json:"annotations,omitempty"`
	Platform    *platform         `json:"platform,omitempty"`
}

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

// An index is OCI's image index, and the index.json of an image layout.
type index struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType,omitempty"`
	Manifests     []descriptor `json:"manifests"`
}

// A PlatformImage is an image of buildah's storage for one processor, as Go names it.
type PlatformImage struct{ Name, Arch string }

// Layout writes images, each for another processor, as one image with an index into an OCI image layout in the folder
// to, with a tag, and returns the index's digest.
func (b Builder) Layout(ctx context.Context, images []PlatformImage, tag, to string) (digest string, err error) {
	for _, i := range images {
		if err := b.run(ctx, "", nil, "buildah", "push", "--format", "oci", i.Name, "oci:"+to+":"+i.Arch); err != nil {
			return "", err
		}
	}
	return joinLayout(to, tag)
}

// joinLayout replaces the images of a layout, whose tags are their processors, by one index of them.
func joinLayout(folder, tag string) (digest string, err error) {
	file := filepath.Join(folder, "index.json")
	text, err := os.ReadFile(file)
	if err != nil {
		return "", fmt.Errorf("image layout: %w", err)
	}
	var layout index
	if err := json.Unmarshal(text, &layout); err != nil {
		return "", fmt.Errorf("image layout %s: %w", file, err)
	}
	joined := index{SchemaVersion: 2, MediaType: imageIndex}
	for _, m := range layout.Manifests {
		arch := m.Annotations[tagOfLayout]
		if _, err := rustTarget(arch); err != nil {
			return "", fmt.Errorf("image layout %s: an image is for %q: %w", file, arch, err)
		}
		m.Annotations, m.Platform = nil, &platform{Architecture: arch, OS: "linux"}
		joined.Manifests = append(joined.Manifests, m)
	}
	blob, err := json.Marshal(joined)
	if err != nil {
		return "", fmt.Errorf("image layout %s: %w", file, err)
	}
	sum := fmt.Sprintf("%x", sha256.Sum256(blob))
	if err := os.WriteFile(filepath.Join(folder, "blobs", "sha256", sum), blob, 0o644); err != nil {
		return "", fmt.Errorf("image layout: %w", err)
	}
	whole := descriptor{MediaType: imageIndex, Digest: "sha256:" + sum, Size: int64(len(blob)), Annotations: map[string]string{tagOfLayout: tag}}
	if text, err = json.Marshal(index{SchemaVersion: 2, Manifests: []descriptor{whole}}); err != nil {
		return "", fmt.Errorf("image layout %s: %w", file, err)
	}
	if err := os.WriteFile(file, text, 0o644); err != nil {
		return "", fmt.Errorf("image layout: %w", err)
	}
	return whole.Digest, nil
}
