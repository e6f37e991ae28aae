package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// chart writes the chart's archive, whose values name the images of this release by their digests.
func (r *release) chart(context.Context) error {
	r.report("writing the chart")
	folder := filepath.Join(r.root, "charts", "evenkeel")
	values, err := os.ReadFile(filepath.Join(folder, "values.yaml"))
	if err != nil {
		return fmt.Errorf("chart: %w", err)
	}
	filled, err := r.fill(values)
	if err != nil {
		return fmt.Errorf("chart: %w", err)
	}
	work, err := os.MkdirTemp(filepath.Join(r.root, "dist"), "release-")
	if err != nil {
		return fmt.Errorf("chart: %w", err)
	}
	defer os.RemoveAll(work)
	filledFile := filepath.Join(work, "values.yaml")
	if err := os.WriteFile(filledFile, filled, 0o644); err != nil {
		return fmt.Errorf("chart: %w", err)
	}
	members, err := filesBelow(folder, "evenkeel")
	if err != nil {
		return fmt.Errorf("chart: %w", err)
	}
	for i, m := range members {
		if m.name == "evenkeel/values.yaml" {
			members[i].from = filledFile
		}
	}
	members = append(members, member{"evenkeel/LICENSE", 0o644, filepath.Join(r.root, "LICENSE")})
	return writeTarball(filepath.Join(r.folder, "evenkeel-"+r.version+".tgz"), r.made, members...)
}

// fill names the release's images in the text of the chart's values.
func (r *release) fill(values []byte) ([]byte, error) {
	var err error
	set := func(value string, path ...string) {
		if err == nil {
			values, err = setValue(values, value, path...)
		}
	}
	for _, i := range r.built {
		switch i.name {
		case operatorImage:
			set(r.registry+"/"+i.name, "image", "repository")
			set(i.digest, "image", "digest")
		case pluginImage:
			set(r.reference(i), "defaultProfile", "spec", "plugin", "image")
		case benchImage:
			set(r.reference(i), "preflight", "benchImage")
		case testsImage:
			set(r.reference(i), "preflight", "ncclTestsImage")
		case serverImage:
			set(r.reference(i), "reduction", "image")
		case checkImage:
		default:
			return nil, fmt.Errorf("no value names the image %s", i.name)
		}
	}
	return values, err
}

// setValue replaces a scalar on a line of its own in a YAML text, and keeps everything else, comments too.
func setValue(text []byte, value string, path ...string) ([]byte, error) {
	var document yaml.Node
	if err := yaml.Unmarshal(text, &document); err != nil {
		return nil, err
	}
	node := &document
	if node.Kind == yaml.DocumentNode {
		node = node.Content[0]
	}
	for _, key := range path {
		found := false
		for i := 0; node.Kind == yaml.MappingNode && i+1 < len(node.Content); i += 2 {
			if node.Content[i].Value == key {
				node, found = node.Content[i+1], true
				break
			}
		}
		if !found {
			return nil, fmt.Errorf("there is no value %s", strings.Join(path, "."))
		}
	}
	if node.Kind != yaml.ScalarNode {
		return nil, fmt.Errorf("the value %s is no scalar", strings.Join(path, "."))
	}
	lines := strings.SplitAfter(string(text), "\n")
	line := lines[node.Line-1]
	old := node.Value
	if node.Style&yaml.DoubleQuotedStyle != 0 {
		old = `"` + old + `"`
	}
	before, after, ok := strings.Cut(line[node.Column-1:], old)
	if !ok || before != "" {
		return nil, fmt.Errorf("line %d does not have the value %s as it is", node.Line, strings.Join(path, "."))
	}
	lines[node.Line-1] = line[:node.Column-1] + fmt.Sprintf("%q", value) + after
	return []byte(strings.Join(slices.Clip(lines), "")), nil
}
