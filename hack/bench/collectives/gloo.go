package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// A library is the Gloo that is measured.
type library struct {
	label      string   // for the page
	algorithms []string // that it has
	// prepare is called once before the first run, with a folder for its files.
	prepare func(ctx context.Context, root, folder string) error
	runs    func(folder, algorithm string) func(context.Context, task) (map[int]figure, error)
}

// whichGloo is Debian's Gloo, or that of one of Gloo's benchmark programs.
func whichGloo(program string) (library, error) {
	if program == "" {
		return debianGloo(), nil
	}
	info, err := os.Stat(program)
	if err != nil {
		return library{}, fmt.Errorf("--gloo: %w", err)
	}
	if info.IsDir() || info.Mode()&0o111 == 0 {
		return library{}, fmt.Errorf("--gloo %s: not a program: Gloo's benchmark is needed, gloo/benchmark/benchmark in its build folder", program)
	}
	path, err := filepath.Abs(program)
	return benchmarkGloo(path), err
}

// debianGloo is Debian's library with the driver of this folder.
func debianGloo() library {
	return library{
		label:      "Debian's libgloo",
		algorithms: algorithms,
		prepare: func(ctx context.Context, root, folder string) error {
			installed := toolbox.Program{Name: "/usr/include/gloo/allreduce.h", Package: "libgloo-dev"}
			return buildDriver(ctx, root, folder, []toolbox.Program{installed}, "-lgloo")
		},
		runs: func(folder, algorithm string) func(context.Context, task) (map[int]figure, error) {
			return driven(folder, algorithm)
		},
	}
}

// driven runs an algorithm by the driver that was built into a folder, with more options in front.
func driven(folder, algorithm string, more ...string) func(context.Context, task) (map[int]figure, error) {
	return func(ctx context.Context, t task) (map[int]figure, error) {
		out, err := ranks(ctx, folder, t, func(rank int, store string) []string {
			argv := append([]string{filepath.Join(folder, "driver")}, more...)
			argv = append(argv, strconv.Itoa(rank), strconv.Itoa(t.ranks), store, t.network.device, algorithm, strconv.FormatInt(t.length.Milliseconds(), 10))
			for _, n := range t.elements {
				argv = append(argv, strconv.Itoa(n))
			}
			return argv
		})
		if err != nil {
			return nil, err
		}
		figures := map[int]figure{}
		for line := range strings.Lines(string(out)) {
			var n, samples int
			var f figure
			if _, err := fmt.Sscan(line, &n, &samples, &f.min, &f.median); err != nil {
				return nil, fmt.Errorf("unexpected line of the driver: %q: %w", line, err)
			}
			figures[n] = f
		}
		return figures, complete(figures, t.elements)
	}
}

// buildDriver compiles the driver into a folder, with what its library needs: files and flags.
func buildDriver(ctx context.Context, root, folder string, files []toolbox.Program, flags ...string) error {
	if err := toolbox.EnsurePrograms(ctx, os.Stderr, append(files, toolbox.Program{Name: "g++", Package: "g++"})); err != nil {
		return err
	}
	source := filepath.Join(root, "hack", "bench", "collectives", "driver", "driver.cc")
	args := slices.Concat([]string{"-std=c++17", "-O2", "-o", filepath.Join(folder, "driver"), source}, flags, []string{"-pthread"})
	if out, err := exec.CommandContext(ctx, "g++", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("g++: %w\n%s", err, out)
	}
	return nil
}

// benchmarkNames are the names of the algorithms in Gloo's benchmark.
var benchmarkNames = map[string]string{
	"ring":             "allreduce_ring",
	"ring_chunked":     "allreduce_ring_chunked",
	"halving_doubling": "allreduce_halving_doubling",
	"bcube":            "allreduce_bcube",
	"new_ring":         "new_allreduce_ring",
}

// benchmarked is a program of Gloo's. It takes one number of elements, and so is started once for each.
func benchmarkGloo(program string) library {
	lacks := func(algorithm string) bool { return benchmarkNames[algorithm] == "" }
	return library{
		label:      "a Gloo benchmark that was built elsewhere",
		algorithms: slices.DeleteFunc(slices.Clone(algorithms), lacks),
		prepare:    func(context.Context, string, string) error { return nil },
		runs: func(folder, algorithm string) func(context.Context, task) (map[int]figure, error) {
			return func(ctx context.Context, t task) (map[int]figure, error) {
				figures := map[int]figure{}
				for _, n := range t.elements {
					out, err := ranks(ctx, folder, t, func(rank int, store string) []string {
						return []string{program, "--size", strconv.Itoa(t.ranks), "--rank", strconv.Itoa(rank), "--shared-path", store, "--prefix", "evenkeel",
							"--transport", "tcp", "--tcp-device", t.network.device, "--elements", strconv.Itoa(n), "--no-verify",
							"--iteration-time", fmt.Sprintf("%dms", t.length.Milliseconds()), benchmarkNames[algorithm]}
					})
					if err != nil {
						return nil, fmt.Errorf("%d elements: %w", n, err)
					}
					if figures[n], err = readBenchmark(string(out), n); err != nil {
						return nil, err
					}
				}
				return figures, nil
			}
		},
	}
}

// readBenchmark finds the row of a number of float32 in the output of Gloo's benchmark: elements, minimum and median time in
// microseconds. Newer versions print the bytes in front of them.
func readBenchmark(text string, elements int) (figure, error) {
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		bytes := len(fields) > 1 && fields[0] == strconv.Itoa(4*elements) && fields[1] == strconv.Itoa(elements)
		if bytes {
			fields = fields[1:]
		}
		if len(fields) < 3 || fields[0] != strconv.Itoa(elements) {
			continue
		}
		var f figure
		if _, err := fmt.Sscan(fields[1]+" "+fields[2], &f.min, &f.median); err == nil && f.min > 0 {
			return f, nil
		}
	}
	return figure{}, fmt.Errorf("no row for %d elements in the output of Gloo's benchmark: %q", elements, text)
}
