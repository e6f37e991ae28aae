package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"sigs.k8s.io/yaml"

	"evenkeel.dev/evenkeel/hack/ci/artifacts"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// A release is one version, built from the commit that is checked out.
type release struct {
	version, registry, downloads string
	platforms                    []string // of Linux, such as linux/amd64
	desktops                     []string // of kubectl's plugin
	ncclTests                    string   // a folder with the source of nccl-tests, or withoutTests; empty: it is fetched
	dirty                        bool
	quick                        bool // tests: see [artifacts.Builder]
	progress                     io.Writer

	root, folder string    // the checkout, and where the files go
	made         time.Time // of the commit: the time of all that has one
	notes        string    // the version's section of CHANGELOG.md
	built        []image   // in the order of shipped
}

func newRelease() *release {
	return &release{progress: os.Stderr, desktops: []string{"darwin/amd64", "darwin/arm64", "linux/amd64", "linux/arm64", "windows/amd64", "windows/arm64"}}
}

// An image is one that is published: its name, its tag, its archive and the digest of its index.
type image struct{ name, tag, archive, digest string }

// reference is how the chart and users name it.
func (r *release) reference(i image) string {
	return fmt.Sprintf("%s/%s:%s@%s", r.registry, i.name, i.tag, i.digest)
}

// Names of files that other files of a release have to know.
const (
	sumsFile   = "SHA256SUMS"
	imagesFile = "images.txt"
	notesFile  = "RELEASE_NOTES.md"
)

var (
	validVersion  = regexp.MustCompile(`^[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.-]+)?$`)
	validRegistry = regexp.MustCompile(`^[a-z0-9.-]+(:[0-9]+)?(/[a-z0-9._-]+)+$`)
)

// open finds the checkout and refuses what cannot be released.
func (r *release) open(ctx context.Context) error {
	if !validVersion.MatchString(r.version) {
		return fmt.Errorf("--version %q is not like 0.1.0 or 0.1.0-rc.1", r.version)
	}
	if !validRegistry.MatchString(r.registry) {
		return fmt.Errorf("--registry %q is not like registry.example.com/evenkeel", r.registry)
	}
	for _, p := range r.platforms {
		if p != "linux/amd64" && p != "linux/arm64" {
			return fmt.Errorf("--platforms: %q is neither linux/amd64 nor linux/arm64", p)
		}
	}
	r.downloads = strings.TrimSuffix(cmp.Or(r.downloads, defaultDownloads+r.version), "/")
	slices.Sort(r.platforms)
	r.platforms = slices.Compact(r.platforms)
	if len(r.platforms) == 0 {
		return errors.New("--platforms is empty")
	}
	var err error
	if r.root, err = toolbox.Root(); err != nil {
		return err
	}
	if err := r.checkVersions(); err != nil {
		return err
	}
	changes, err := r.git(ctx, "status", "--porcelain")
	if err != nil {
		return err
	}
	if changes != "" && !r.dirty {
		return fmt.Errorf("a release is built from a commit; these files differ from it:\n%s", changes)
	}
	seconds, err := r.git(ctx, "log", "-1", "--format=%ct")
	if err != nil {
		return err
	}
	var unix int64
	if _, err := fmt.Sscan(seconds, &unix); err != nil {
		return fmt.Errorf("time of the commit: %w", err)
	}
	r.made = time.Unix(unix, 0).UTC()
	return nil
}

// checkVersions makes sure that all files of the checkout that state a version state this one.
func (r *release) checkVersions() error {
	read := func(parts ...string) (string, error) {
		text, err := os.ReadFile(filepath.Join(append([]string{r.root}, parts...)...))
		if err != nil {
			return "", fmt.Errorf("versions: %w", err)
		}
		return string(text), nil
	}
	cargo, err := read("plugin", "Cargo.toml")
	if err != nil {
		return err
	}
	chartText, err := read("charts", "evenkeel", "Chart.yaml")
	if err != nil {
		return err
	}
	changes, err := read("CHANGELOG.md")
	if err != nil {
		return err
	}
	var chart struct{ Version, AppVersion string }
	if err := yaml.Unmarshal([]byte(chartText), &chart); err != nil {
		return fmt.Errorf("read charts/evenkeel/Chart.yaml: %w", err)
	}
	workspace := regexp.MustCompile(`(?m)^version = "([^"]+)"`).FindStringSubmatch(cargo)
	if workspace == nil {
		return errors.New("plugin/Cargo.toml states no version")
	}
	for file, version := range map[string]string{
		"plugin/Cargo.toml": workspace[1], "version in charts/evenkeel/Chart.yaml": chart.Version, "appVersion in charts/evenkeel/Chart.yaml": chart.AppVersion,
	} {
		if version != r.version {
			return fmt.Errorf("%s says %s, and %s is to be released: change one of them", file, version, r.version)
		}
	}
	r.notes, err = notesOf(changes, r.version)
	return err
}

func (r *release) git(ctx context.Context, args ...string) (string, error) {
	out, err := exec.CommandContext(ctx, "git", append([]string{"-C", r.root}, args...)...).Output()
	if err != nil {
		return "", fmt.Errorf("git %s: %w", args[0], err)
	}
	return strings.TrimSpace(string(out)), nil
}

// build fills the folder, which it empties first.
func (r *release) build(ctx context.Context) error {
	if err := os.RemoveAll(r.folder); err != nil {
		return fmt.Errorf("clear %s: %w", r.folder, err)
	}
	if err := os.MkdirAll(r.folder, 0o755); err != nil {
		return fmt.Errorf("make %s: %w", r.folder, err)
	}
	for _, step := range []func(context.Context) error{
		r.images, r.benchmark, r.wheels, r.kubectlPlugin, r.chart, r.bills, r.writeNotes,
	} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return writeSums(r.folder)
}

// builder builds for a platform such as linux/arm64.
func (r *release) builder(platform string) artifacts.Builder {
	return artifacts.Builder{Arch: arch(platform), Stamp: true, Progress: r.progress}
}

// arch is the processor of a platform, as Go names it.
func arch(platform string) string {
	_, a, _ := strings.Cut(platform, "/")
	return a
}

func (r *release) report(format string, args ...any) { fmt.Fprintf(r.progress, format+"\n", args...) }

func (r *release) writeNotes(context.Context) error {
	text := fmt.Sprintf("# Evenkeel %s\n\n%s", r.version, r.notes)
	if err := os.WriteFile(filepath.Join(r.folder, notesFile), []byte(text), 0o644); err != nil {
		return fmt.Errorf("release notes: %w", err)
	}
	return nil
}

// notesOf is the section of a version in a text of the form of Keep a Changelog, without its heading.
func notesOf(changes, version string) (string, error) {
	heading := regexp.MustCompile(`(?m)^## ` + regexp.QuoteMeta(version) + `( .*)?$`).FindStringIndex(changes)
	if heading == nil {
		return "", fmt.Errorf("CHANGELOG.md has no section %q", "## "+version)
	}
	rest := changes[heading[1]:]
	if next := regexp.MustCompile(`(?m)^## `).FindStringIndex(rest); next != nil {
		rest = rest[:next[0]]
	}
	if strings.TrimSpace(rest) == "" {
		return "", fmt.Errorf("the section of %s in CHANGELOG.md is empty", version)
	}
	return strings.TrimSpace(rest) + "\n", nil
}
