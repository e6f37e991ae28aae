package lint

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"
)

// maxTargets keeps `make help` short: a new command becomes a variable of a target.
const maxTargets = 15

func TestMakeHasFewTargetsAndPagesNameNoOthers(t *testing.T) {
	root := filepath.Join("..", "..", "..")
	read := func(file string) string {
		text, err := os.ReadFile(filepath.Join(root, file))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	var targets []string
	for _, m := range regexp.MustCompile(`(?m)^([a-z-]+):.*##`).FindAllStringSubmatch(read("Makefile"), -1) {
		targets = append(targets, m[1])
	}
	if len(targets) == 0 || len(targets) > maxTargets {
		t.Errorf("%d targets, want 1 to %d: %q", len(targets), maxTargets, targets)
	}
	pages, err := tracked(t.Context(), root, "*.md", "*.yml", ".ci/run")
	if err != nil {
		t.Fatal(err)
	}
	// A command in backticks, at the beginning of a line of a block, or a step of CI.
	command := regexp.MustCompile("(?m)(?:`|^|run: |exec |&& )make ([a-z-]+)(?:`| [A-Z_]+=|$|  )")
	named := 0
	for _, page := range pages {
		for _, m := range command.FindAllStringSubmatch(read(page), -1) {
			named++
			if !slices.Contains(targets, m[1]) {
				t.Errorf("%s: the Makefile has no target %s", page, m[1])
			}
		}
	}
	if named < 50 {
		t.Errorf("found %d commands, want at least 50", named)
	}
}
