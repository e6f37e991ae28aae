// Command gpu runs real NCCL over the plugin, all ranks on this machine's
// first GPU as if each were a host of its own, and writes docs/results/gpu.md.
package main

import (
	"bytes"
	"cmp"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/internal/cargo"
)

// missing is the error of a run that needs something this machine lacks; the exit status is 2.
type missing struct{ what string }

func (m missing) Error() string { return m.what }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	err := rootCommand().ExecuteContext(ctx)
	if err == nil {
		return
	}
	fmt.Fprintln(os.Stderr, "bench/gpu:", err)
	if errors.As(err, &missing{}) {
		os.Exit(2)
	}
	os.Exit(1)
}

type options struct {
	nccl, plugin, server string
	builtFrom            string
	ranks                int
	quick                bool
	noLab                bool
	output               string
	logs                 string
	plan                 plan
}

// A plan is the amount of work, and its timeouts.
type plan struct {
	maxBytes      int           // of the largest all-reduce
	iterations    int           // of each size
	timeout       time.Duration // of one call or one all-reduce, whole seconds
	outputTimeout time.Duration // without output of any rank: the last resort
}

var (
	fullPlan  = plan{maxBytes: 64 << 20, iterations: 5, timeout: 2 * time.Minute, outputTimeout: 10 * time.Minute}
	quickPlan = plan{maxBytes: 4 << 20, iterations: 2, timeout: 2 * time.Minute, outputTimeout: 10 * time.Minute}
)

func rootCommand() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   "gpu",
		Short: "Run real NCCL over the plugin on one GPU, and write the result",
		Long: `Run real NCCL over the plugin on one GPU, and write the result.

Every rank is a process that NCCL treats as a host of its own, so ranks reach each other only through the
network. They all-reduce every type and size and check every element: over the plugin, over reduction servers,
and over NCCL's own sockets. Then a rank is killed, and later a server, and the others must get an error. At the
end, as root, they all-reduce in networks of namespaces with slow links. NCCL_ and EVENKEEL_ settings in the
environment are ignored.

Ranks share the GPU by time slicing, unless NVIDIA's MPS runs: start it before, for times of the network alone.

Needs an NVIDIA driver, NCCL 2.21 or newer, and cc. Where one is missing, the error names it and the exit status is 2.`,
		Example: `  go run ./hack/bench/gpu
  go run ./hack/bench/gpu --quick --nccl /opt/nccl/lib/libnccl.so.2
  export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps; nvidia-cuda-mps-control -d; go run ./hack/bench/gpu`,
		Args:         cobra.NoArgs,
		SilenceUsage: true, SilenceErrors: true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.plan = fullPlan
			if o.quick {
				o.plan = quickPlan
			}
			return run(cmd.Context(), cmd.OutOrStdout(), o)
		},
	}
	cmd.Flags().StringVar(&o.nccl, "nccl", "", "NCCL's library (default libnccl.so.2 where the loader finds it, or Python's package)")
	cmd.Flags().StringVar(&o.plugin, "plugin", "", "the plugin, with --server (default: both are built from this checkout)")
	cmd.Flags().StringVar(&o.server, "server", "", "the reduction server, with --plugin")
	cmd.Flags().StringVar(&o.builtFrom, "built-from", "unknown", "the commit that --plugin and --server were built from, where this machine cannot build them")
	cmd.Flags().BoolVar(&o.noLab, "no-lab", false, "leave out the networks of namespaces, which need root")
	cmd.Flags().IntVar(&o.ranks, "ranks", 2, "number of ranks: 2, 4 or 8")
	cmd.Flags().BoolVar(&o.quick, "quick", false, fmt.Sprintf("fewer repetitions, and only up to %s", size(quickPlan.maxBytes)))
	cmd.Flags().StringVar(&o.output, "output", "", "folder for gpu.md (default docs/results)")
	return cmd
}

func run(ctx context.Context, out io.Writer, o options) error {
	if o.ranks != 2 && o.ranks != 4 && o.ranks != 8 {
		return fmt.Errorf("--ranks %d: 2, 4 or 8, so that every type can hold all results exactly", o.ranks)
	}
	if (o.plugin == "") != (o.server == "") {
		return errors.New("--plugin and --server go together: both are of one commit")
	}
	root, err := toolbox.Root()
	if err != nil {
		return err
	}
	if o.output == "" {
		o.output = filepath.Join(root, "docs", "results")
	}
	work, err := os.MkdirTemp("", "evenkeel-gpu-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	program, err := compile(ctx, work)
	if err != nil {
		return err
	}
	// Before the build, which raises the load.
	host, source := machine.Describe(), page.NewSource(ctx, root, "plugin", "hack/bench/gpu")
	r := report{Machine: host, Source: source, MPS: mpsRuns(), Driver: driverVersion(), Library: fmt.Sprintf("built elsewhere, from commit %s", cmp.Or(o.builtFrom, "unknown"))}
	if o.nccl, r.Probe, err = findNCCL(ctx, program, o.nccl); err != nil {
		return err
	}
	if o.plugin == "" {
		r.Library = "of " + source.String()
		if o.plugin, o.server, err = build(ctx, root); err != nil {
			return err
		}
	}
	for name, path := range map[string]*string{"--plugin": &o.plugin, "--server": &o.server} {
		if *path, err = filepath.Abs(*path); err != nil {
			return err
		}
		if _, err := os.Stat(*path); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	if o.logs == "" {
		o.logs = filepath.Join(root, "dist", "gpu")
	}
	if err := os.MkdirAll(o.logs, 0o755); err != nil {
		return err
	}
	fmt.Fprintf(out, "NCCL %s, %s; NCCL's logs are in %s\n", r.Probe.version(), r.Probe.GPU, o.logs)
	w := world{program: program, nccl: o.nccl, version: r.Probe.NCCL, ranks: o.ranks, plan: o.plan, work: work, logs: o.logs}
	overPlugin, overSocket := w, w
	overPlugin.name, overPlugin.network = "plugin", "Evenkeel"
	overPlugin.environment = []string{"NCCL_NET_PLUGIN=" + o.plugin}
	overSocket.name, overSocket.network = "socket", "Socket"
	overSocket.environment = []string{"NCCL_NET_PLUGIN=none", "NCCL_NET=Socket"}
	if r.Plugin, err = overPlugin.allReduce(ctx, out); err != nil {
		return err
	}
	if r.Socket, err = overSocket.allReduce(ctx, out); err != nil {
		return err
	}
	overPlugin.name = "kill"
	if r.Lost, err = overPlugin.killRank(ctx); err != nil {
		return err
	}
	if err := r.overServers(ctx, out, overPlugin, o.server); err != nil {
		return err
	}
	switch {
	case o.noLab:
		r.NoLab = "left out with `--no-lab`"
	case os.Geteuid() != 0:
		r.NoLab = "networks of namespaces need root"
	default:
		if r.Shaped, err = inShapedNetworks(ctx, out, w, o.plugin, o.server); err != nil {
			return err
		}
	}
	r.Options = o
	return r.write(out)
}

// serverCount is the number of reduction servers at the loopback interface.
const serverCount = 2

// overServers measures all-reduces over reduction servers, and kills one of these.
func (r *report) overServers(ctx context.Context, out io.Writer, w world, program string) error {
	s, err := startServers(ctx, program, nil, nil, serverCount)
	if err != nil {
		return err
	}
	defer s.stop()
	w.name, w.collNet = "servers", true
	w.environment = append(slices.Clone(w.environment), s.environment(w.version)...)
	if r.Servers, err = w.allReduce(ctx, out); err != nil {
		return err
	}
	w.name = "kill-server"
	r.LostServer, err = w.lose(ctx, "a reduction server", -1, func(func(int)) { s.kill() })
	return err
}

//go:embed rank/allreduce.c
var source []byte

// compile builds the program of a rank.
func compile(ctx context.Context, work string) (program string, err error) {
	program = filepath.Join(work, "allreduce")
	cmd := exec.CommandContext(ctx, "cc", "-std=c11", "-D_DEFAULT_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror", "-o", program, "-x", "c", "-", "-ldl")
	cmd.Stdin = bytes.NewReader(source)
	output, err := cmd.CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) {
		return "", missing{"there is no C compiler (cc): apt-get install gcc libc6-dev"}
	}
	if err != nil {
		return "", fmt.Errorf("cc: %w: %s", err, bytes.TrimSpace(output))
	}
	return program, nil
}

// A probe is the NCCL, driver and GPU of this machine.
type probe struct {
	NCCL int // of ncclGetVersion
	CUDA int // the newest that the driver supports, of cuDriverGetVersion
	GPU  string
}

func (p probe) version() string {
	return fmt.Sprintf("%d.%d.%d", p.NCCL/10000, p.NCCL/100%100, p.NCCL%100)
}

// minNCCL is the first NCCL that loads a plugin by its path.
const minNCCL = 22100

// findNCCL finds NCCL, and checks that it and the driver load.
func findNCCL(ctx context.Context, program, given string) (path string, p probe, err error) {
	candidates := []string{given}
	if given == "" {
		candidates = []string{"libnccl.so.2"}
		const locate = "import importlib.util as u; print(*u.find_spec('nvidia.nccl').submodule_search_locations)"
		if folder, err := exec.CommandContext(ctx, "python3", "-c", locate).Output(); err == nil {
			candidates = append(candidates, filepath.Join(strings.TrimSpace(string(folder)), "lib", "libnccl.so.2"))
		}
	}
	for _, path = range candidates {
		if p, err = tryNCCL(ctx, program, path); err == nil {
			break
		}
	}
	if err == nil && p.NCCL < minNCCL {
		err = missing{fmt.Sprintf("NCCL %s (%s) is too old: 2.21 is the first that loads a plugin by its path", p.version(), path)}
	}
	return path, p, err
}

func tryNCCL(ctx context.Context, program, path string) (probe, error) {
	var p probe
	cmd := exec.CommandContext(ctx, program, "--probe", "1", "--nccl", path)
	text, err := cmd.Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		reason := strings.TrimPrefix(strings.TrimSpace(string(exit.Stderr)), prefix)
		if exit.ExitCode() == 2 {
			return p, missing{reason}
		}
		return p, fmt.Errorf("%s: %w: %s", path, err, reason)
	}
	if err == nil {
		err = json.Unmarshal(text, &p)
	}
	if err != nil {
		return p, fmt.Errorf("%s: %w", path, err)
	}
	return p, nil
}

// build builds the plugin and the reduction server, optimised.
func build(ctx context.Context, root string) (library, server string, err error) {
	paths, err := cargo.Release(ctx, root, []string{"evenkeel-nccl-plugin", "evenkeel-reduction-server"}, []string{cargo.Library, "evenkeel-reduction-server"})
	if errors.Is(err, exec.ErrNotFound) {
		return "", "", missing{"there is no cargo to build the plugin with: install Rust, or name a plugin with --plugin PATH, and a server with --server PATH"}
	}
	if err != nil {
		return "", "", err
	}
	return paths[0], paths[1], nil
}

// mpsRuns says whether NVIDIA's Multi-Process Service runs, where programs look for it: the process of its file is there.
func mpsRuns() bool {
	text, err := os.ReadFile(filepath.Join(cmp.Or(os.Getenv("CUDA_MPS_PIPE_DIRECTORY"), "/tmp/nvidia-mps"), "nvidia-cuda-mps-control.pid"))
	if err != nil {
		return false
	}
	_, err = os.Stat(filepath.Join("/proc", strings.TrimSpace(string(text))))
	return err == nil
}

// driverVersion is that of NVIDIA's kernel module.
func driverVersion() string {
	text, err := os.ReadFile("/sys/module/nvidia/version")
	if err != nil {
		return "of unknown version"
	}
	return strings.TrimSpace(string(text))
}
