package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// A publication pushes what registries hold.
type publication struct {
	to       string // a mirror of the registry that the release names; empty: that registry
	helm     string
	signer   signer
	progress io.Writer
}

// publish pushes the images and the chart of a release's folder, and signs the images where they are then.
func (p publication) publish(ctx context.Context, folder string) error {
	if p.to != "" && !validRegistry.MatchString(p.to) {
		return fmt.Errorf("--to %q is not like registry.example.com/evenkeel", p.to)
	}
	if err := toolbox.EnsurePrograms(ctx, p.progress, []toolbox.Program{{Name: "skopeo", Package: "skopeo"}}); err != nil {
		return err
	}
	images, err := imagesOf(folder)
	if err != nil {
		return err
	}
	if err := p.signer.hasSigned(ctx, folder); err != nil {
		return err
	}
	charts, err := filepath.Glob(filepath.Join(folder, "evenkeel-*.tgz"))
	if err != nil || len(charts) != 1 {
		return fmt.Errorf("%s is no release: it has %d charts (%v)", folder, len(charts), err)
	}
	registry := ""
	for _, i := range images {
		registry = cmp.Or(p.to, i.registry)
		target := "docker://" + registry + "/" + i.name + ":" + i.tag
		fmt.Fprintf(p.progress, "pushing %s\n", strings.TrimPrefix(target, "docker://"))
		// As it is, so that it has the digest that the chart names.
		if err := p.run(ctx, "skopeo", "copy", "--all", "--preserve-digests", "oci-archive:"+filepath.Join(folder, i.archive), target); err != nil {
			return err
		}
		manifest, err := exec.CommandContext(ctx, "skopeo", "inspect", "--raw", target).Output()
		if err != nil {
			return fmt.Errorf("skopeo inspect %s: %w", target, err)
		}
		if digest := fmt.Sprintf("sha256:%x", sha256.Sum256(manifest)); digest != i.digest {
			return fmt.Errorf("the registry has %s with the digest %s, and the release has %s", target, digest, i.digest)
		}
		if err := p.signer.signImage(ctx, registry+"/"+i.name+"@"+i.digest); err != nil {
			return fmt.Errorf("sign %s: %w", i.name, err)
		}
	}
	fmt.Fprintf(p.progress, "pushing the chart to oci://%s/charts\n", registry)
	return p.run(ctx, p.helm, "push", charts[0], "oci://"+registry+"/charts")
}

// A pushedImage is a line of a release's list of images: REGISTRY/NAME:TAG@DIGEST ARCHIVE.
type pushedImage struct{ registry, name, tag, digest, archive string }

var imageLine = regexp.MustCompile(`^(\S+)/([^/:@\s]+):([^/:@\s]+)@(sha256:[0-9a-f]{64}) ([^/\s]+)$`)

// imagesOf reads the list of images of a release's folder.
func imagesOf(folder string) ([]pushedImage, error) {
	text, err := os.ReadFile(filepath.Join(folder, imagesFile))
	if err != nil {
		return nil, fmt.Errorf("%s is no release: %w", folder, err)
	}
	var images []pushedImage
	for line := range strings.Lines(string(text)) {
		m := imageLine.FindStringSubmatch(strings.TrimSpace(line))
		if m == nil {
			return nil, fmt.Errorf("%s: %q is not like registry/name:tag@sha256:... archive", imagesFile, line)
		}
		images = append(images, pushedImage{m[1], m[2], m[3], m[4], m[5]})
	}
	if len(images) == 0 {
		return nil, fmt.Errorf("%s of %s is empty", imagesFile, folder)
	}
	return images, nil
}

func (p publication) run(ctx context.Context, program string, args ...string) error {
	if out, err := exec.CommandContext(ctx, program, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", filepath.Base(program), args[0], err, bytes.TrimSpace(out))
	}
	return nil
}
