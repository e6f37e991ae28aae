package suspects

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

const (
	// Hosts are those of a job, with a rank each.
	Hosts = 8
	// CardRate is the rate of each host's card, in both directions. It is low, so that the machine's processors do not set
	// the pace. A rank sends more at a time than the shaper's bucket holds: else the bucket would set the pace.
	CardRate   = 40 * netns.Mbit
	switchHost = netns.Host("s1")
	// startTime is how long a job may take until a verdict knows all its ranks.
	startTime = time.Minute
	// poll is how often verdicts are looked at.
	poll = 250 * time.Millisecond
)

// Network is that of a job: its hosts around a switch.
func Network() *netns.Config {
	return &netns.Config{Star: slices.Repeat([]netns.Rate{CardRate}, Hosts)}
}

// A Pattern is what the ranks of a job do.
type Pattern string

const (
	Ring      Pattern = "ring"
	AllToAll  Pattern = "all-to-all"
	broadcast Pattern = "broadcast"
	gather    Pattern = "gather"
)

// Patterns are those that faults are injected into, and whose cost is measured.
var Patterns = []Pattern{Ring, AllToAll}

var patternTitles = map[Pattern]string{
	Ring:      "all-reduce in a ring, over the plugin",
	AllToAll:  "all-to-all, over the collectives",
	broadcast: "broadcast by rank 0, over the collectives",
	gather:    "gather at rank 0, over the collectives",
}

// Title is the pattern in words.
func (p Pattern) Title() string { return patternTitles[p] }

// collective is the benchmark of a pattern that runs over the collectives.
var collective = map[Pattern]string{AllToAll: "alltoall", broadcast: "broadcast", gather: "gather"}

// A verdict is what the plugin writes into its status folder.
type verdict struct {
	Ranks    int
	Outcome  string
	Text     string
	Suspects []suspect
}

type suspect struct {
	Class, Host, Device, Direction string
	Confidence                     float64
	Peer                           *struct{ Host string }
	OrCard                         bool `json:"or_card"` // of a path: one of its ends' cards may be the slow one as well
}

// A job has a rank on each host of a star.
type job struct {
	lab       *netns.Lab
	folder    string
	processes []*proc.Process
}

// start starts the ranks, which go on until the job is closed.
func start(ctx context.Context, r experiment.Run, l Load, watched bool) (_ *job, err error) {
	j := &job{lab: r.Lab}
	if j.folder, err = os.MkdirTemp("", "suspects"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, j.close())
		}
	}()
	watch := "EVENKEEL_WATCH=off"
	if watched {
		watch = "EVENKEEL_WATCH=on"
	}
	for rank := range Hosts {
		if l.computing != nil {
			if err := j.compute(rank, l.computing(rank)); err != nil {
				return nil, err
			}
		}
		host := netns.StarHost(rank)
		environment := []string{
			fmt.Sprintf("RANK=%d", rank), fmt.Sprintf("WORLD_SIZE=%d", Hosts), "MASTER_PORT=29500",
			"MASTER_ADDR=" + j.lab.Address(netns.StarHost(0)).String(), "NCCL_SOCKET_IFNAME=" + netns.DataInterface,
			"EVENKEEL_STATUS_DIR=" + j.folder, "EVENKEEL_NODE=" + hostName(rank), watch,
		}
		argv := []string{r.Driver, "allreduce", "--compute", j.computeFile(rank), "--plugin", r.Library, "-b", "4M", "-e", "4M", "-N", "0", "--check", "0", "-w", "1", "-n", "1000"}
		if benchmark := collective[l.Pattern]; benchmark != "" {
			argv = []string{r.Driver, "collective", "--transport", "tcp", "--elements", "500000", "--no-verify", "--compute", j.computeFile(rank), "--iteration-time", "86400s", benchmark}
		}
		process, err := proc.Start(ctx, j.lab, host, fmt.Sprintf("rank %d", rank), environment, argv...)
		if err != nil {
			return nil, err
		}
		j.processes = append(j.processes, process)
	}
	return j, nil
}

// begin starts a job that is watched, and returns once a verdict knows all its ranks.
func begin(ctx context.Context, r experiment.Run, l Load) (*job, error) {
	j, err := start(ctx, r, l, true)
	if err != nil {
		return nil, err
	}
	known, err := await(ctx, startTime, func() bool { return j.ranks() == Hosts })
	if err == nil && !known {
		err = j.processes[0].Kill(fmt.Errorf("no verdict knows the %d ranks within %s, only %d", Hosts, startTime, j.ranks()))
	}
	if err != nil {
		return nil, errors.Join(err, j.close())
	}
	return j, nil
}

// computeFile is where a rank reads how long it computes before each operation.
func (j *job) computeFile(rank int) string {
	return filepath.Join(j.folder, fmt.Sprintf("compute-%d", rank))
}

// compute sets how long a rank computes before each operation, in milliseconds: one number, or two between which it is
// drawn.
func (j *job) compute(rank int, milliseconds string) error {
	file := j.computeFile(rank)
	if err := os.WriteFile(file+".new", []byte(milliseconds), 0o644); err != nil {
		return err
	}
	return os.Rename(file+".new", file)
}

// pauseOnce makes a rank compute for a second before its next operation. It has to have begun the pause before.
func (j *job) pauseOnce(rank int) error {
	file := j.computeFile(rank) + ".once"
	if _, err := os.Stat(file); err == nil {
		return fmt.Errorf("rank %d has not begun the pause before", rank)
	}
	if err := os.WriteFile(file+".new", []byte("1000"), 0o644); err != nil {
		return err
	}
	return os.Rename(file+".new", file)
}

// verdicts are those that the ranks have written last.
func (j *job) verdicts() []verdict {
	files, _ := filepath.Glob(filepath.Join(j.folder, "verdict.*")) // the pattern is valid
	var all []verdict
	for _, file := range files {
		var v verdict
		if text, err := os.ReadFile(file); err == nil && json.Unmarshal(text, &v) == nil {
			all = append(all, v)
		}
	}
	return all
}

// suspected returns a verdict on a suspect; false: nobody is suspected by any rank.
func (j *job) suspected() (verdict, bool) {
	for _, v := range j.verdicts() {
		if len(v.Suspects) > 0 {
			return v, true
		}
	}
	return verdict{}, false
}

// ranks is the largest number of ranks that a verdict knows of.
func (j *job) ranks() int {
	most := 0
	for _, v := range j.verdicts() {
		most = max(most, v.Ranks)
	}
	return most
}

// unsuspecting is what the ranks say where they name nobody, or why they say nothing.
func (j *job) unsuspecting() string {
	if j.hasEnded() {
		return "the job has ended"
	}
	counts := map[string]int{}
	most := ""
	for _, v := range j.verdicts() {
		counts[v.Text]++
		if most == "" || counts[v.Text] > counts[most] {
			most = v.Text
		}
	}
	return most
}

// hasEnded says whether a rank has ended.
func (j *job) hasEnded() bool {
	for _, p := range j.processes {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Cmd.Process.Pid))
		// The state follows the name, which is in brackets (proc(5)). Z: it has exited, and nobody has waited for it.
		_, rest, _ := strings.Cut(string(text), ") ")
		if err != nil || strings.HasPrefix(rest, "Z") {
			return true
		}
	}
	return false
}

// carried is how many bytes the hosts have sent so far.
func (j *job) carried() (sum float64, err error) {
	for host := range Hosts {
		_, sent, err := j.lab.Traffic(netns.StarHost(host))
		if err != nil {
			return 0, err
		}
		sum += float64(sent)
	}
	return sum, nil
}

// mark is what the hosts have sent so far, and when that was.
func (j *job) mark() (bytes float64, at time.Time, err error) {
	bytes, err = j.carried()
	return bytes, time.Now(), err
}

// rate is how many bytes a second the hosts have sent since they had sent `before`.
func (j *job) rate(before float64, since time.Time) (float64, error) {
	now, err := j.carried()
	return (now - before) / time.Since(since).Seconds(), err
}

// await looks until the condition holds, which it reports, or the time is over.
func await(ctx context.Context, most time.Duration, holds func() bool) (bool, error) {
	begin, ticker := time.Now(), time.NewTicker(poll)
	defer ticker.Stop()
	for {
		if holds() {
			return true, nil
		}
		if time.Since(begin) >= most {
			return false, nil
		}
		select {
		case <-ctx.Done():
			return false, context.Cause(ctx)
		case <-ticker.C:
		}
	}
}

// pause lets a job go on for a time.
func pause(ctx context.Context, length time.Duration) error {
	_, err := await(ctx, length, func() bool { return false })
	return err
}

// close ends the ranks.
func (j *job) close() error {
	for _, p := range j.processes {
		_ = p.Kill(nil)
	}
	return os.RemoveAll(j.folder)
}
