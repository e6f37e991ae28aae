package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"sigs.k8s.io/yaml"

	"evenkeel.dev/evenkeel/hack/ci/artifacts"
)

const pluginProgram = "kubectl-evenkeel"

// kubectlPlugin builds kubectl-evenkeel for every desktop, and its manifest for krew.
func (r *release) kubectlPlugin(ctx context.Context) error {
	var manifest krewPlugin
	manifest.APIVersion, manifest.Kind = "krew.googlecontainertools.github.com/v1alpha2", "Plugin"
	manifest.Metadata.Name = "evenkeel"
	manifest.Spec.Version, manifest.Spec.Homepage = "v"+r.version, "https://evenkeel.dev"
	manifest.Spec.ShortDescription = "Check the network of training clusters, and explain it"
	manifest.Spec.Description = `Runs Evenkeel's network checks and shows their results. Explains why a node failed, what a
training job got and what it waits for. "kubectl evenkeel doctor" says what is wrong with a
cluster before and after Evenkeel is installed.
`
	builder := artifacts.Builder{Stamp: true, Quick: r.quick, Progress: r.progress}
	for _, platform := range r.desktops {
		goos, goarch, _ := strings.Cut(platform, "/")
		r.report("building %s for %s", pluginProgram, platform)
		program := pluginProgram
		if goos == "windows" {
			program += ".exe"
		}
		name := fmt.Sprintf("%s_%s_%s_%s.tar.gz", pluginProgram, r.version, goos, goarch)
		err := r.archived(name, program, func(to string) error {
			return builder.Go(ctx, r.root, goos, goarch, to, "./operator/cmd/"+pluginProgram)
		})
		if err != nil {
			return err
		}
		sum, err := sumOf(filepath.Join(r.folder, name))
		if err != nil {
			return err
		}
		var p krewPlatform
		p.Selector.MatchLabels = map[string]string{"os": goos, "arch": goarch}
		p.URI, p.SHA256, p.Bin = r.downloads+"/"+name, sum, program
		p.Files = []krewFile{{program, "."}, {"LICENSE", "."}}
		manifest.Spec.Platforms = append(manifest.Spec.Platforms, p)
	}
	text, err := yaml.Marshal(manifest)
	if err != nil {
		return fmt.Errorf("krew manifest: %w", err)
	}
	// Its file has the name of the plugin, as krew requires.
	if err := os.WriteFile(filepath.Join(r.folder, manifest.Metadata.Name+".yaml"), text, 0o644); err != nil {
		return fmt.Errorf("krew manifest: %w", err)
	}
	return nil
}

// benchmark puts evenkeel-bench, which the images have been built with, into archives.
func (r *release) benchmark(context.Context) error {
	for _, platform := range r.platforms {
		b := r.builder(platform)
		err := r.archived(fmt.Sprintf("evenkeel-bench_%s_linux_%s.tar.gz", r.version, arch(platform)), "evenkeel-bench", func(to string) error {
			return os.Link(filepath.Join(r.root, b.Folder(), "evenkeel-bench"), to)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// archived puts a program that make writes to a path into an archive of the release, with the licence.
func (r *release) archived(name, program string, make func(to string) error) error {
	work, err := os.MkdirTemp(filepath.Join(r.root, "dist"), "release-")
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	defer os.RemoveAll(work)
	path := filepath.Join(work, program)
	if err := make(path); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return writeTarball(filepath.Join(r.folder, name), r.made, member{program, 0o755, path}, member{"LICENSE", 0o644, filepath.Join(r.root, "LICENSE")})
}

// The parts of krew's manifest (krew's docs, "plugin manifest") that are used.
type krewPlugin struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Metadata   struct {
		Name string `json:"name"`
	} `json:"metadata"`
	Spec struct {
		Version          string         `json:"version"`
		Homepage         string         `json:"homepage"`
		ShortDescription string         `json:"shortDescription"`
		Description      string         `json:"description"`
		Platforms        []krewPlatform `json:"platforms"`
	} `json:"spec"`
}

type krewPlatform struct {
	Selector struct {
		MatchLabels map[string]string `json:"matchLabels"`
	} `json:"selector"`
	URI    string     `json:"uri"`
	SHA256 string     `json:"sha256"`
	Bin    string     `json:"bin"`
	Files  []krewFile `json:"files"`
}

type krewFile struct {
	From string `json:"from"`
	To   string `json:"to"`
}

// sumOf is the SHA-256 of a file, in hexadecimal digits.
func sumOf(path string) (string, error) {
	in, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("checksum: %w", err)
	}
	defer in.Close()
	hash := sha256.New()
	if _, err := io.Copy(hash, in); err != nil {
		return "", fmt.Errorf("checksum of %s: %w", path, err)
	}
	return hex.EncodeToString(hash.Sum(nil)), nil
}
