package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

func TestNotesAreTheSectionOfTheVersion(t *testing.T) {
	const changes = "# Changes\n\n## 0.2.0 - unreleased\n\n* new\n\n## 0.1.0 - 2026-01-02\n\n### Added\n\n* first\n"
	for version, want := range map[string]string{"0.2.0": "* new\n", "0.1.0": "### Added\n\n* first\n"} {
		if got, err := notesOf(changes, version); err != nil || got != want {
			t.Errorf("notes of %s: %q %v, want %q", version, got, err, want)
		}
	}
	for _, version := range []string{"0.3.0", "0.1", "0.1.0-rc.1"} {
		if got, err := notesOf(changes, version); err == nil || !strings.Contains(err.Error(), version) {
			t.Errorf("notes of %s: %q %v", version, got, err)
		}
	}
	if _, err := notesOf("## 0.1.0\n\n## 0.0.1\n", "0.1.0"); err == nil {
		t.Error("an empty section is taken for notes")
	}
}

// All files of the checkout state one version, so that it can be released, and another is refused.
func TestVersionsOfTheCheckoutAgree(t *testing.T) {
	r := checkout(t)
	if err := r.checkVersions(); err != nil {
		t.Error(err)
	}
	if r.notes == "" {
		t.Error("no notes")
	}
	r.version = "9.9.9"
	if err := r.checkVersions(); err == nil || !strings.Contains(err.Error(), "9.9.9 is to be released") {
		t.Errorf("version 9.9.9: %v", err)
	}
}

func TestReleaseRefusesBadSettings(t *testing.T) {
	for want, bad := range map[string]release{
		"--version":   {version: "v0.1.0", registry: "r.example/e", platforms: []string{"linux/amd64"}},
		"--registry":  {version: "0.1.0", registry: "https://r.example/e", platforms: []string{"linux/amd64"}},
		"--platforms": {version: "0.1.0", registry: "r.example/e", platforms: []string{"linux/riscv64"}},
	} {
		if err := bad.open(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want an error about %s", bad, err, want)
		}
	}
}

// The bytes of an archive do not depend on when, in which order and with which umask its files were made.
func TestArchiveIsReproducible(t *testing.T) {
	made := time.Unix(1700000000, 0)
	var sums []string
	for i, order := range [][]int{{0, 1}, {1, 0}} {
		dir := t.TempDir()
		var members []member
		for _, n := range []string{"a", "b"} {
			path := filepath.Join(dir, n)
			if err := os.WriteFile(path, []byte("text of "+n), 0o600|os.FileMode(i)); err != nil {
				t.Fatal(err)
			}
			if err := os.Chtimes(path, time.Unix(int64(i), 0), time.Unix(int64(i)*1000, 0)); err != nil {
				t.Fatal(err)
			}
			members = append(members, member{"in/" + n, 0o755, path})
		}
		to := filepath.Join(dir, "archive.tar.gz")
		if err := writeTarball(to, made, members[order[0]], members[order[1]]); err != nil {
			t.Fatal(err)
		}
		sum, err := sumOf(to)
		if err != nil {
			t.Fatal(err)
		}
		sums = append(sums, sum)
		if got := untar(t, to); string(got["in/b"]) != "text of b" || len(got) != 2 {
			t.Errorf("archive has %q", got)
		}
	}
	if sums[0] != sums[1] {
		t.Errorf("two archives of the same files differ: %v", sums)
	}
}

// The published chart names every image by its digest, and its values are the repository's otherwise, with their comments.
func TestChartNamesImagesByDigest(t *testing.T) {
	r := checkout(t)
	r.folder, r.registry, r.made = t.TempDir(), "registry.example.com/evenkeel", time.Unix(1700000000, 0)
	for i, name := range []string{operatorImage, pluginImage, benchImage, testsImage, serverImage} {
		r.built = append(r.built, image{name: name, tag: r.version, digest: fmt.Sprintf("sha256:%064d", i)})
	}
	if err := os.MkdirAll(filepath.Join(r.root, "dist"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := r.chart(t.Context()); err != nil {
		t.Fatal(err)
	}
	files := untar(t, filepath.Join(r.folder, "evenkeel-"+r.version+".tgz"))
	for _, want := range []string{"evenkeel/Chart.yaml", "evenkeel/templates/webhook.yaml", "evenkeel/files/crds/evenkeel.dev_networkprofiles.yaml", "evenkeel/values.schema.json", "evenkeel/LICENSE"} {
		if len(files[want]) == 0 {
			t.Errorf("the chart has no %s", want)
		}
	}
	source, err := os.ReadFile(filepath.Join(r.root, "charts", "evenkeel", "values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	before, after := strings.Split(string(source), "\n"), strings.Split(string(files["evenkeel/values.yaml"]), "\n")
	if len(before) != len(after) {
		t.Fatalf("values have %d lines, and had %d", len(after), len(before))
	}
	var changed []string
	for i := range before {
		if before[i] != after[i] {
			changed = append(changed, strings.TrimSpace(after[i]))
		}
	}
	reference := func(i int) string { return fmt.Sprintf("%q", r.reference(r.built[i])) }
	want := []string{
		`repository: "registry.example.com/evenkeel/evenkeel-operator"`, `digest: "` + r.built[0].digest + `"`,
		"image: " + reference(1), "benchImage: " + reference(2), "ncclTestsImage: " + reference(3), "image: " + reference(4),
	}
	if !slices.Equal(changed, want) {
		t.Errorf("changed lines are\n%s\nwant\n%s", strings.Join(changed, "\n"), strings.Join(want, "\n"))
	}
}

func TestSetValueKeepsComments(t *testing.T) {
	const text = "a:\n  b: \"\"   # why\n  c: old\nd: {e: x}\n"
	for _, c := range []struct {
		path []string
		want string
	}{
		{[]string{"a", "b"}, "a:\n  b: \"new\"   # why\n  c: old\nd: {e: x}\n"},
		{[]string{"a", "c"}, "a:\n  b: \"\"   # why\n  c: \"new\"\nd: {e: x}\n"},
		{[]string{"d", "e"}, "a:\n  b: \"\"   # why\n  c: old\nd: {e: \"new\"}\n"},
		{[]string{"a"}, ""}, {[]string{"a", "x"}, ""},
	} {
		if got, err := setValue([]byte(text), "new", c.path...); string(got) != c.want || (err == nil) != (c.want != "") {
			t.Errorf("%v: %q %v, want %q", c.path, got, err, c.want)
		}
	}
}

func TestSumsCoverEveryFileButTheirOwn(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"b", "a", sumsFile, sumsFile + ".sigstore.json", publicKeyFile} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want := fmt.Sprintf("%x  a\n%x  b\n", sha256.Sum256([]byte("a")), sha256.Sum256([]byte("b")))
	if got, err := sumsOf(dir); err != nil || got != want {
		t.Errorf("%v\n%swant\n%s", err, got, want)
	}
}

func TestListOfImagesIsReadOrRefused(t *testing.T) {
	digest := "sha256:" + strings.Repeat("0", 64)
	for text, want := range map[string]string{
		"10.88.0.1:5000/e/evenkeel-plugin:0.1.0@" + digest + " plugin.tar\n": "",
		"": "empty",
		"r.example/e/evenkeel-plugin:0.1.0 plugin.tar\n":                      "not like",
		"r.example/e/evenkeel-plugin:0.1.0@" + digest + " ../plugin.tar\n":    "not like",
		"r.example/e/evenkeel-plugin@" + digest + " plugin.tar\n":             "not like",
		"r.example/e/evenkeel-plugin:0.1.0@" + digest + "0 plugin.tar\n":      "not like",
		"r.example/e/evenkeel-plugin:0.1.0@" + digest + " plugin.tar other\n": "not like",
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, imagesFile), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		images, err := imagesOf(dir)
		if want == "" {
			if err != nil || images[0] != (pushedImage{"10.88.0.1:5000/e", "evenkeel-plugin", "0.1.0", digest, "plugin.tar"}) {
				t.Errorf("%q: %+v %v", text, images, err)
			}
		} else if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %+v %v, want an error with %q", text, images, err, want)
		}
	}
	if _, err := imagesOf(t.TempDir()); err == nil || !strings.Contains(err.Error(), "is no release") {
		t.Errorf("an empty folder: %v", err)
	}
}

func TestDifferencesNameChangedAndMissingFiles(t *testing.T) {
	const first = "1  a\n2  b\n3  c\n"
	if got := differences(first, "1  a\n9  b\n4  d\n"); !slices.Equal(got, []string{"b", "c", "d"}) {
		t.Errorf("differences: %v", got)
	}
	if got := differences(first, first); got != nil {
		t.Errorf("a text differs from itself: %v", got)
	}
}

func TestBillIsReproducibleAndNotEmpty(t *testing.T) {
	bill := func(created, space string) string {
		return `{"spdxVersion":"SPDX-2.3","creationInfo":{"created":"` + created + `","creators":["Tool: syft"]},"documentNamespace":"` + space + `","packages":[{"name":"x"},{"name":"libc"}]}`
	}
	made := time.Unix(1700000000, 0).UTC()
	first, err := reproducibleBill([]byte(bill("2026-01-01T00:00:00Z", "https://one")), "x_0.1.0", made)
	if err != nil {
		t.Fatal(err)
	}
	second, err := reproducibleBill([]byte(bill("2027-01-01T00:00:00Z", "https://two")), "x_0.1.0", made)
	if err != nil || !bytes.Equal(first, second) {
		t.Errorf("%v\n%s\n%s", err, first, second)
	}
	var document struct {
		SPDXVersion  string `json:"spdxVersion"`
		CreationInfo struct{ Created string }
		Packages     []struct{ Name string }
	}
	if err := json.Unmarshal(first, &document); err != nil || document.CreationInfo.Created != "2023-11-14T22:13:20Z" || len(document.Packages) != 2 || document.SPDXVersion != "SPDX-2.3" {
		t.Errorf("%v: %+v", err, document)
	}
	empty := strings.Replace(bill("2026-01-01T00:00:00Z", "https://one"), `,{"name":"libc"}`, "", 1)
	if _, err := reproducibleBill([]byte(empty), "x", made); err == nil {
		t.Error("a bill without packages is taken")
	}
}

// kubectl's plugin is built twice with the same bytes, and krew's manifest names the archives by their checksums.
func TestKubectlPluginIsReproducible(t *testing.T) {
	var sums []string
	for range 2 {
		r := checkout(t)
		r.folder, r.downloads, r.made, r.progress = t.TempDir(), "https://downloads.example.com", time.Unix(1700000000, 0), io.Discard
		r.desktops, r.quick = []string{"linux/" + runtime.GOARCH}, true // others take minutes to compile
		if err := os.MkdirAll(filepath.Join(r.root, "dist"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := r.kubectlPlugin(t.Context()); err != nil {
			t.Fatal(err)
		}
		text, err := sumsOf(r.folder)
		if err != nil {
			t.Fatal(err)
		}
		sums = append(sums, text)
		manifest, err := os.ReadFile(filepath.Join(r.folder, "evenkeel.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		var plugin krewPlugin
		if err := yaml.UnmarshalStrict(manifest, &plugin); err != nil {
			t.Fatal(err)
		}
		if len(plugin.Spec.Platforms) != len(r.desktops) || plugin.Spec.Version != "v"+r.version {
			t.Errorf("manifest %+v", plugin)
		}
		for _, p := range plugin.Spec.Platforms {
			name := filepath.Base(p.URI)
			sum, err := sumOf(filepath.Join(r.folder, name))
			if err != nil || sum != p.SHA256 || p.URI != "https://downloads.example.com/"+name {
				t.Errorf("%v: %s has the checksum %s, and the manifest says %+v", err, name, sum, p)
			}
			if files := untar(t, filepath.Join(r.folder, name)); len(files[p.Bin]) == 0 || len(files["LICENSE"]) == 0 {
				t.Errorf("%s has no %s or no licence", name, p.Bin)
			}
		}
	}
	if different := differences(sums[0], sums[1]); len(different) > 0 {
		t.Errorf("files of two builds differ: %v", different)
	}
}

// checkout is a release of the checkout's own version.
func checkout(t *testing.T) *release {
	t.Helper()
	root, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(root, "charts", "evenkeel", "Chart.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var chart struct{ Version string }
	if err := yaml.Unmarshal(text, &chart); err != nil {
		t.Fatal(err)
	}
	return &release{root: root, version: chart.Version, progress: io.Discard}
}

// untar reads the files of a compressed archive.
func untar(t *testing.T, path string) map[string][]byte {
	t.Helper()
	in, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	compressed, err := gzip.NewReader(in)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string][]byte{}
	for r := tar.NewReader(compressed); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		if files[header.Name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}
}
