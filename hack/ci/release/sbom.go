package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// bills writes a bill of materials, in SPDX's JSON, for every file that has programs of others in it. syft finds what Go and
// cargo-auditable wrote into binaries, and the packages of Debian.
func (r *release) bills(ctx context.Context) error {
	box, err := toolbox.New(r.progress)
	if err != nil {
		return err
	}
	syft, err := box.Path(ctx, "syft")
	if err != nil {
		return err
	}
	for _, i := range r.built {
		for _, platform := range r.platforms {
			if i.name == testsImage && platform != testsPlatform {
				continue
			}
			name := fmt.Sprintf("%s_%s_linux_%s", i.name, r.version, arch(platform))
			if err := r.bill(ctx, syft, name, "oci-archive:"+filepath.Join(r.folder, i.archive), "--platform", platform); err != nil {
				return err
			}
		}
	}
	entries, err := os.ReadDir(r.folder)
	if err != nil {
		return fmt.Errorf("bills of materials: %w", err)
	}
	for _, e := range entries {
		program := strings.HasSuffix(e.Name(), ".tar.gz")
		if !program && filepath.Ext(e.Name()) != ".whl" {
			continue
		}
		if err := r.unpackedBill(ctx, syft, e.Name()); err != nil {
			return err
		}
	}
	return nil
}

// unpackedBill is the bill of what is in an archive or a wheel.
func (r *release) unpackedBill(ctx context.Context, syft, file string) error {
	work, err := os.MkdirTemp(filepath.Join(r.root, "dist"), "release-")
	if err != nil {
		return fmt.Errorf("bill of %s: %w", file, err)
	}
	defer os.RemoveAll(work)
	unpack := exec.CommandContext(ctx, "tar", "-xzf", filepath.Join(r.folder, file), "-C", work)
	if filepath.Ext(file) == ".whl" {
		unpack = exec.CommandContext(ctx, "python3", "-m", "zipfile", "-e", filepath.Join(r.folder, file), work)
	}
	if out, err := unpack.CombinedOutput(); err != nil {
		return fmt.Errorf("bill of %s: %w\n%s", file, err, bytes.TrimSpace(out))
	}
	return r.bill(ctx, syft, strings.TrimSuffix(strings.TrimSuffix(file, ".tar.gz"), ".whl"), "dir:"+work)
}

// bill writes NAME.spdx.json of what syft calls a source.
func (r *release) bill(ctx context.Context, syft, name, source string, flags ...string) error {
	r.report("writing the bill of materials of %s", name)
	args := append([]string{"scan", source, "--output", "spdx-json", "--source-name", name, "--source-version", r.version}, flags...)
	cmd := exec.CommandContext(ctx, syft, args...)
	cmd.Env = append(os.Environ(), "SYFT_CHECK_FOR_APP_UPDATE=false")
	var failed bytes.Buffer
	cmd.Stderr = &failed
	text, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("bill of %s: syft: %w\n%s", name, err, bytes.TrimSpace(failed.Bytes()))
	}
	if text, err = reproducibleBill(text, name, r.made); err != nil {
		return fmt.Errorf("bill of %s: %w", name, err)
	}
	if err := os.WriteFile(filepath.Join(r.folder, name+".spdx.json"), text, 0o644); err != nil {
		return fmt.Errorf("bill of %s: %w", name, err)
	}
	return nil
}

// reproducibleBill gives an SPDX document the time of the commit, and an address that depends on its name, in place of the time at
// which it was made and a random address. It refuses a document without packages.
func reproducibleBill(text []byte, name string, made time.Time) ([]byte, error) {
	var document map[string]json.RawMessage
	if err := json.Unmarshal(text, &document); err != nil {
		return nil, err
	}
	var creation map[string]json.RawMessage
	if err := json.Unmarshal(document["creationInfo"], &creation); err != nil {
		return nil, fmt.Errorf("creationInfo: %w", err)
	}
	var packages []json.RawMessage
	if err := json.Unmarshal(document["packages"], &packages); err != nil {
		return nil, fmt.Errorf("packages: %w", err)
	}
	if len(packages) < 2 { // the first one is the artefact itself
		return nil, fmt.Errorf("no package was found")
	}
	var err error
	set := func(in map[string]json.RawMessage, key string, value any) {
		if err == nil {
			in[key], err = json.Marshal(value)
		}
	}
	set(creation, "created", made.Format(time.RFC3339))
	set(document, "creationInfo", creation)
	set(document, "documentNamespace", "https://evenkeel.dev/spdx/"+name)
	if err != nil {
		return nil, err
	}
	out, err := json.MarshalIndent(document, "", " ")
	return append(out, '\n'), err
}
