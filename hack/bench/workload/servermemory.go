package workload

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
	"evenkeel.dev/evenkeel/hack/internal/child"
)

// Quantities of [ServerMemory].
var (
	ServerBuffers = experiment.Quantity{Name: "buffers", Title: "buffers", Unit: "MiB", Digits: 1, LowerIsBetter: true}
	ServerPeak    = experiment.Quantity{Name: "peak", Title: "memory of the process", Unit: "MiB", Digits: 1, LowerIsBetter: true}
)

// ServerMemoryTimeout is how long the jobs of [ServerMemory] may take. Each has three programs, and all start at once.
const ServerMemoryTimeout = 5 * time.Minute

// ServerMemory is jobs of two ranks that share one reduction server, whose buffers are bounded.
type ServerMemory struct {
	Jobs  int
	Bound int // bytes
}

var (
	metricsPattern = regexp.MustCompile(`metrics (http://\S+?),`)
	maxPattern     = regexp.MustCompile(`(?m)^evenkeel_reduction_memory_peak_bytes (\d+)`)
	jobsPattern    = regexp.MustCompile(`(?m)^evenkeel_reduction_received_bytes_total\{job="bench-`)
	peakPattern    = regexp.MustCompile(`(?m)^VmHWM:\s*(\d+) kB`)
)

// Server runs all jobs at the same time, and reads the server's memory from its metrics.
func (w ServerMemory) Server(name string) experiment.Contender {
	return experiment.Contender{Name: name, Run: func(ctx context.Context, r experiment.Run) (experiment.Measured, error) {
		got, err := w.run(ctx, r)
		return experiment.Measured{Values: got}, err
	}}
}

func (w ServerMemory) run(ctx context.Context, r experiment.Run) (outcome, error) {
	program := filepath.Join(filepath.Dir(r.Driver), "evenkeel-reduction-server")
	server := exec.CommandContext(ctx, program, "serve", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--memory", strconv.Itoa(w.Bound))
	server.Env = append(os.Environ(), "NCCL_SOCKET_IFNAME=lo")
	line, err := StartServer(server)
	if err != nil {
		return nil, fmt.Errorf("the server: %w", err)
	}
	defer func() { server.Process.Kill(); server.Wait() }()
	address, _, _ := strings.Cut(line, ",")
	metrics := metricsPattern.FindStringSubmatch(line)
	if metrics == nil {
		return nil, fmt.Errorf("no metrics in %q", line)
	}
	var jobs errgroup.Group
	limit := strconv.Itoa(int(ServerMemoryTimeout.Seconds()))
	for job := range w.Jobs {
		jobs.Go(func() error {
			cmd := child.Command(ctx, "", r.Driver, "reduction", "--ranks", "2", "--plugin", r.Library, "--size", "1M", "-n", "3", "-w", "1", "-c", "1", "--timeout", limit)
			cmd.Env = append(os.Environ(), "NCCL_SOCKET_IFNAME=lo", "EVENKEEL_REDUCTION_SERVERS="+address, "EVENKEEL_REDUCTION_TIMEOUT="+limit, fmt.Sprintf("EVENKEEL_JOB=bench-%d", job))
			if _, err := proc.Output(ctx, cmd); err != nil {
				return fmt.Errorf("job %d: %w", job, err)
			}
			return nil
		})
	}
	if err := jobs.Wait(); err != nil {
		return nil, err
	}
	text, err := get(ctx, metrics[1])
	if err != nil {
		return nil, err
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", server.Process.Pid))
	if err != nil {
		return nil, err
	}
	buffers, peak := maxPattern.FindSubmatch(text), peakPattern.FindSubmatch(status)
	if buffers == nil || peak == nil {
		return nil, fmt.Errorf("no memory in the server's metrics: %q", text)
	}
	if jobs := len(jobsPattern.FindAll(text, -1)); jobs != w.Jobs {
		return nil, fmt.Errorf("the server has counted %d jobs of %d", jobs, w.Jobs)
	}
	bytes, err := strconv.ParseFloat(string(buffers[1]), 64)
	if err != nil {
		return nil, fmt.Errorf("the server's metrics: %w", err)
	}
	kib, err := strconv.ParseFloat(string(peak[1]), 64)
	if err != nil {
		return nil, fmt.Errorf("the server's status: %w", err)
	}
	return outcome{ServerBuffers: bytes / (1 << 20), ServerPeak: kib / (1 << 10)}, nil
}

// get reads a page over HTTP.
func get(ctx context.Context, address string) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	return io.ReadAll(io.LimitReader(response.Body, 1<<20))
}
