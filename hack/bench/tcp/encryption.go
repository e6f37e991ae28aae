package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
	"evenkeel.dev/evenkeel/hack/bench/internal/stats"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// What encryption is measured for, on networks and loads of the other cases.
const (
	clearName     = "in clear"
	encryptedName = "encrypted"
	opensslName   = "openssl s_client, one connection"
	cipherName    = "AES-128-GCM alone, one core"
	// setUps is the number of connections that are opened at a time.
	setUps    = 64
	setUpName = "set-up"
)

// The goals: shares of what is measured in clear, in the same run, and of what one core's AES-GCM can do.
const (
	shapedShare    = 0.95
	processorShare = 1.5
	cipherShare    = 0.8
	roundTripShare = 1.3
	setUpShare     = 1.5
)

// encryptionCases are the names of the cases that are measured.
var encryptionCases = []string{"four-links", "slow-link", "capped-flows", "silent-link", "one-connection", "four-connections", "ping-pong"}

func encryptionCommand() *cobra.Command {
	var o config
	cmd := &cobra.Command{
		Use:   "encryption",
		Short: "Measure what encryption costs, and write docs/results/encryption.md",
		Long: `Measure what encryption costs, and write docs/results/encryption.md.

In each round, on each network, the plugin sends in clear and then encrypted (EVENKEEL_ENCRYPTION=required).
In the same rounds: what a core's AES-GCM does ("openssl speed"), and a TLS connection of openssl's own
programs with the same cipher and a pre-shared key, and the plugin in clear through a WireGuard tunnel, whose
program is built once. Needs root, openssl, and a machine that does nothing else.

With --only the page is written only with --output, as it lacks the other cases.`,
		Example: `  go run ./hack/bench/tcp encryption
  go run ./hack/bench/tcp encryption --quick --only ping-pong`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runEncryption(cmd.Context(), cmd.OutOrStdout(), o) },
	}
	o.AddFlags(cmd.Flags(), "encryption.md", fullRounds, quickRounds, append(slices.Clone(encryptionCases), setUpName))
	return cmd
}

func runEncryption(ctx context.Context, out io.Writer, o config) error {
	only, err := o.Check(fullRounds, quickRounds)
	if err != nil {
		return err
	}
	root, err := toolbox.Root()
	if err != nil {
		return err
	}
	if o.Output == "" && o.Only == "" {
		o.Output = filepath.Join(root, "docs", "results")
	}
	// Before the build, which raises the load.
	r := encryptionReport{machine: machine.Describe(), source: page.NewSource(ctx, root, "plugin", "hack/bench/tcp"), quick: o.Quick, rounds: o.Rounds}
	if err := o.BuildMissing(ctx, root, false); err != nil {
		return err
	}
	secret := make([]byte, 32)
	if _, err := rand.Read(secret); err != nil {
		return fmt.Errorf("make a key: %w", err)
	}
	key := hex.EncodeToString(secret)
	driven := func(label string, environment ...string) *plugin {
		return &plugin{label: label, library: o.Library, environment: environment, driver: o.Driver, speed: map[string]float64{}}
	}
	environment := []string{"EVENKEEL_JOB_KEY=" + key, "EVENKEEL_ENCRYPTION=required"}
	b := &bench{config: o, out: out, ours: driven(clearName), others: []*plugin{driven(encryptedName, environment...)}}
	box, err := toolbox.New(os.Stderr)
	if err != nil {
		return err
	}
	tunnel, err := newWireguard(ctx, box, b.ours)
	if err != nil {
		return err
	}
	for _, c := range cases(o.Quick) {
		if !slices.Contains(encryptionCases, c.name) || !only.MatchString(c.name) {
			continue
		}
		c.plainFlows, c.polled, c.goals = nil, nil, nil
		switch c.name {
		case "one-connection":
			b.more = []contender{openssl{key}, tunnel, cipher{}}
		case "four-connections":
			b.more = []contender{tunnel, cipher{}}
		}
		result, err := b.measure(ctx, c)
		b.more = nil
		if err != nil {
			return err
		}
		r.cases = append(r.cases, result)
	}
	if only.MatchString(setUpName) {
		if r.setUp, err = b.measureSetUp(ctx, environment); err != nil {
			return err
		}
	}
	if len(r.cases) == 0 && r.setUp == nil {
		return fmt.Errorf("--only %q matches none of the cases: %s, %s", o.Only, strings.Join(encryptionCases, ", "), setUpName)
	}
	text := r.markdown()
	if o.Output == "" {
		_, err = out.Write(text)
		return err
	}
	return page.Write(o.Output, map[string][]byte{"encryption.md": text})
}

// cipher is what one core encrypts, of records as TLS has them, without a network.
type cipher struct{}

func (cipher) name() string { return cipherName }

func (cipher) prepare(context.Context, *netns.Lab, benchCase) error { return nil }

func (cipher) run(ctx context.Context, _ *netns.Lab, _ benchCase) (outcome, error) {
	started := time.Now()
	text, cpu, err := proc.OutputAndCPU(ctx, "openssl", "speed", "-mr", "-elapsed", "-seconds", "1", "-bytes", "16384", "-aead", "-evp", "aes-128-gcm")
	if err != nil {
		return outcome{}, fmt.Errorf("openssl speed: %w", err)
	}
	own := proc.Share(cpu, time.Since(started))
	for line := range strings.Lines(string(text)) {
		fields := strings.Split(strings.TrimSpace(line), ":")
		if fields[0] == "+F" {
			if speed, err := strconv.ParseFloat(fields[len(fields)-1], 64); err == nil && speed > 0 {
				return outcome{Rate: speed / 1e9, Send: 1e9 / speed, Own: own}, nil
			}
		}
	}
	return outcome{}, fmt.Errorf("openssl speed: no line with +F in %q", text)
}

// openssl is a TLS 1.3 connection between openssl's own programs.
type openssl struct{ key string }

const opensslPort = "7443"

func (openssl) name() string { return opensslName }

func (openssl) prepare(context.Context, *netns.Lab, benchCase) error { return nil }

func (p openssl) run(ctx context.Context, lab *netns.Lab, c benchCase) (got outcome, err error) {
	common := []string{"-tls1_3", "-psk", p.key, "-ciphersuites", "TLS_AES_128_GCM_SHA256", "-quiet"}
	server, err := lab.Command(ctx, netns.H2, append([]string{"openssl", "s_server", "-nocert", "-accept", opensslPort}, common...)...)
	if err != nil {
		return outcome{}, err
	}
	// What it receives goes to /dev/null, and what it says is part of an error.
	var said bytes.Buffer
	server.Stderr = &said
	// It would close the connection at the end of its input.
	input, err := server.StdinPipe()
	if err != nil {
		return outcome{}, err
	}
	defer input.Close()
	started := time.Now()
	if err := server.Start(); err != nil {
		return outcome{}, fmt.Errorf("openssl s_server: %w", err)
	}
	var sending time.Duration
	defer func() {
		// It serves until it is ended.
		_ = server.Process.Kill()
		_ = server.Wait()
		if err == nil {
			receiving := proc.CPUTime(server)
			got.Receive = receiving.Seconds() / (got.Rate * c.length.Seconds())
			got.Own = proc.Share(sending+receiving, time.Since(started))
		}
	}()
	if err := awaitListener(ctx, lab, netns.H2); err != nil {
		return outcome{}, fmt.Errorf("openssl s_server: %w: %s", err, said.Bytes())
	}
	zero, err := os.Open("/dev/zero")
	if err != nil {
		return outcome{}, err
	}
	defer zero.Close()
	address := lab.Address(netns.H2).String() + ":" + opensslPort
	client, err := lab.Command(ctx, netns.H1, append([]string{"openssl", "s_client", "-connect", address}, common...)...)
	if err != nil {
		return outcome{}, err
	}
	client.Stdin = zero
	if err := client.Start(); err != nil {
		return outcome{}, fmt.Errorf("openssl s_client: %w", err)
	}
	_, before, err := lab.Traffic(netns.H1)
	timer := time.NewTimer(c.length)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	_, after, errAfter := lab.Traffic(netns.H1)
	_ = client.Process.Kill()
	_ = client.Wait()
	if err := errors.Join(err, errAfter, ctx.Err()); err != nil {
		return outcome{}, err
	}
	got.Rate = float64(after-before) / c.length.Seconds() / 1e9
	if got.Rate < 0.01 {
		return outcome{}, fmt.Errorf("openssl sent almost nothing: %s", said.Bytes())
	}
	sending = proc.CPUTime(client)
	got.Send = sending.Seconds() / (got.Rate * c.length.Seconds())
	return got, nil
}

// awaitListener waits until something listens at opensslPort on a host.
func awaitListener(ctx context.Context, lab *netns.Lab, host netns.Host) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		text, err := lab.Exec(ctx, host, "ss", "-ltnH", "sport", "=", ":"+opensslPort)
		if err == nil && text != "" {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.New("it does not listen")
		case <-tick.C:
		}
	}
}

// measureSetUp measures how long connections take to open: seconds in clear and encrypted, by round.
func (b *bench) measureSetUp(ctx context.Context, environment []string) (map[string][]float64, error) {
	fmt.Fprintf(b.out, "\nset-up: %d connections over loopback\n", setUps)
	times := map[string][]float64{}
	for round := range b.config.Rounds {
		for _, name := range []string{clearName, encryptedName} {
			more := []string{"NCCL_SOCKET_IFNAME=lo"}
			if name == encryptedName {
				more = append(more, environment...)
			}
			program := append(append([]string{"env"}, more...), b.config.Driver, "scale", "--json", "--idle", "1", "--connections", strconv.Itoa(setUps), "--plugin", b.config.Library)
			text, err := proc.Output(ctx, program[0], program[1:]...)
			if err != nil {
				return nil, fmt.Errorf("set-up, %s: %w", name, err)
			}
			var got struct {
				Listen float64 `json:"listen_s"`
				Open   float64 `json:"open_s"`
			}
			if err := json.Unmarshal(text, &got); err != nil || got.Open <= 0 {
				return nil, fmt.Errorf("set-up, %s: unexpected report of evenkeel-bench: %q", name, text)
			}
			times[name] = append(times[name], got.Listen+got.Open)
			fmt.Fprintf(b.out, "  %2d of %d  %-32s %.1f ms\n", round+1, b.config.Rounds, name, 1e3*(got.Listen+got.Open))
		}
	}
	return times, nil
}

// An encryptionReport is the page.
type encryptionReport struct {
	machine machine.Machine
	source  page.Source
	quick   bool
	rounds  int
	cases   []caseResult
	setUp   map[string][]float64
}

func (r encryptionReport) markdown() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "# What encryption costs\n\nWritten by `make bench-encryption`; do not edit. [What is protected from whom](../encryption.md) is another page.\n\n")
	fmt.Fprintf(&b, "One machine plays both hosts: %s", r.machine)
	if r.quick {
		b.WriteString("; quick runs")
	}
	fmt.Fprintf(&b, ". %d rounds at %s. %s\n\n", r.rounds, r.source, r.machine.Quiet())
	fmt.Fprintf(&b, "In each round the plugin sends in clear, and then encrypted with `EVENKEEL_ENCRYPTION=required`: TLS 1.3 with\n"+
		"AES-128-GCM, one session for each flow, records made in user space. Networks and loads are those of [TCP](tcp.md). Both hosts share the\n"+
		"processors, so each byte is encrypted and decrypted on the same cores. What one core's AES-GCM does is measured in the same rounds\n"+
		"(`openssl speed -aead -evp aes-128-gcm`, records of 16 KiB). GB/s are 10^9 bytes of payload; figures are medians. Goals are this project's own.\n\n")
	goals := page.Table{Heading: []string{"case", "of", clearName, encryptedName, "ratio", "goal", "reached"}}
	for _, c := range r.cases {
		r.addGoals(&goals, c)
	}
	if r.setUp != nil {
		ours, theirs := stats.Median(r.setUp[encryptedName]), stats.Median(r.setUp[clearName])
		addGoal(&goals, fmt.Sprintf("%d connections over loopback", setUps), "time to open", fmt.Sprintf("%.1f ms", 1e3*theirs), fmt.Sprintf("%.1f ms", 1e3*ours), ours/theirs, setUpShare, false)
	}
	goals.Markdown(&b)
	r.writeLimits(&b)
	b.WriteString("\nWireGuard is `wireguard-go`, its program for systems whose kernel lacks it; one tunnel carries all flows. [Gloo with TLS](collectives-tls.md) is\n" +
		"measured against the collectives.\n\nNot measured: records made by the kernel (kTLS) and WireGuard in the kernel, which this machine's kernel lacks.\n")
	for _, c := range r.cases {
		c.heading(&b)
		b.WriteString("\n")
		c.runs(&b)
	}
	return b.Bytes()
}

// writeLimits says what limits the rows that may miss their goals.
func (r encryptionReport) writeLimits(b *bytes.Buffer) {
	b.WriteString("\nWhat limits them:\n\n* Processor time, unshaped: each byte is encrypted at one end and decrypted at the other.")
	for _, c := range r.cases {
		clear, _ := c.series(clearName)
		alone, ok := c.series(cipherName)
		if !ok || len(clear.good()) == 0 || len(alone.good()) == 0 {
			continue
		}
		both := 2 / alone.value(medianRate)
		var times []float64
		for _, o := range clear.good() {
			times = append(times, o.Send)
		}
		sending := stats.Median(times)
		least := (clear.value(processor) + both) / clear.value(processor)
		fmt.Fprintf(b, " With %s, AES-GCM alone takes %.2f s of a core for a GB, so the least is %.2f times the time in clear."+
			" A sender's core spends %.2f s on that and %.2f s on sending, so it sends at most %.2f of what AES-GCM alone does.",
			counted(c.testCase.connections, "connection"), both, least, both/2, sending, both/2/(both/2+sending))
	}
	b.WriteString(" Memory adds to it: a record is read and written once more at each end, and bytes are received into a buffer before they are opened.\n")
	if r.setUp != nil {
		const flows = setUps * 4
		each := (stats.Median(r.setUp[encryptedName]) - stats.Median(r.setUp[clearName])) / flows
		fmt.Fprintf(b, "* Time to open: each of the %d flows has a handshake of its own, with a key exchange (X25519) and a signature (Ed25519) at both ends:\n"+
			"  %.2f ms of both. Session tickets would spare the signatures alone. Keys of further flows that follow from the first one's would spare most, and flows would not be sessions of their own.\n", flows, each*1e3)
	}
}

func counted(number int, what string) string {
	if number == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", number, what)
}

// addGoals adds the rows of a case.
func (r encryptionReport) addGoals(table *page.Table, c caseResult) {
	clear, _ := c.series(clearName)
	encrypted, _ := c.series(encryptedName)
	title := c.testCase.title
	if len(clear.good()) == 0 || len(encrypted.good()) == 0 {
		table.Add(title, "", "", "", "", "", "no: all runs of one failed")
		return
	}
	of := c.testCase.quantity()
	compare := func(title string, of quantity, share float64) {
		ours, theirs := encrypted.value(of), clear.value(of)
		addGoal(table, title, string(of), of.format(theirs), of.format(ours), ours/theirs, share, !of.lowerIsBetter())
	}
	switch {
	case c.testCase.pingPong:
		compare(title, of, roundTripShare)
	case c.testCase.limit() > 0:
		compare(title, of, shapedShare)
	default:
		compare(title, processor, processorShare)
		// The sender's core encrypts, sends and runs the driver.
		var speeds []float64
		for _, o := range encrypted.good() {
			speeds = append(speeds, 1/o.Send)
		}
		speed := stats.Median(speeds)
		if alone, ok := c.series(cipherName); ok && len(alone.good()) > 0 {
			most := alone.value(medianRate)
			addGoal(table, "", "GB sent in a second of a core", fmt.Sprintf("AES-GCM alone: %.2f", most), fmt.Sprintf("%.2f", speed), speed/most, cipherShare, true)
		}
		for _, name := range []string{opensslName, wireguardName} {
			if other, ok := c.series(name); ok && len(other.good()) > 0 {
				ours, theirs := encrypted.value(medianRate), other.value(medianRate)
				addGoal(table, "", "rate", name+": "+medianRate.format(theirs), medianRate.format(ours), ours/theirs, 1, true)
			}
		}
	}
}

// addGoal adds a row: a ratio, which is to be at least or at most the goal.
func addGoal(table *page.Table, title, of, clear, encrypted string, ratio, goal float64, atLeast bool) {
	word, reached := "at most", ratio <= goal
	if atLeast {
		word, reached = "at least", ratio >= goal
	}
	table.Add(title, of, clear, encrypted, fmt.Sprintf("%.2f", ratio), fmt.Sprintf("%s %g", word, goal), page.YesNo(reached))
}
