package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	// memoryJobs share a server whose buffers are bounded by memoryBound.
	memoryJobs  = 64
	memoryBound = 256 << 20
	// memoryTimeout is how long the jobs may take. Each has three programs, and all start at once.
	memoryTimeout = 5 * time.Minute
)

var (
	metricsPattern = regexp.MustCompile(`metrics (http://\S+?),`)
	maxPattern     = regexp.MustCompile(`(?m)^evenkeel_reduction_memory_peak_bytes (\d+)`)
	jobsPattern    = regexp.MustCompile(`(?m)^evenkeel_reduction_received_bytes_total\{job="bench-`)
	peakPattern    = regexp.MustCompile(`(?m)^VmHWM:\s*(\d+) kB`)
)

// memory runs many jobs at one server at the same time, and reads the server's memory from its metrics.
func (b bench) memory(ctx context.Context, result *caseResult) error {
	ctx, cancel := context.WithTimeoutCause(ctx, memoryTimeout, fmt.Errorf("not done within %s", memoryTimeout))
	defer cancel()
	program := filepath.Join(filepath.Dir(b.options.Driver), "evenkeel-reduction-server")
	server := exec.CommandContext(ctx, program, "serve", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--memory", strconv.Itoa(memoryBound))
	server.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	server.Env = append(os.Environ(), "NCCL_SOCKET_IFNAME=lo")
	stderr, err := server.StderrPipe()
	if err != nil {
		return err
	}
	if err := server.Start(); err != nil {
		return fmt.Errorf("start the server: %w", err)
	}
	defer func() { server.Process.Kill(); server.Wait() }()
	var line string
	reader := bufio.NewReader(stderr)
	for !strings.HasPrefix(line, "listening at ") {
		if line, err = reader.ReadString('\n'); err != nil {
			return fmt.Errorf("the server did not start: %w: %q", err, line)
		}
	}
	go io.Copy(io.Discard, reader)
	address, _, _ := strings.Cut(strings.TrimPrefix(line, "listening at "), ",")
	metrics := metricsPattern.FindStringSubmatch(line)
	if metrics == nil {
		return fmt.Errorf("no metrics in %q", line)
	}
	fmt.Fprintf(b.out, "\nmemory: %d jobs of 2 ranks at one server, %d MiB\n", memoryJobs, memoryBound>>20)
	exits := make(chan error, memoryJobs)
	limit := strconv.Itoa(int(memoryTimeout.Seconds()))
	for job := range memoryJobs {
		go func() {
			cmd := exec.CommandContext(ctx, b.options.Driver, "reduction", "--ranks", "2", "--plugin", b.options.Library, "--size", "1M", "-n", "3", "-w", "1", "-c", "1", "--timeout", limit)
			cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
			cmd.Env = append(os.Environ(), "NCCL_SOCKET_IFNAME=lo", "EVENKEEL_REDUCTION_SERVERS="+address, "EVENKEEL_REDUCTION_TIMEOUT="+limit, fmt.Sprintf("EVENKEEL_JOB=bench-%d", job))
			text, err := cmd.CombinedOutput()
			if err != nil {
				err = fmt.Errorf("job %d: %w: %s", job, err, strings.TrimSpace(string(text)))
			}
			exits <- err
		}()
	}
	var all []error
	for range memoryJobs {
		all = append(all, <-exits)
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
	buffers, peak := maxPattern.FindSubmatch(text), peakPattern.FindSubmatch(status)
	if buffers == nil || peak == nil {
		return fmt.Errorf("no memory in the server's metrics: %q", text)
	}
	m := memoryResult{Jobs: len(jobsPattern.FindAll(text, -1))}
	m.Max, _ = strconv.ParseFloat(string(buffers[1]), 64)
	m.Peak, _ = strconv.ParseFloat(string(peak[1]), 64)
	m.Peak *= 1 << 10
	result.Memory = &m
	fmt.Fprintf(b.out, "  %d jobs: buffers %.1f MiB at most, the process %.1f MiB\n", m.Jobs, m.Max/(1<<20), m.Peak/(1<<20))
	return nil
}

// A memoryResult is the memory of a server with many jobs.
type memoryResult struct {
	Jobs      int
	Max, Peak float64 // bytes of buffers, and of the process
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
