// Package affected finds the stages of tests that a change can affect.
package affected

import (
	"path"
	"slices"
	"strings"
)

// A Stage is what the result of a stage of tests depends on.
type Stage struct {
	Name string
	// Tests are the packages of Go whose tests it runs.
	Tests []Packages
	// Programs are Go packages that its tests build and run.
	Programs []string
	// Crates are the Rust packages that it tests, or runs in another way; "*" is all.
	Crates []string
	// Reads are what neither build tool knows: files, and folders with a slash behind them. "*.md" is every file with such
	// a name.
	Reads []string
	// Always is a stage that every change affects.
	Always bool
}

// Packages are Go packages with build tags.
type Packages struct {
	Tags     string
	Patterns []string
}

// A Graph is what the build tools know.
type Graph struct {
	// Folders are all folders of Go packages, and all of Rust packages, from the root of the repository.
	Folders []string
	// Needs are the folders of Go and Rust packages that a stage depends on.
	Needs map[string][]string
}

// A Choice is the stages to run, and for each of them a file that affects it.
type Choice struct {
	Stages []string
	Why    map[string]string
	// Unknown is a file that no stage is known to depend on, so that every stage runs.
	Unknown string
}

// Choose returns the stages that the changed files can affect, in their order.
func Choose(changed []string, stages []Stage, graph Graph) Choice {
	c := Choice{Why: map[string]string{}}
	for _, file := range changed {
		owner := owner(file, graph.Folders)
		known := owner != ""
		for _, s := range stages {
			reads := slices.ContainsFunc(s.Reads, func(pattern string) bool { return matches(file, pattern) })
			known = known || reads
			if s.Always || reads || owner != "" && slices.Contains(graph.Needs[s.Name], owner) {
				c.add(s.Name, file)
			}
		}
		if !known {
			c.Unknown = file
			for _, s := range stages {
				c.add(s.Name, file)
			}
		}
	}
	for _, s := range stages {
		if c.Why[s.Name] != "" {
			c.Stages = append(c.Stages, s.Name)
		}
	}
	return c
}

func (c *Choice) add(stage, file string) {
	if c.Why[stage] == "" {
		c.Why[stage] = file
	}
}

// owner returns the innermost of the folders that the file is in, or "". A file below a package's folder is the
// package's: it may be embedded, or read by a test.
func owner(file string, folders []string) string {
	for dir := path.Dir(file); dir != "."; dir = path.Dir(dir) {
		if slices.Contains(folders, dir) {
			return dir
		}
	}
	return ""
}

func matches(file, pattern string) bool {
	if suffix, ok := strings.CutPrefix(pattern, "*"); ok {
		return strings.HasSuffix(file, suffix)
	}
	return file == pattern || strings.HasSuffix(pattern, "/") && strings.HasPrefix(file, pattern)
}
