package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"evenkeel.dev/evenkeel/hack/ci/artifacts"
)

// Names of the images, as they are published.
const (
	operatorImage = "evenkeel-operator"
	pluginImage   = "evenkeel-plugin"
	benchImage    = "evenkeel-bench"
	serverImage   = "evenkeel-reduction-server"
	testsImage    = "evenkeel-nccl-tests"
	checkImage    = "evenkeel-nvsentinel-check" // in no value: NVSentinel's configuration names it
)

// withoutTests leaves out the image of nccl-tests.
const withoutTests = "no"

// testsPlatform is the only platform of the image of nccl-tests: CUDA's compiler is not run under emulation.
const testsPlatform = "linux/amd64"

// images builds the images for all platforms, each into an archive with an index.
func (r *release) images(ctx context.Context) error {
	protocol, err := artifacts.Protocol(r.root)
	if err != nil {
		return err
	}
	var names []string
	perName := map[string][]artifacts.PlatformImage{}
	for _, platform := range r.platforms {
		r.report("building images for %s", platform)
		built, err := r.builder(platform).Shipped(ctx)
		if err != nil {
			return err
		}
		for _, full := range built {
			name, _, _ := strings.Cut(strings.TrimPrefix(full, "localhost/"), ":")
			if perName[name] == nil {
				names = append(names, name)
			}
			perName[name] = append(perName[name], artifacts.PlatformImage{Name: full, Arch: arch(platform)})
		}
	}
	if r.ncclTests != withoutTests && slices.Contains(r.platforms, testsPlatform) {
		if arch(testsPlatform) != runtime.GOARCH {
			return fmt.Errorf("the image of nccl-tests is built on %s only: leave it out with --nccl-tests %s", testsPlatform, withoutTests)
		}
		built, err := r.builder(testsPlatform).NCCLTests(ctx, r.ncclTests)
		if err != nil {
			return fmt.Errorf("%w\nthe source of nccl-tests can be a folder (--nccl-tests DIR), and the image can be left out (--nccl-tests %s)", err, withoutTests)
		}
		names, perName[testsImage] = append(names, testsImage), []artifacts.PlatformImage{{Name: built, Arch: arch(testsPlatform)}}
	}
	var list strings.Builder
	for _, name := range names {
		tag := r.version
		if name == pluginImage || name == serverImage {
			tag += "-p" + protocol // by which the operator knows which of them go together
		}
		i, err := r.archiveImage(ctx, name, tag, perName[name])
		if err != nil {
			return err
		}
		r.built = append(r.built, i)
		fmt.Fprintf(&list, "%s %s\n", r.reference(i), i.archive)
	}
	if err := os.WriteFile(filepath.Join(r.folder, imagesFile), []byte(list.String()), 0o644); err != nil {
		return fmt.Errorf("list of images: %w", err)
	}
	return nil
}

func (r *release) archiveImage(ctx context.Context, name, tag string, images []artifacts.PlatformImage) (image, error) {
	r.report("writing image %s", name)
	layout, err := os.MkdirTemp(filepath.Join(r.root, "dist"), "release-")
	if err != nil {
		return image{}, fmt.Errorf("image %s: %w", name, err)
	}
	defer os.RemoveAll(layout)
	digest, err := artifacts.Builder{Progress: r.progress}.Layout(ctx, images, tag, layout)
	if err != nil {
		return image{}, err
	}
	members, err := filesBelow(layout, "")
	if err != nil {
		return image{}, fmt.Errorf("image %s: %w", name, err)
	}
	i := image{name: name, tag: tag, archive: fmt.Sprintf("%s_%s.oci.tar", name, r.version), digest: digest}
	return i, writeTarFile(filepath.Join(r.folder, i.archive), r.made, members)
}
