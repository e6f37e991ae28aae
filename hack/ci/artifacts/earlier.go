package artifacts

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// Earlier builds the operator's image of an earlier commit, and unpacks that commit's chart into folder. It returns the
// image's name in buildah's local storage, and the chart's path. An image that was built before is used again. The
// plugin's images are not built, as a job keeps those that its profile names.
func (b Builder) Earlier(ctx context.Context, commit, folder string) (name, chart string, err error) {
	root, err := toolbox.Root()
	if err != nil {
		return "", "", err
	}
	if err := toolbox.EnsurePrograms(ctx, b.progress(), []toolbox.Program{{Name: "buildah", Package: "buildah"}}); err != nil {
		return "", "", err
	}
	tree := filepath.Join(folder, "tree.tar")
	if err := b.run(ctx, root, nil, "git", "archive", "--output", tree, commit); err != nil {
		return "", "", fmt.Errorf("an upgrade from commit %s needs it in the history of this checkout (git fetch --unshallow): %w", commit, err)
	}
	if err := b.run(ctx, folder, nil, "tar", "-xf", tree); err != nil {
		return "", "", err
	}
	name, chart = "localhost/evenkeel-operator:"+commit, filepath.Join(folder, "charts", "evenkeel")
	if b.has(ctx, name, commit) {
		return name, chart, nil
	}
	b.report("building the operator of commit " + commit + " (go, static)")
	if err := os.Mkdir(filepath.Join(folder, "dist"), 0o755); err != nil {
		return "", "", fmt.Errorf("create dist: %w", err)
	}
	// With today's versions of its dependencies, which are compiled already.
	args := []string{"build", "-modfile", filepath.Join(root, "go.mod"), "-ldflags", "-s -w", "-o", "dist/", "./operator/cmd/evenkeel-operator"}
	if err := b.run(ctx, folder, []string{"CGO_ENABLED=0", "GOFLAGS=" + toolbox.GoFlags}, "go", args...); err != nil {
		return "", "", err
	}
	return name, chart, b.build(ctx, folder, image{file: "Dockerfile", name: name, args: []string{"BASE_IMAGE=scratch"}}, commit)
}
