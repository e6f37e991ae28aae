package workload

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
	"evenkeel.dev/evenkeel/hack/bench/internal/sockets"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// A Transfer is messages from H1 to H2.
type Transfer struct {
	Size        int // bytes of a message
	Depth       int // messages in flight on each connection
	Connections int
	Length      time.Duration // of each run, about
	PingPong    bool          // each message comes back before the next one
	BothWays    bool          // both hosts send and receive at the same time
	Cold        bool          // nothing is sent before: the runs are from the first byte on
	Idle        bool          // the connections are open and, after their first use, not used
	Fault       *Fault
	// Limit is what the network can carry, in GB/s; zero where only the processors limit it.
	Limit float64
}

const (
	// maxMessages bounds the number of messages that are timed.
	maxMessages = 1_000_000
	// trialLength is that of the run that finds out how fast a contender is.
	trialLength = time.Second
)

// Headline is the quantity that the transfer is about.
func (t Transfer) Headline() experiment.Quantity {
	switch {
	case t.Idle:
		return IdleUse
	case t.PingPong:
		return RoundTrip
	}
	return Rate
}

// More are the other quantities that it measures.
func (t Transfer) More() []experiment.Quantity {
	var all []experiment.Quantity
	switch {
	case t.Idle:
		return []experiment.Quantity{Threads}
	case t.Cold:
		all = append(all, RiseTime)
	case t.Fault != nil:
		all = append(all, Before, Recovery)
	}
	if !t.PingPong {
		all = append(all, Processor, Sending, Receiving)
	}
	return append(all, OwnShare)
}

// Timeout is how long a run may take, with its trial.
func (t Transfer) Timeout() time.Duration { return proc.Timeout + 10*t.Length }

// String is the load in words, for the page.
func (t Transfer) String() string {
	if t.PingPong {
		return fmt.Sprintf("%d bytes, one at a time", t.Size)
	}
	if t.Idle {
		return fmt.Sprintf("%d connections, used once and then watched for %s", t.Connections, t.Length)
	}
	size := fmt.Sprintf("%d KiB", t.Size>>10)
	if t.Size >= 1<<20 {
		size = fmt.Sprintf("%d MiB", t.Size>>20)
	}
	direction, since := "", ""
	if t.BothWays {
		direction = " in each direction"
	}
	if t.Cold {
		since = " from the first byte on"
	}
	return fmt.Sprintf("messages of %s, %d in flight on each of %d connections%s, runs of about %s%s", size, t.Depth, t.Connections, direction, t.Length, since)
}

// Notes say how to read what it measures.
func (t Transfer) Notes() []string {
	switch {
	case t.Fault != nil:
		return []string{fmt.Sprintf("The busiest link falls silent %s after the start, for %s: it loses everything, and the routers continue to use it.\n"+
			"The rate is the mean from %s after that until the link is back.", t.Fault.Start, t.Fault.Length, t.Fault.Recovery)}
	case t.Cold:
		return []string{fmt.Sprintf("Nothing is sent before a run. The rise time is that from the first byte on the links until the end of the first %s in which they carry %.0f %% of\n"+
			"the wire limit. It is read from the links' counters, which count repeated bytes too.", riseOver, riseShare*100)}
	case t.BothWays:
		return []string{"Both hosts send and receive at the same time. Rates are those of both directions together."}
	}
	return nil
}

// Plain sends by a number of plain sockets, each in a thread of its own, which block.
func (t Transfer) Plain(flows int) experiment.Contender {
	name := fmt.Sprintf("%d plain sockets", flows)
	if flows == 1 {
		name = "plain socket"
	}
	return experiment.Contender{Name: name, Reference: true, Run: func(ctx context.Context, r experiment.Run) (experiment.Measured, error) {
		return t.traced(ctx, r.Lab, func() (outcome, error) { return t.plain(ctx, r.Lab, flows) })
	}}
}

func (t Transfer) plain(ctx context.Context, lab *netns.Lab, flows int) (outcome, error) {
	o := sockets.Options{Flows: flows, Size: t.Size, Depth: t.Depth, Length: t.Length, PingPong: t.PingPong}
	receiver, address, err := sockets.StartListening(ctx, lab, netns.H2, "receive", o)
	if err != nil {
		return nil, err
	}
	o.Address = address
	sender, err := sockets.StartSide(ctx, lab, netns.H1, "send", o)
	if err != nil {
		return nil, receiver.Kill(err)
	}
	measuring, other := receiver, sender
	if t.PingPong {
		measuring, other = sender, receiver
	}
	text, err := proc.WaitBoth(measuring, other)
	if err != nil {
		return nil, err
	}
	report, err := sockets.ReadReport(text)
	if err != nil {
		return nil, err
	}
	bytes := float64(report.Bytes)
	return t.outcome(bytes/report.Seconds/1e9, report.P50, sender.CPUPerGB(bytes), receiver.CPUPerGB(bytes), proc.CPUShare(sender, receiver)), nil
}

// Plugin sends by the plugin, with these variables of the environment.
func (t Transfer) Plugin(name string, environment ...string) experiment.Contender {
	d := &driven{Transfer: t, environment: environment, speed: map[string]float64{}}
	return experiment.Contender{Name: name, Run: func(ctx context.Context, r experiment.Run) (experiment.Measured, error) {
		if err := known(r.Library, environment); err != nil {
			return experiment.Measured{}, err
		}
		return d.run(ctx, r, "--plugin", r.Library)
	}}
}

// An outcome is what one run measured.
type outcome map[experiment.Quantity]float64

// outcome has the quantities of a run: GB/s, seconds of a round trip, seconds of a processor for each GB, and a share
// of all processors.
func (t Transfer) outcome(rate, roundTrip, sending, receiving, own float64) outcome {
	if t.PingPong {
		return outcome{RoundTrip: roundTrip * 1e6, OwnShare: 100 * own}
	}
	got := outcome{Rate: rate, Sending: sending, Receiving: receiving, Processor: sending + receiving, OwnShare: 100 * own}
	if sending > 0 {
		got[PerCore] = 1 / sending
	}
	return got
}

// driven is a transfer by evenkeel-bench: over a plugin, or sockets in place of one.
type driven struct {
	Transfer
	environment []string
	// speed is the rate of each contender's last run, in GB/s. It sets the number of messages of the next run, so that the
	// run takes about as long as it should.
	speed map[string]float64
}

// run is one run, after a trial where the speed is not known.
func (d *driven) run(ctx context.Context, r experiment.Run, transport ...string) (experiment.Measured, error) {
	if d.Fault != nil {
		d.speed[r.Contender] = d.Limit // so that the run is not over before the fault
	}
	if _, isKnown := d.speed[r.Contender]; !isKnown && !d.Idle {
		// A low estimate.
		speed := 0.05
		if d.Limit > 0 {
			speed = d.Limit / 4
		}
		if d.PingPong {
			speed = float64(d.Size) / 50e-6 / 1e9
		}
		trial := *d
		trial.Length = trialLength
		if _, err := trial.transfer(ctx, r, speed, transport); err != nil {
			return experiment.Measured{}, fmt.Errorf("trial: %w", err)
		}
	}
	return d.traced(ctx, r.Lab, func() (outcome, error) {
		if d.Idle {
			return d.idle(ctx, r, transport)
		}
		return d.transfer(ctx, r, d.speed[r.Contender], transport)
	})
}

// transfer sends the number of messages that takes the transfer's length at that speed.
func (d *driven) transfer(ctx context.Context, r experiment.Run, speed float64, transport []string) (outcome, error) {
	each := d.Size * d.Connections
	if d.BothWays {
		each *= 2
	}
	messages := int(speed * 1e9 * d.Length.Seconds() / float64(each))
	messages = min(max(messages, 4*d.Depth), maxMessages)
	row, receiver, sender, err := runPair(d.starter(ctx, r, messages, transport))
	if err != nil {
		return nil, err
	}
	d.speed[r.Contender] = row.Bandwidth
	return d.outcome(row.Bandwidth, row.P50/1e6, row.Send, row.Receive, proc.CPUShare(sender, receiver)), nil
}

// starter starts the driver: rank 0 on H2, and rank 1 on H1.
func (d *driven) starter(ctx context.Context, r experiment.Run, messages int, transport []string) func(rank int, role string) (*proc.Process, error) {
	driver := netDriver{
		program: r.Driver, master: r.Lab.ControlAddress(netns.H2).String(), port: bootstrapPort, size: d.Size, messages: messages,
		warmup: 16, // on each connection
	}
	if d.Cold {
		driver.warmup = 0
	}
	// Where the network is the limit, the driver sleeps after many rounds in which nothing moves: one that polls as NCCL
	// does would use all processor time that is left, whatever the plugin uses.
	polling := "nccl"
	if d.Limit > 0 || d.Idle {
		polling = "sleep"
	}
	driver.flags = append([]string{"--driver", polling}, transport...)
	if d.Fault != nil {
		driver.flags = append(driver.flags, "--check-all") // retransmitted data must be right
	}
	if d.BothWays {
		driver.flags = append(driver.flags, "--both-ways")
	}
	if d.PingPong {
		driver.flags = append(driver.flags, "--ping-pong")
	} else {
		driver.flags = append(driver.flags, "--connections", strconv.Itoa(d.Connections), "--depth", strconv.Itoa(d.Depth))
	}
	environment := append([]string{"NCCL_SOCKET_IFNAME=" + netns.DataInterface}, d.environment...)
	return func(rank int, role string) (*proc.Process, error) {
		return proc.Start(ctx, r.Lab, []netns.Host{netns.H2, netns.H1}[rank], role, environment, driver.command(rank)...)
	}
}
