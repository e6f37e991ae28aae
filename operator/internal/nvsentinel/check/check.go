package check

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/clock"

	"evenkeel.dev/evenkeel/operator/internal/nvsentinel"
	"evenkeel.dev/evenkeel/operator/internal/preflight/ncclout"
	"evenkeel.dev/evenkeel/operator/internal/text"
)

// CheckName names this check in its events. A controller's check of the network clears none of its faults.
const CheckName = "EvenkeelPreflight"

// Codes of its faults.
const (
	CodeTooSlow = "EVENKEEL_PREFLIGHT_TOO_SLOW"
	CodeFailed  = "EVENKEEL_PREFLIGHT_FAILED"
)

const (
	// gangPoll is how often the files of the gang are read. The kubelet writes them once a minute at most.
	gangPoll = time.Second
	// maxOutput bounds what is kept of the benchmark's output, bytes.
	maxOutput = 1 << 20
	// maxMessage bounds an event's message, bytes.
	maxMessage = 1000
	// killDelay is how long an ended benchmark may keep its output open.
	killDelay = 5 * time.Second
)

// DefaultSending is how often an event is sent until NVSentinel has accepted it.
var DefaultSending = wait.Backoff{Duration: 2 * time.Second, Factor: 1.5, Steps: 5}

// Check is one check of one pod.
type Check struct {
	Config
	// Bench is the program evenkeel-bench.
	Bench string
	// Environment is the program's environment.
	Environment []string
	Clock       clock.PassiveClock
	// Sending is how often an event is sent.
	Sending wait.Backoff
	// Log gets the program's output, and one line about the result.
	Log io.Writer
}

// A result is what a check has found. It is about the node, unless a gang ran: no gang says which of its nodes is at
// fault.
type result struct {
	status  int
	code    string // of the fault
	message string
}

// Run checks, reports, and returns the exit status.
func (c *Check) Run(ctx context.Context) int {
	began := c.Clock.Now()
	gang := Gang{}
	if c.GangFolder != "" {
		var err error
		if gang, err = c.gather(ctx); err != nil {
			status := ExitConfig
			if wait.Interrupted(err) {
				status = ExitGang
			}
			return c.end(status, err.Error())
		}
	}
	found := c.measure(ctx, gang)
	if found.status == ExitConfig || gang.Rank > 0 {
		return c.end(found.status, found.message) // rank 0 reports for its gang
	}
	if err := c.report(ctx, found, gang, began); err != nil {
		c.say(found.message)
		c.say(err.Error())
		return ExitNotSent
	}
	return c.end(found.status, found.message)
}

// end describes what was found. With STORE_ONLY nothing that was found keeps a pod from starting.
func (c *Check) end(status int, message string) int {
	c.say(message)
	if status != ExitPassed && c.Strategy == nvsentinel.Store {
		c.say("the pod starts all the same: PROCESSING_STRATEGY is STORE_ONLY")
		return ExitPassed
	}
	return status
}

func (c *Check) say(line string) { fmt.Fprintln(c.Log, "evenkeel-nvsentinel-check:", line) }

// gather waits until the pod's gang is complete.
func (c *Check) gather(ctx context.Context) (gang Gang, err error) {
	err = wait.PollUntilContextTimeout(ctx, gangPoll, c.GangWait, true, func(context.Context) (complete bool, err error) {
		gang, complete, err = readGang(c.GangFolder, c.Pod)
		return complete, err
	})
	if wait.Interrupted(err) {
		return gang, fmt.Errorf("%d of %d pods of the gang have come within %s: %w", len(gang.Pods), gang.Size, c.GangWait, err)
	}
	return gang, err
}

// measure runs the benchmark.
func (c *Check) measure(pod context.Context, gang Gang) result {
	ctx, cancel := context.WithTimeout(pod, c.Timeout)
	defer cancel()
	size := strconv.FormatInt(c.Bytes, 10)
	args := []string{"allreduce", "--json", "-b", size, "-e", size, "-n", strconv.Itoa(c.Iterations), "-w", "2", "-c", "1",
		// Ranks that cannot reach each other say so before they are ended.
		"--timeout", strconv.Itoa(max(1, int(c.Timeout.Seconds())/2))}
	ranks := []string{"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
	environment := slices.DeleteFunc(slices.Clone(c.Environment), func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return slices.Contains(ranks, name) // those of the training
	})
	if gang.Size == 0 {
		args = append(args, "--spawn", "2")
	} else {
		for i, value := range []string{strconv.Itoa(gang.Rank), strconv.Itoa(gang.Size), gang.Master, strconv.Itoa(gang.Port)} {
			environment = append(environment, ranks[i]+"="+value)
		}
	}
	kept := &limited{left: maxOutput}
	cmd := exec.CommandContext(ctx, c.Bench, args...)
	cmd.Env, cmd.WaitDelay = environment, killDelay
	cmd.Stdout = io.MultiWriter(kept, c.Log)
	cmd.Stderr = cmd.Stdout
	err := cmd.Run()
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) || errors.Is(err, os.ErrPermission) {
		return result{status: ExitConfig, message: fmt.Sprintf("cannot run evenkeel-bench: %v", err)}
	}
	if pod.Err() != nil {
		return result{status: ExitConfig, message: "the pod was ended before the check"}
	}
	if ctx.Err() != nil {
		err = fmt.Errorf("it did not end within %s", c.Timeout)
	}
	return judge(kept.Bytes(), err, c.MinBusBandwidth, gang)
}

// judge interprets the output of a run that ended with the error.
func judge(output []byte, ended error, least float64, gang Gang) result {
	report, incomplete := ncclout.Parse(output)
	if gang.Rank > 0 && ended == nil { // rank 0 alone prints what was measured
		return result{status: ExitPassed, message: fmt.Sprintf("rank %d of %d has ended well; rank 0 says how fast it was", gang.Rank, gang.Size)}
	}
	among := "inside the node"
	if gang.Size > 0 {
		among = fmt.Sprintf("among %d pods (%s)", gang.Size, strings.Join(gang.Pods, ", "))
	}
	if f := report.Failure; f != nil && (f.Kind == ncclout.FailurePlugin || f.Kind == ncclout.FailureVersion) {
		return result{status: ExitConfig, message: "the benchmark cannot run here: " + f.Line}
	}
	if incomplete != nil || ended != nil || report.OutOfBounds > 0 {
		why := fmt.Sprintf("%d elements are wrong", report.OutOfBounds)
		switch {
		case report.Failure != nil:
			why = report.Failure.Line
		case ended != nil:
			why = ended.Error()
		case incomplete != nil:
			why = incomplete.Error()
		}
		return result{ExitFailed, CodeFailed, text.Clip("all-reduce "+among+" failed: "+why, maxMessage)}
	}
	for _, n := range report.Networks {
		if n.Name != "Evenkeel" {
			return result{status: ExitConfig, message: "the benchmark ran over the network " + n.Name + ": set NCCL_NET_PLUGIN to Evenkeel's"}
		}
	}
	speed := report.PeakBusBW()
	measured := fmt.Sprintf("all-reduce %s: %.3g GB/s", among, speed)
	if least > 0 {
		measured += fmt.Sprintf(", minimum %.3g GB/s", least)
	}
	if speed < least {
		return result{ExitFailed, CodeTooSlow, text.Clip(measured, maxMessage)}
	}
	return result{status: ExitPassed, message: text.Clip(measured, maxMessage)}
}

// report sends the event about the result, until it is accepted.
func (c *Check) report(ctx context.Context, found result, gang Gang, began time.Time) error {
	event := nvsentinel.Event{
		Check: CheckName, Node: c.Node, Message: found.message, Healthy: found.status == ExitPassed, ErrorCode: found.code,
		Time: c.Clock.Now(), Strategy: c.Strategy,
	}
	if c.Pod != "" {
		event.Details = append(event.Details, nvsentinel.Detail{Name: "evenkeel.pod", Value: c.Pod})
	}
	if !event.Healthy && gang.Size == 0 {
		event.Fatal, event.Action = true, nvsentinel.ActionContactSupport
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %s %d", c.Node, c.Pod, began.UnixNano()))
	var last error
	err := wait.ExponentialBackoffWithContext(ctx, c.Sending, func(ctx context.Context) (bool, error) {
		last = c.Connector.Send(ctx, hex.EncodeToString(sum[:]), event)
		return last == nil, nil
	})
	if err != nil && last != nil {
		return last
	}
	return err
}

// limited keeps the first bytes of what is written.
type limited struct {
	bytes.Buffer
	left int
}

func (l *limited) Write(p []byte) (int, error) {
	keep := min(len(p), l.left)
	l.left -= keep
	l.Buffer.Write(p[:keep])
	return len(p), nil
}
