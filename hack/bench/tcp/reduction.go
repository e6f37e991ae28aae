package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

const (
	reductionLab = "reduction"
	// reductionPort is where servers listen.
	reductionPort = 7470
	// smallBytes is the small all-reduce's vector.
	smallBytes = 1 << 10
	// memoryJobs share a server whose buffers are bound to memoryBound.
	memoryJobs  = 64
	memoryBound = 256 << 20
	// memoryPatience is how long the jobs may take: each is three programs, which
	// all start at once, on however few processors.
	memoryPatience = 5 * time.Minute
)

// A reductionCase is a star of clients and servers with links of one rate.
type reductionCase struct {
	Name             string
	Clients, Servers int
	Rate             netns.Rate
	// Size is the vector's, in bytes.
	Size int
	// OfLink and OfRing are what is to be reached: shares of the link's rate and
	// of the ring's.
	OfLink, OfRing float64
	// Drawn has one all-reduce drawn piece by piece.
	Drawn bool
}

func (c reductionCase) title() string {
	return fmt.Sprintf("%d clients, %d servers, links of %s", c.Clients, c.Servers, c.Rate)
}

// limit is the algorithm bandwidth that the links allow: each byte passes a
// client's link once in each direction.
func (c reductionCase) limit() float64 { return wireLimit(c.Rate) }

// reductionCases are the cases with links. Slower ones show the network where the
// processors, which all hosts share, are too few for the faster ones.
func reductionCases() []reductionCase {
	var all []reductionCase
	for _, rate := range []netns.Rate{netns.Gbit, 250 * netns.Mbit} {
		for _, n := range []int{4, 2} {
			c := reductionCase{Name: fmt.Sprintf("%d+%d-%s", n, n, rate), Clients: n, Servers: n, Rate: rate, Size: 64 << 20, OfLink: 0.9, Drawn: n == 4}
			if rate < netns.Gbit {
				c.Size = 32 << 20
			}
			if n == 4 {
				c.OfRing = 1.3
			}
			all = append(all, c)
		}
	}
	return all
}

// A reducer is one way to reduce, as flags of evenkeel-bench.
type reducer struct {
	Name  string
	flags []string
}

var (
	byServers = reducer{"reduction servers", []string{"--run-type", "servers"}}
	inPieces  = reducer{"servers, operations of 512 KiB", []string{"--run-type", "servers", "--chunksize", "512K"}}
	byRing    = reducer{"ring", []string{"--run-type", "ring"}}
	reducers  = []reducer{byServers, inPieces, byRing}
)

// A reduced is what one run gave.
type reduced struct {
	Algbw float64 // GB/s
	E2E   float64 // median of an operation, seconds
	CPU   float64 // processor seconds of the clients for each GB of the vector
	Busy  float64 // share of all processors' time that any program used
}

// A reductionResult is one case as it was measured; it has what the case gives.
type reductionResult struct {
	Name    string
	Commit  string
	Machine machine
	Runs    int
	Star    *starResult
	Small   []smallRound
	Memory  *memoryResult
	Kernels []kernelRow
}

// readEarlierReduction reads the cases of docs/results/reduction.md.
func readEarlierReduction(m machine, o options) (*earlier[reductionResult], error) {
	name := func(r reductionResult) string { return r.Name }
	return readEarlier("reduction", o, reductionNames(), name, func(r *reductionResult) bool {
		if !r.Machine.is(m) || !slices.Contains(reductionNames(), r.Name) {
			return false
		}
		for _, c := range reductionCases() {
			if c.Name == r.Name && r.Star != nil {
				r.Star.Case = c
			}
		}
		return true
	})
}

func reductionCommand() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   "reduction",
		Short: "Measure reduction servers beside a ring, and write the result",
		Long: `Measure reduction servers beside a ring over the same plugin and links, and write the result.

Clients and servers are hosts around a switch, each with a link of its own. In each of several rounds
all contenders run one after the other. Needs root, and a machine that does nothing else, for about 10 minutes.

Results are kept in the cache: with --only, the page has the other cases as they were last measured on
this machine, each with its commit.`,
		Example: `  go run ./hack/bench/tcp reduction
  go run ./hack/bench/tcp reduction --only small
  go run ./hack/bench/tcp reduction --quick --only '2\+2'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return benchReduction(cmd.Context(), cmd.OutOrStdout(), o)
		},
	}
	cmd.Flags().BoolVar(&o.quick, "quick", false, "less of everything; the page is printed, and written only with --output")
	cmd.Flags().IntVar(&o.runs, "runs", 0, "rounds (default 5, or 2 with --quick)")
	cmd.Flags().StringVar(&o.only, "only", "", "only cases that this regular expression matches: "+strings.Join(reductionNames(), ", "))
	cmd.Flags().StringVar(&o.library, "library", "", "the plugin to measure (default: built from this checkout)")
	cmd.Flags().StringVar(&o.driver, "driver", "", "the evenkeel-bench to measure it with, beside evenkeel-reduction-server (default: built from this checkout)")
	cmd.Flags().StringVar(&o.congestion, "congestion", "", "TCP congestion control (default the machine's for new namespaces)")
	cmd.Flags().StringVar(&o.output, "output", "", "folder for reduction.md and its drawings (default docs/results)")
	cmd.AddCommand(enterCommand())
	return cmd
}

func reductionNames() []string {
	var names []string
	for _, c := range reductionCases() {
		names = append(names, c.Name)
	}
	return append(names, "small", "memory", "kernels")
}

// enterCommand runs a line of shell on a host of a lab, as ssh does on one of
// the real world.
func enterCommand() *cobra.Command {
	return &cobra.Command{
		Use: "enter LAB HOST LINE", Hidden: true, Args: cobra.ExactArgs(3),
		RunE: func(cmd *cobra.Command, args []string) error {
			lab, err := netns.Open(args[0])
			if err != nil {
				return err
			}
			inside, err := lab.Command(cmd.Context(), netns.Host(args[1]), "sh", "-c", args[2])
			if err != nil {
				return err
			}
			// It becomes the command: whoever ends this, ends that.
			return syscall.Exec(inside.Path, inside.Args, os.Environ())
		},
	}
}

// A reductionBencher measures reduction servers.
type reductionBencher struct {
	options options
	out     io.Writer
	root    string
	folder  string // for hosts' files and drawings
}

func benchReduction(ctx context.Context, out io.Writer, o options) error {
	only, err := regexp.Compile(o.only)
	if err != nil {
		return fmt.Errorf("--only: %w", err)
	}
	switch {
	case o.runs < 0 || o.runs > mostRuns:
		return fmt.Errorf("--runs %d: from 1 to %d", o.runs, mostRuns)
	case o.runs == 0 && o.quick:
		o.runs = 2
	case o.runs == 0:
		o.runs = 5
	}
	if os.Geteuid() != 0 {
		return errors.New("making networks needs root")
	}
	root, err := toolbox.Root()
	if err != nil {
		return err
	}
	// Before the build, which is what would make the machine look busy.
	machine, commit := describeMachine(), toolbox.Commit(ctx, root, "plugin", "hack")
	if err := o.buildMissing(ctx, root); err != nil {
		return err
	}
	if o.library, err = filepath.Abs(o.library); err != nil {
		return err
	}
	folder, err := os.MkdirTemp("", "evenkeel-reduction-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	results, err := readEarlierReduction(machine, o)
	if err != nil {
		return err
	}
	b := reductionBencher{options: o, out: out, root: root, folder: folder}
	measured, begin := 0, time.Now()
	for _, part := range b.parts() {
		if !only.MatchString(part.name) {
			continue
		}
		result := reductionResult{Name: part.name, Commit: commit, Machine: machine, Runs: o.runs}
		if err := part.measure(ctx, &result); err != nil {
			return fmt.Errorf("%s: %w", part.name, err)
		}
		if err := results.add(result); err != nil {
			return err
		}
		measured++
		fmt.Fprintf(out, "  %s since the begin\n", time.Since(begin).Round(time.Second))
	}
	if measured == 0 {
		return fmt.Errorf("--only %q matches none of the cases: %s", o.only, strings.Join(reductionNames(), ", "))
	}
	page := reductionPage{Machine: machine, Quick: o.quick, Results: results.cases}
	if o.output == "" && o.quick {
		_, err := out.Write(page.markdown())
		return err
	}
	if o.output == "" {
		o.output = filepath.Join(root, "docs", "results")
	}
	return page.write(out, o.output)
}

// A reductionPart measures one case.
type reductionPart struct {
	name    string
	measure func(context.Context, *reductionResult) error
}

func (b reductionBencher) parts() []reductionPart {
	var all []reductionPart
	for _, c := range reductionCases() {
		all = append(all, reductionPart{c.Name, func(ctx context.Context, result *reductionResult) error {
			star, err := b.star(ctx, c)
			result.Star = &star
			return err
		}})
	}
	return append(all, reductionPart{"small", b.small}, reductionPart{"memory", b.memory}, reductionPart{"kernels", b.kernels})
}

// up makes a star for so many clients and servers, and writes the file that says
// who is where.
func (b reductionBencher) up(ctx context.Context, c reductionCase) (lab *netns.Lab, hosts string, err error) {
	config := netns.Config{Name: reductionLab, Congestion: b.options.congestion}
	for range c.Clients + c.Servers {
		config.Star = append(config.Star, c.Rate)
	}
	if lab, err = netns.Up(ctx, config); err != nil {
		return nil, "", err
	}
	var text strings.Builder
	list := func(kind string, from, count int) {
		fmt.Fprintf(&text, "%s:\n", kind)
		for link := from; link < from+count; link++ {
			host := netns.StarHost(link)
			fmt.Fprintf(&text, "  - {name: %s, address: %s, port: %d, env: {NCCL_SOCKET_IFNAME: %s}}\n", host, lab.Address(host), reductionPort, netns.DataInterface)
		}
	}
	list("clients", 0, c.Clients)
	list("servers", c.Clients, c.Servers)
	hosts = filepath.Join(b.folder, "hosts.yaml")
	if err := os.WriteFile(hosts, []byte(text.String()), 0o644); err != nil {
		return nil, "", errors.Join(err, lab.Down(ctx))
	}
	return lab, hosts, nil
}

// once runs evenkeel-bench on the hosts of a file.
func (b reductionBencher) once(ctx context.Context, hosts string, flags ...string) (reduced, error) {
	self, err := os.Executable()
	if err != nil {
		return reduced{}, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("not done within %s", patience))
	defer cancel()
	rsh := fmt.Sprintf("%s reduction enter %s", self, reductionLab)
	flags = append([]string{"reduction", "--hosts", hosts, "--rsh", rsh, "--plugin", b.options.library, "--json", "--timeout", "60"}, flags...)
	before := readTicks()
	text, err := output(ctx, b.options.driver, flags...)
	if err != nil {
		return reduced{}, err
	}
	var report struct {
		Clients struct {
			Size       float64
			Algbw, CPU float64
			Wrong      int
			E2E        struct{ Median float64 }
		}
	}
	if err := json.Unmarshal(text, &report); err != nil || report.Clients.Algbw == 0 {
		return reduced{}, fmt.Errorf("what evenkeel-bench reported: %q", text)
	}
	c := report.Clients
	if c.Wrong > 0 {
		return reduced{}, fmt.Errorf("%d elements are wrong", c.Wrong)
	}
	return reduced{Algbw: c.Algbw, E2E: c.E2E.Median / 1e6, CPU: c.CPU / (c.Size / 1e9), Busy: before.busySince()}, nil
}

// output is what a program wrote; its failure quotes what it said.
func output(ctx context.Context, program string, arguments ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, program, arguments...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = 10 * time.Second
	text, err := cmd.Output()
	if err == nil {
		return text, nil
	}
	if cause := context.Cause(ctx); cause != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Base(program), cause)
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return nil, fmt.Errorf("%s: %w: %s", filepath.Base(program), err, strings.TrimSpace(string(exit.Stderr)))
	}
	return nil, err
}

// A starResult is what a case's contenders gave.
type starResult struct {
	Case reductionCase        `json:"-"`
	Size int                  // of the vector, bytes
	Runs map[string][]reduced // by contender
	// Plain is what plain sockets got in the same rounds.
	Plain []plainStar
	// Timeline is a drawing of one all-reduce, if one was made.
	Timeline string
}

// star measures a case: contenders take turns.
func (b reductionBencher) star(ctx context.Context, c reductionCase) (_ starResult, err error) {
	lab, hosts, err := b.up(ctx, c)
	if err != nil {
		return starResult{}, err
	}
	defer func() { err = errors.Join(err, lab.Down(ctx)) }()
	fmt.Fprintf(b.out, "\n%s: %s (%s)\n", c.Name, c.title(), lab.Config())
	size, iterations := c.Size, 5
	if c.Rate < netns.Gbit {
		iterations = 2
	}
	if b.options.quick {
		size, iterations = size/4, 3
	}
	drawing := filepath.Join(b.folder, "timeline.svg")
	result := starResult{Case: c, Size: size, Runs: map[string][]reduced{}}
	for round := range b.options.runs {
		for i := range reducers {
			// Whoever was first is last in the next round.
			r := reducers[(i+round)%len(reducers)]
			flags := append([]string{"--size", strconv.Itoa(size), "-n", strconv.Itoa(iterations), "-w", "1", "-c", "1"}, r.flags...)
			drawn := c.Drawn && r.Name == byServers.Name && result.Timeline == ""
			if drawn {
				flags = append(flags, "--plot", drawing)
			}
			got, err := b.once(ctx, hosts, flags...)
			if err != nil {
				return starResult{}, fmt.Errorf("%s: %w", r.Name, err)
			}
			if drawn {
				svg, err := os.ReadFile(drawing)
				if err != nil {
					return starResult{}, err
				}
				result.Timeline = string(svg)
			}
			result.Runs[r.Name] = append(result.Runs[r.Name], got)
			fmt.Fprintf(b.out, "  %d of %d  %-42s %.4f GB/s, %.2f of the link, clients %.2f CPU s/GB, processors %.0f %%\n",
				round+1, b.options.runs, r.Name, got.Algbw, got.Algbw/c.limit(), got.CPU, got.Busy*100)
		}
		plain, err := plainExchange(ctx, lab, c)
		if err != nil {
			return starResult{}, err
		}
		result.Plain = append(result.Plain, plain)
		fmt.Fprintf(b.out, "  %d of %d  %-42s %.4f GB/s, %.2f of the link, processors %.0f %%\n",
			round+1, b.options.runs, plainName, plain.Rate, plain.Rate/c.limit(), plain.Busy*100)
	}
	return result, nil
}

// small measures a small all-reduce beside two messages of its size, one there
// and one back, between the same hosts.
func (b reductionBencher) small(ctx context.Context, result *reductionResult) (err error) {
	c := reductionCase{Name: "small", Clients: 2, Servers: 2}
	lab, hosts, err := b.up(ctx, c)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lab.Down(ctx)) }()
	fmt.Fprintf(b.out, "\nsmall: %d bytes, %s\n", smallBytes, lab.Config())
	messages := 5000
	if b.options.quick {
		messages = 500
	}
	for round := range b.options.runs {
		got, err := b.once(ctx, hosts, "--size", strconv.Itoa(smallBytes), "-n", strconv.Itoa(messages), "-w", "100", "-c", "1", "--depth", "1")
		if err != nil {
			return err
		}
		there, err := b.pingPong(ctx, lab, messages)
		if err != nil {
			return err
		}
		plain, err := plainRound(ctx, lab, c)
		if err != nil {
			return err
		}
		result.Small = append(result.Small, smallRound{AllReduce: got.E2E, TwoMessages: there, Plain: plain, Busy: got.Busy})
		fmt.Fprintf(b.out, "  %d of %d  all-reduce %.1f us, two messages %.1f us, as much over plain sockets %.1f us\n", round+1, b.options.runs, got.E2E*1e6, there*1e6, plain*1e6)
	}
	return nil
}

// A smallRound is the medians of one round, in seconds.
type smallRound struct {
	AllReduce, TwoMessages float64
	// Plain is an all-reduce's messages over plain sockets, and no sum.
	Plain float64
	Busy  float64 // share of all processors' time during the all-reduces
}

// pingPong is the median of a message's way to another host and back, in seconds.
func (b reductionBencher) pingPong(ctx context.Context, lab *netns.Lab, messages int) (float64, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("not done within %s", patience))
	defer cancel()
	side := func(host netns.Host, rank string) (*process, error) {
		size := strconv.Itoa(smallBytes)
		return start(ctx, lab, host, []string{"NCCL_SOCKET_IFNAME=" + netns.DataInterface},
			b.options.driver, "net", "--plugin", b.options.library, "--json", "--ping-pong", "--rank", rank, "--world-size", "2",
			"--master-addr", lab.Address(netns.H1).String(), "--master-port", strconv.Itoa(masterPort),
			"-b", size, "-e", size, "-w", "100", "-n", strconv.Itoa(messages))
	}
	receiver, err := side(netns.H1, "0")
	if err != nil {
		return 0, err
	}
	sender, err := side(netns.StarHost(2), "1")
	if err != nil {
		return 0, receiver.end(err)
	}
	text, err := wait(receiver, sender, receiver)
	if err != nil {
		return 0, err
	}
	var report struct {
		Rows []struct {
			P50 float64 `json:"p50_us"`
		}
	}
	if err := json.Unmarshal(text, &report); err != nil || len(report.Rows) != 1 {
		return 0, fmt.Errorf("what evenkeel-bench reported: %q", text)
	}
	return report.Rows[0].P50 / 1e6, nil
}

var (
	metricsPattern = regexp.MustCompile(`metrics (http://\S+?),`)
	mostPattern    = regexp.MustCompile(`(?m)^evenkeel_reduction_memory_most_bytes (\d+)`)
	jobsPattern    = regexp.MustCompile(`(?m)^evenkeel_reduction_received_bytes_total\{job="bench-`)
	peakPattern    = regexp.MustCompile(`(?m)^VmHWM:\s*(\d+) kB`)
)

// memory has many jobs use one server at a time, and asks that how much it took.
func (b reductionBencher) memory(ctx context.Context, result *reductionResult) error {
	ctx, cancel := context.WithTimeoutCause(ctx, memoryPatience, fmt.Errorf("not done within %s", memoryPatience))
	defer cancel()
	program := filepath.Join(filepath.Dir(b.options.driver), "evenkeel-reduction-server")
	server := exec.CommandContext(ctx, program, "serve", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--memory", strconv.Itoa(memoryBound))
	server.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	server.Env = append(os.Environ(), "NCCL_SOCKET_IFNAME=lo")
	said, err := server.StderrPipe()
	if err != nil {
		return err
	}
	if err := server.Start(); err != nil {
		return fmt.Errorf("start the server: %w", err)
	}
	defer func() { server.Process.Kill(); server.Wait() }()
	var line string
	reader := bufio.NewReader(said)
	for !strings.HasPrefix(line, "listening at ") {
		if line, err = reader.ReadString('\n'); err != nil {
			return fmt.Errorf("the server said %q: %w", line, err)
		}
	}
	go io.Copy(io.Discard, reader)
	address, _, _ := strings.Cut(strings.TrimPrefix(line, "listening at "), ",")
	metrics := metricsPattern.FindStringSubmatch(line)
	if metrics == nil {
		return fmt.Errorf("no metrics in %q", line)
	}
	fmt.Fprintf(b.out, "\nmemory: %d jobs of 2 ranks at one server, %d MiB\n", memoryJobs, memoryBound>>20)
	ends := make(chan error, memoryJobs)
	limit := strconv.Itoa(int(memoryPatience.Seconds()))
	for job := range memoryJobs {
		go func() {
			cmd := exec.CommandContext(ctx, b.options.driver, "reduction", "--ranks", "2", "--plugin", b.options.library, "--size", "1M", "-n", "3", "-w", "1", "-c", "1", "--timeout", limit)
			cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
			cmd.Env = append(os.Environ(), "NCCL_SOCKET_IFNAME=lo", "EVENKEEL_REDUCTION_SERVERS="+address, "EVENKEEL_REDUCTION_TIMEOUT="+limit, fmt.Sprintf("EVENKEEL_JOB=bench-%d", job))
			if said, err := cmd.CombinedOutput(); err != nil {
				ends <- fmt.Errorf("job %d: %w: %s", job, err, strings.TrimSpace(string(said)))
				return
			}
			ends <- nil
		}()
	}
	var all []error
	for range memoryJobs {
		all = append(all, <-ends)
	}
	if err := errors.Join(all...); err != nil {
		return err
	}
	text, err := get(ctx, metrics[1])
	if err != nil {
		return err
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", server.Process.Pid))
	if err != nil {
		return err
	}
	most, peak := mostPattern.FindSubmatch(text), peakPattern.FindSubmatch(status)
	if most == nil || peak == nil {
		return fmt.Errorf("no memory in the server's metrics: %q", text)
	}
	m := memoryResult{Jobs: len(jobsPattern.FindAll(text, -1))}
	m.Most, _ = strconv.ParseFloat(string(most[1]), 64)
	m.Peak, _ = strconv.ParseFloat(string(peak[1]), 64)
	m.Peak *= 1 << 10
	result.Memory = &m
	fmt.Fprintf(b.out, "  %d jobs: buffers %.1f MiB at most, the process %.1f MiB\n", m.Jobs, m.Most/(1<<20), m.Peak/(1<<20))
	return nil
}

// A memoryResult is what many jobs made a server take.
type memoryResult struct {
	Jobs       int
	Most, Peak float64 // bytes of buffers, and of the process
}

// A kernelRow is how fast sums are of so many sources whose buffers all together
// have Total bytes: GB/s that are read and written. Add is that of adding two
// arrays to a third, over as much memory.
type kernelRow struct {
	Instructions string
	Total        string
	Sources      int
	Add          float64
	Float32      float64
	Float16      float64
	Bfloat16     float64
	Float8       float64 `json:"fp8 e4m3"`
	Int32        float64
	// The sources made float32, and nothing more.
	LoadFloat32  float64 `json:"float32 loads"`
	LoadFloat16  float64 `json:"float16 loads"`
	LoadBfloat16 float64 `json:"bfloat16 loads"`
}

// kernels measures the sums beside adding two arrays.
func (b reductionBencher) kernels(ctx context.Context, result *reductionResult) error {
	fmt.Fprintf(b.out, "\nkernels: sums of 2 to 16 sources\n")
	cmd := exec.CommandContext(ctx, "cargo", "run", "--release", "--locked", "-q", "-p", "evenkeel-reduction-kernels", "--example", "speed", "--", "--json")
	cmd.Dir, cmd.Stderr = filepath.Join(b.root, "plugin"), os.Stderr
	text, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("the kernels' own measurement: %w", err)
	}
	for line := range bytes.Lines(text) {
		var row kernelRow
		if err := json.Unmarshal(line, &row); err != nil || row.Add == 0 {
			return fmt.Errorf("what the kernels' measurement said: %q", line)
		}
		result.Kernels = append(result.Kernels, row)
		fmt.Fprintf(b.out, "  %s, %2d sources: float32 %.2f of an add, float16 %.2f and bfloat16 %.2f of float32\n",
			row.Total, row.Sources, row.Float32/row.Add, row.Float16/row.Float32, row.Bfloat16/row.Float32)
	}
	return nil
}
