package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// A filter that matches no test runs nothing, without an error. So each filter must match a module, or the beginning of a
// function's name in a file of that module.
func TestRDMAFiltersMatchRustTests(t *testing.T) {
	root, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	sources := map[string]string{}
	err = filepath.WalkDir(filepath.Join(root, "plugin", "crates"), func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || filepath.Ext(path) != ".rs" {
			return err
		}
		text, err := os.ReadFile(path)
		sources[path] = string(text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, tests := range rdmaTests {
		for _, filter := range tests.run {
			if strings.HasPrefix(filter, "--") || !strings.Contains(filter, "::") {
				continue // an option, or its value
			}
			parts := strings.Split(filter, "::")
			modules, function := parts[:len(parts)-1], regexp.MustCompile(`\bfn `+regexp.QuoteMeta(parts[len(parts)-1]))
			found := false
			for path, text := range sources {
				inModule := true
				for _, module := range modules {
					inModule = inModule && (strings.Contains(path, "/"+module) || strings.Contains(text, "mod "+module))
				}
				last := parts[len(parts)-1]
				// Such as rdma::failover, a folder or a file.
				isModule := strings.Contains(path, "/"+last+"/") || strings.HasSuffix(path, "/"+last+".rs")
				found = found || inModule && (isModule || function.MatchString(text))
			}
			if !found {
				t.Errorf("no Rust test matches %q", filter)
			}
		}
	}
}
