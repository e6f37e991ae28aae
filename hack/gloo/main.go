// Command gloo measures Evenkeel's all-reduce beside Gloo's, on this machine, in turns, and writes the results page.
//
//	go run ./hack/gloo            # Debian's libgloo-dev and g++ are needed
//	go run ./hack/gloo --quick    # less of everything
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

const (
	page = "docs/results/collectives.md"
	// runTimeout bounds one run of one contender, which takes seconds.
	runTimeout = 5 * time.Minute
)

var sweep = []int{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000, 2_000_000, 5_000_000}

// Gloo's algorithms; the best of them at each size is the measure.
var algorithms = []string{"ring", "ring_chunked", "halving_doubling", "new_ring"}

// A figure is what a run gave for one number of elements, in microseconds.
type figure struct{ least, median float64 }

// A contender runs all ranks once and gives its figures by number of elements.
type contender struct {
	name string
	run  func(ctx context.Context, ranks int, length time.Duration, elements []int) (map[int]figure, error)
}

func main() {
	// Children are killed when the thread that started them ends: it is to be this one.
	runtime.LockOSThread()
	quick := flag.Bool("quick", false, "two rounds, few sizes; the page is not written")
	rounds := flag.Int("rounds", 5, "rounds, in each of which everybody is measured once")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "error: %q: there are only flags, see --help\n", flag.Arg(0))
		os.Exit(1)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := compare(ctx, *quick, *rounds); err != nil {
		fmt.Fprintf(os.Stderr, "error: %v\n", err)
		os.Exit(1)
	}
}

func compare(ctx context.Context, quick bool, rounds int) error {
	if rounds < 1 {
		return fmt.Errorf("--rounds %d: 1 or more", rounds)
	}
	length, elements := 100*time.Millisecond, sweep
	if quick {
		rounds, length, elements = 2, 30*time.Millisecond, []int{1, 1000, 100_000, 1_000_000}
	}
	root, err := toolbox.Root()
	if err != nil {
		return err
	}
	if err := os.Chdir(root); err != nil { // the paths below are the checkout's
		return err
	}
	folder, err := os.MkdirTemp("", "evenkeel-gloo-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	driver, err := build(ctx, folder)
	if err != nil {
		return err
	}
	bench, err := benchmark(ctx)
	if err != nil {
		return err
	}
	contenders := []contender{
		{"Evenkeel, TCP", ours(bench, "tcp")},
		{"Evenkeel, shared memory", ours(bench, "shm")},
	}
	for _, algorithm := range algorithms {
		contenders = append(contenders, contender{"Gloo, " + algorithm, theirs(driver, folder, algorithm)})
	}
	var text strings.Builder
	fmt.Fprintf(&text, heading, machine(), rounds, length)
	for _, ranks := range []int{2, 4} {
		results := map[string]map[int]figure{}
		for round := range rounds {
			for i := range contenders {
				// Whoever was first is last in the next round.
				c := contenders[(i+round)%len(contenders)]
				fmt.Fprintf(os.Stderr, "%d processes, round %d of %d: %s\n", ranks, round+1, rounds, c.name)
				figures, err := c.run(ctx, ranks, length, elements)
				if err != nil {
					return fmt.Errorf("%s, %d processes: %w", c.name, ranks, err)
				}
				results[c.name] = better(results[c.name], figures)
			}
		}
		table(&text, ranks, elements, results)
	}
	if quick {
		_, err := io.WriteString(os.Stdout, text.String())
		return err
	}
	return os.WriteFile(page, []byte(text.String()), 0o644)
}

const heading = `# Collectives beside Gloo

` + "`go run ./hack/gloo`" + ` measures this: an all-reduce (sum of float32) by Evenkeel, which chooses the algorithm, and by Debian's libgloo over TCP with
each of its algorithms that suits, of which the best one at each size is shown. Everybody takes a turn in each round, with the other order in the next.
Figures are the least time of all rounds, and the median of the round with the least median, in microseconds, on rank 0. Everything is on one machine:
processes share its cores, so that with more processes than cores the medians are mostly those of the scheduler.

%s; loopback; %d rounds, %s for each figure.
`

// better keeps the least times of both.
func better(before, now map[int]figure) map[int]figure {
	if before == nil {
		return now
	}
	for elements, f := range now {
		b := before[elements]
		before[elements] = figure{min(b.least, f.least), min(b.median, f.median)}
	}
	return before
}

func table(text *strings.Builder, ranks int, elements []int, results map[string]map[int]figure) {
	fmt.Fprintf(text, "\n## %d processes\n\n", ranks)
	fmt.Fprintln(text, "| elements | Gloo, least / median (algorithm) | Evenkeel, TCP | ratio | Evenkeel, shared memory | ratio |")
	fmt.Fprintln(text, "|--:|--:|--:|--:|--:|--:|")
	reached, most := 0, 0
	for _, n := range elements {
		gloo, name := figure{}, ""
		for _, algorithm := range algorithms {
			f := results["Gloo, "+algorithm][n]
			if name == "" || f.median < gloo.median {
				gloo.median, name = f.median, algorithm
			}
			if gloo.least == 0 || f.least < gloo.least {
				gloo.least = f.least
			}
		}
		tcp, shm := results["Evenkeel, TCP"][n], results["Evenkeel, shared memory"][n]
		if tcp.least <= gloo.least && tcp.median <= gloo.median {
			reached++
		}
		if tcp.least <= 0.7*gloo.least && tcp.median <= 0.7*gloo.median {
			most++
		}
		fmt.Fprintf(text, "| %d | %.0f / %.0f (%s) | %.0f / %.0f | %.2f / %.2f | %.0f / %.0f | %.2f / %.2f |\n", n,
			gloo.least, gloo.median, name, tcp.least, tcp.median, tcp.least/gloo.least, tcp.median/gloo.median,
			shm.least, shm.median, shm.least/gloo.least, shm.median/gloo.median)
	}
	fmt.Fprintf(text, "\nOver TCP, least and median are no more than Gloo's best at %d of %d sizes, and no more than 0.7 of it at %d.\n", reached, len(elements), most)
}

// build compiles the driver.
func build(ctx context.Context, folder string) (string, error) {
	needed := []toolbox.Program{{Name: "g++", Package: "g++"}, {Name: "/usr/include/gloo/allreduce.h", Package: "libgloo-dev"}}
	if err := toolbox.EnsurePrograms(ctx, os.Stderr, needed); err != nil {
		return "", err
	}
	driver := filepath.Join(folder, "driver")
	cmd := exec.CommandContext(ctx, "g++", "-std=c++17", "-O2", "-o", driver, "hack/gloo/driver/driver.cc", "-lgloo", "-pthread")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("g++: %w\n%s", err, out)
	}
	return driver, nil
}

// benchmark builds evenkeel-bench.
func benchmark(ctx context.Context) (string, error) {
	cmd := exec.CommandContext(ctx, "cargo", "build", "--locked", "--release", "-p", "evenkeel-bench")
	cmd.Dir, cmd.Stderr = "plugin", os.Stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("cargo build: %w", err)
	}
	return filepath.Abs("plugin/target/release/evenkeel-bench")
}

func ours(bench, transport string) func(context.Context, int, time.Duration, []int) (map[int]figure, error) {
	return func(ctx context.Context, ranks int, length time.Duration, elements []int) (map[int]figure, error) {
		ctx, cancel := context.WithTimeout(ctx, runTimeout)
		defer cancel()
		list := strings.ReplaceAll(strings.Trim(fmt.Sprint(elements), "[]"), " ", ",")
		out, err := output(command(ctx, bench, "collective", "--spawn", strconv.Itoa(ranks), "--transport", transport,
			"--elements", list, "--iteration-time", fmt.Sprintf("%dms", length.Milliseconds()), "--json"))
		if err != nil {
			return nil, err
		}
		var report struct {
			Rows []struct {
				Elements int
				Min      float64 `json:"min_us"`
				Median   float64 `json:"p50_us"`
			}
		}
		if err := json.Unmarshal(out, &report); err != nil {
			return nil, fmt.Errorf("evenkeel-bench's report: %w", err)
		}
		figures := map[int]figure{}
		for _, row := range report.Rows {
			figures[row.Elements] = figure{row.Min, row.Median}
		}
		return figures, complete(figures, elements)
	}
}

func theirs(driver, folder, algorithm string) func(context.Context, int, time.Duration, []int) (map[int]figure, error) {
	return func(ctx context.Context, ranks int, length time.Duration, elements []int) (map[int]figure, error) {
		store, err := os.MkdirTemp(folder, "store-")
		if err != nil {
			return nil, err
		}
		ctx, cancel := context.WithTimeout(ctx, runTimeout)
		defer cancel()
		var others []*exec.Cmd
		defer func() {
			cancel()
			for _, cmd := range others {
				_ = cmd.Wait() // rank 0 has said what there is to say
			}
		}()
		var first *exec.Cmd
		for rank := ranks - 1; rank >= 0; rank-- {
			args := []string{strconv.Itoa(rank), strconv.Itoa(ranks), store, "lo", algorithm, strconv.FormatInt(length.Milliseconds(), 10)}
			for _, n := range elements {
				args = append(args, strconv.Itoa(n))
			}
			cmd := command(ctx, driver, args...)
			if rank == 0 {
				first = cmd
				continue
			}
			if err := cmd.Start(); err != nil {
				return nil, err
			}
			others = append(others, cmd)
		}
		out, err := output(first)
		if err != nil {
			return nil, err
		}
		figures := map[int]figure{}
		for line := range strings.Lines(string(out)) {
			var n, samples int
			var f figure
			if _, err := fmt.Sscan(line, &n, &samples, &f.least, &f.median); err != nil {
				return nil, fmt.Errorf("the driver's %q: %w", line, err)
			}
			figures[n] = f
		}
		return figures, complete(figures, elements)
	}
}

// command is killed with this process, however that ends.
func command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

func output(cmd *exec.Cmd) ([]byte, error) {
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, strings.TrimSpace(stderr.String()))
	}
	return out, nil
}

func complete(figures map[int]figure, elements []int) error {
	for _, n := range elements {
		if _, ok := figures[n]; !ok {
			return fmt.Errorf("no figure for %d elements", n)
		}
	}
	return nil
}

// machine is what ran it, for people.
func machine() string {
	model, err := processor()
	if err != nil {
		model = "unknown processor"
	}
	var name syscall.Utsname
	release := "unknown"
	if syscall.Uname(&name) == nil {
		bytes := make([]byte, 0, len(name.Release))
		for _, c := range name.Release {
			if c == 0 {
				break
			}
			bytes = append(bytes, byte(c))
		}
		release = string(bytes)
	}
	cores, err := os.ReadFile("/sys/devices/system/cpu/online")
	if err != nil {
		cores = []byte("unknown")
	}
	return fmt.Sprintf("Cores %s of an %s, Linux %s", strings.TrimSpace(string(cores)), model, release)
}

func processor() (string, error) {
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return "", err
	}
	lines := strings.Split(string(info), "\n")
	i := slices.IndexFunc(lines, func(line string) bool { return strings.HasPrefix(line, "model name") })
	if i < 0 {
		return "", errors.New("no model name")
	}
	_, model, _ := strings.Cut(lines[i], ":")
	return strings.TrimSpace(model), nil
}
