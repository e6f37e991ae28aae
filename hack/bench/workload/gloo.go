package workload

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/internal/child"
)

// GlooAlgorithms are those that Gloo's library has.
var GlooAlgorithms = []string{"ring", "ring_chunked", "halving_doubling", "bcube", "new_ring", "new_bcube"}

const (
	// glooTries is more than one because Gloo's ranks sometimes fail when one of them exits before the others.
	glooTries = 3
	// glooTLSTimeout is several times what a try over TLS takes, if it ends.
	glooTLSTimeout = 20 * time.Second
)

// A Gloo is a build of Gloo's library with a driver.
type Gloo struct {
	folder       string       // with the driver
	versions     string       // see [experiment.Measured]
	certificates certificates // of all ranks; none in clear
}

// DebianGloo builds the driver with Debian's library, which has no TLS. It installs what that takes.
func DebianGloo(ctx context.Context, progress io.Writer) (*Gloo, error) {
	installed := toolbox.Program{Name: "/usr/include/gloo/allreduce.h", Package: "libgloo-dev"}
	return newGloo(ctx, progress, []toolbox.Program{installed}, "-lgloo")
}

// NewGlooTLS builds the driver with a library of Gloo's that has TLS, from Debian's sources, and makes certificates for
// the ranks. It installs what that takes.
func NewGlooTLS(ctx context.Context, progress io.Writer) (g *Gloo, err error) {
	dir, version, err := toolbox.GlooWithTLS(ctx, progress)
	if err != nil {
		return nil, err
	}
	g, err = newGloo(ctx, progress, []toolbox.Program{{Name: "openssl", Package: "openssl"}},
		"-I"+filepath.Join(dir, "include"), filepath.Join(dir, "lib", "libgloo.a"), "-lssl", "-lcrypto")
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, g.Close())
		}
	}()
	openssl, err := proc.Output(ctx, child.Command(ctx, "", "openssl", "version"))
	if err != nil {
		return nil, err
	}
	words := strings.Fields(string(openssl)) // and the day of its release
	g.versions = "Gloo " + version + " and " + strings.Join(words[:min(2, len(words))], " ")
	g.certificates, err = makeCertificates(g.folder)
	return g, err
}

// newGloo compiles the driver with what its library needs: files and flags.
func newGloo(ctx context.Context, progress io.Writer, files []toolbox.Program, flags ...string) (g *Gloo, err error) {
	root, err := toolbox.Root()
	if err != nil {
		return nil, err
	}
	if err := toolbox.EnsurePrograms(ctx, progress, append(files, toolbox.Program{Name: "g++", Package: "g++"})); err != nil {
		return nil, err
	}
	folder, err := os.MkdirTemp("", "evenkeel-gloo-")
	if err != nil {
		return nil, fmt.Errorf("Gloo's driver: %w", err)
	}
	g = &Gloo{folder: folder}
	source := filepath.Join(root, "hack", "bench", "workload", "gloo", "driver.cc")
	args := slices.Concat([]string{"-std=c++17", "-O2", "-o", g.driver(), source}, flags, []string{"-pthread"})
	if out, err := exec.CommandContext(ctx, "g++", args...).CombinedOutput(); err != nil {
		return nil, errors.Join(fmt.Errorf("g++: %w\n%s", err, out), g.Close())
	}
	return g, nil
}

// Close removes its files.
func (g *Gloo) Close() error { return os.RemoveAll(g.folder) }

func (g *Gloo) driver() string { return filepath.Join(g.folder, "driver") }

// Gloo all-reduces over TCP by one of [GlooAlgorithms]. The build is known when it runs.
func (w Collective) Gloo(algorithm string, build func() *Gloo) experiment.Contender {
	return w.tried("Gloo, "+algorithm, tryTimeout, false, func(ctx context.Context, r experiment.Run) (experiment.Measured, error) {
		return w.driven(ctx, r, build(), algorithm)
	})
}

// GlooTLS does the same over TLS. Some algorithms do not end at large sizes; the first run whose tries all fail is the
// last.
func (w Collective) GlooTLS(algorithm string, build func() *Gloo) experiment.Contender {
	c := w.tried("Gloo with TLS, "+algorithm, glooTLSTimeout, true, func(ctx context.Context, r experiment.Run) (experiment.Measured, error) {
		files := build().certificates
		return w.driven(ctx, r, build(), algorithm, "--tls", files.certificate, files.key, files.authority)
	})
	c.Base = "Gloo, " + algorithm
	return c
}

// tried tries a run several times, each within a limit. With giveUp, no run follows one whose tries have all failed.
func (w Collective) tried(
	name string, limit time.Duration, giveUp bool, run func(context.Context, experiment.Run) (experiment.Measured, error),
) experiment.Contender {
	leftOut := false
	once := func(ctx context.Context, r experiment.Run) (experiment.Measured, error) {
		ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not done within %s", limit))
		defer cancel()
		return run(ctx, r)
	}
	return experiment.Contender{Name: name, Reference: true, Run: func(ctx context.Context, r experiment.Run) (m experiment.Measured, err error) {
		if leftOut {
			return m, fmt.Errorf("left out, as all of %d tries of an earlier run failed", glooTries)
		}
		for failed := range glooTries {
			m, err = once(ctx, r)
			if err == nil {
				m.Values[FailedTries] = float64(failed)
				return m, nil
			}
			if ctx.Err() != nil {
				return m, err
			}
		}
		leftOut = giveUp
		return m, fmt.Errorf("all of %d tries failed, the last one with: %w", glooTries, err)
	}}
}

// driven runs an algorithm by the driver, with more options in front.
func (w Collective) driven(ctx context.Context, r experiment.Run, build *Gloo, algorithm string, options ...string) (m experiment.Measured, err error) {
	out, err := w.ranks(ctx, r.Lab, nil, func(rank int, device, store string) []string {
		argv := slices.Concat([]string{build.driver()}, options,
			[]string{strconv.Itoa(rank), strconv.Itoa(w.Ranks), store, device, algorithm, strconv.FormatInt(w.Length.Milliseconds(), 10)})
		for _, n := range w.Elements {
			argv = append(argv, strconv.Itoa(n))
		}
		return argv
	})
	if err != nil {
		return m, err
	}
	all := figures{}
	for line := range strings.Lines(string(out)) {
		var n, samples int
		var f figure
		if _, err := fmt.Sscan(line, &n, &samples, &f.min, &f.median); err != nil {
			return m, fmt.Errorf("unexpected line of Gloo's driver: %q: %w", line, err)
		}
		all[n] = f
	}
	m, err = w.measured(all)
	m.Versions = build.versions
	return m, err
}

// glooBenchmarks are the algorithms that Gloo's benchmark program has, and their names there.
var glooBenchmarks = map[string]string{
	"ring":             "allreduce_ring",
	"ring_chunked":     "allreduce_ring_chunked",
	"halving_doubling": "allreduce_halving_doubling",
	"bcube":            "allreduce_bcube",
	"new_ring":         "new_allreduce_ring",
}

// GlooBenchmark all-reduces by each algorithm of Gloo's benchmark program, built elsewhere. The program takes one
// number of elements, and so is started once for each.
func (w Collective) GlooBenchmark(name, program string) ([]experiment.Contender, error) {
	info, err := os.Stat(program)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if info.IsDir() || info.Mode()&0o111 == 0 {
		return nil, fmt.Errorf("%s: %s is not a program: Gloo's benchmark is needed, gloo/benchmark/benchmark in its build folder", name, program)
	}
	var all []experiment.Contender
	for _, algorithm := range GlooAlgorithms {
		benchmark, has := glooBenchmarks[algorithm]
		if !has {
			continue
		}
		all = append(all, w.tried(name+", "+algorithm, tryTimeout, false, func(ctx context.Context, r experiment.Run) (m experiment.Measured, err error) {
			all := figures{}
			for _, n := range w.Elements {
				out, err := w.ranks(ctx, r.Lab, nil, func(rank int, device, store string) []string {
					return []string{
						program, "--size", strconv.Itoa(w.Ranks), "--rank", strconv.Itoa(rank), "--shared-path", store, "--prefix", "evenkeel",
						"--transport", "tcp", "--tcp-device", device, "--elements", strconv.Itoa(n), "--no-verify", "--iteration-time", w.length(), benchmark,
					}
				})
				if err != nil {
					return m, fmt.Errorf("%d elements: %w", n, err)
				}
				if all[n], err = readGlooBenchmark(string(out), n); err != nil {
					return m, err
				}
			}
			return w.measured(all)
		}))
	}
	return all, nil
}

// readGlooBenchmark finds the row of a number of float32 in the output of Gloo's benchmark: elements, minimum and
// median time in microseconds. Newer versions print the bytes in front of them.
func readGlooBenchmark(text string, elements int) (figure, error) {
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
