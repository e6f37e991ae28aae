// Package ncclout parses the output of an all-reduce benchmark: evenkeel-bench or NVIDIA's nccl-tests, as text or JSON.
// It is pure. It accepts logs as they come from pods: truncated anywhere, with lines of other programs in between.
package ncclout

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"evenkeel.dev/evenkeel/operator/internal/text"
)

// Half is one of a row's two measurements.
type Half struct {
	// TimeUS is the mean time of one operation, microseconds.
	TimeUS float64
	// AlgBW is the buffer's bytes per time, GB/s (10^9).
	AlgBW float64
	// BusBW is the bus bandwidth, GB/s. It is comparable between numbers of ranks.
	BusBW float64
	// Wrong is the number of wrong elements. It is valid only if Checked.
	Wrong   int64
	Checked bool
}

// Row is the measurement of one size.
type Row struct {
	// Size is the buffer's, bytes; Count is its elements.
	Size, Count int64
	// Type and Op are spelled as in the log: "float", "sum". Op is "none" if nothing is reduced.
	Type, Op            string
	OutOfPlace, InPlace Half
}

// Network carried the data of at least one rank.
type Network struct {
	// Name is the plugin's own, or NCCL's name of a built-in network: "Evenkeel", "Socket", "IB".
	Name string
	// Version of the ncclNet interface; 0 if unknown. Library and SHA256 may be unknown too.
	Version int
	// Library is the plugin's file, SHA256 the first digits of its hash.
	Library, SHA256 string
	// Transport is "tcp", "rdma", or [Mixed] if ranks differ; empty if unknown.
	Transport string
}

// Mixed is the transport if ranks differ.
const Mixed = "mixed"

// FailureKind is the kind of cause of a failed run.
type FailureKind string

const (
	// FailureDriver is a node without a usable GPU or driver. It is inconclusive about the network.
	FailureDriver FailureKind = "Driver"
	// FailurePlugin is a plugin that could not be loaded.
	FailurePlugin FailureKind = "Plugin"
	// FailureVersion is programs of different versions: a benchmark that does not know what this program asks of it, or
	// peers that refuse each other. It is inconclusive about the network.
	FailureVersion FailureKind = "Version"
	// FailureRun is everything else that the benchmark or NCCL reported: a lost rank, a refused connection.
	FailureRun FailureKind = "Run"
)

// Failure is the cause of a failed run, taken from the log.
type Failure struct {
	Kind FailureKind
	// Line is the line of the log, without control characters, at most 300 bytes.
	Line string
}

// Report is the content of one log.
type Report struct {
	Rows []Row
	// Networks that the ranks used, each once, sorted by name. More than one: the ranks differ.
	Networks []Network
	// OutOfBounds is the number of wrong elements: the benchmark's sum or, in an incomplete run, the worst row's number.
	// AverageBusBW is over all rows and both halves, GB/s. It is valid only if the run is complete.
	OutOfBounds  int64
	AverageBusBW float64
	// LockedMemory is the limit of memory that the ranks may lock, bytes, negative without a limit, or nil if unknown.
	LockedMemory *int64
	// LatencyUS is the time of a small message from one rank to the next, microseconds, or 0 if it was not measured.
	LatencyUS float64
	// Devices is the largest number of network devices of a rank, of which the benchmark used one, or 0 if unknown.
	Devices int
	// Failure is nil if the log has none.
	Failure *Failure
}

// maxSmall is the size up to which the time of an operation does not depend on it, bytes.
const maxSmall = 1 << 10

// HalfSmallestUS is half the time of the smallest all-reduce of nccl-tests, microseconds; 0: it is not small. An
// all-reduce takes at least a message in each direction, and something of NCCL's own.
func (r Report) HalfSmallestUS() float64 {
	small := slices.DeleteFunc(slices.Clone(r.Rows), func(row Row) bool { return row.Size == 0 || row.Size > maxSmall })
	if len(small) == 0 {
		return 0
	}
	return slices.MinFunc(small, func(a, b Row) int { return cmp.Compare(a.Size, b.Size) }).OutOfPlace.TimeUS / 2
}

// PeakBusBW is the highest bus bandwidth of any row, GB/s; 0 without rows.
func (r Report) PeakBusBW() float64 {
	var peak float64
	for _, row := range r.Rows {
		peak = max(peak, row.OutOfPlace.BusBW, row.InPlace.BusBW)
	}
	return peak
}

// Parse parses a log. Without an error the run is complete; OutOfBounds reports whether its data was correct. An error
// is one line that names what is missing and, if the log tells it, the cause. The Report then holds what could be
// parsed.
func Parse(log []byte) (Report, error) {
	p := parser{networks: map[string]Network{}}
	for len(log) > 0 {
		line, rest, whole := bytes.Cut(log, []byte("\n"))
		p.line(strings.TrimRight(string(line), "\r"), whole)
		log = rest
	}
	for _, n := range p.networks {
		p.report.Networks = append(p.report.Networks, n)
	}
	slices.SortFunc(p.report.Networks, func(a, b Network) int { return strings.Compare(a.Name, b.Name) })
	for _, row := range p.report.Rows {
		p.report.OutOfBounds = max(p.report.OutOfBounds, row.OutOfPlace.Wrong, row.InPlace.Wrong)
	}
	return p.report, p.incomplete()
}

type parser struct {
	report   Report
	networks map[string]Network
	// loaded holds the versions of all plugins that NCCL loaded.
	loaded map[string]int
	// head is the beginning of a row whose numbers are on the next line, see [parser.row].
	head []string
	// last is the last line that is not empty.
	last                string
	bounds, avg, inJSON bool
}

var (
	launcherTag = regexp.MustCompile(`^\[\d+,\d+\]<std(out|err)>:\s?`)
	benchNet    = regexp.MustCompile(`^# Network: (\S+) \(ncclNet v(\d{1,4})\), (.+), sha256 ([0-9a-f]+)$`)
	lockedLimit = regexp.MustCompile(`^# Locked memory, KiB: (unlimited|\d{1,15})$`)
	benchRank   = regexp.MustCompile(`^#\s+Rank\s+\d+ \S+ \S+: (\S+) on \S`)
	benchDelay  = regexp.MustCompile(`^# Latency: (\S+) us from one rank to the next$`)
	ncclUsing   = regexp.MustCompile(`NCCL INFO Using network (\S+)`)
	ncclLoaded  = regexp.MustCompile(`NCCL INFO NET/Plugin: Loaded net plugin (\S+) \(v(\d{1,4})\)`)
	outOfBounds = regexp.MustCompile(`^#\s*Out of bounds values\s*:\s*(\d+) (OK|FAILED)\s*$`)
	averageBW   = regexp.MustCompile(`^#\s*Avg bus bandwidth\s*:\s*(\S+)\s*(OK|FAILED)?\s*$`)
	ncclMessage = regexp.MustCompile(`\S*:\d+:\d+ \[-?\d+\] .*NCCL (INFO|WARN|TRACE)`)
	driverGone  = regexp.MustCompile(`(?i)no (CUDA|ROCm)-capable device|driver version is insufficient|libcuda\.so|driver not loaded|Invalid number of GPUs|requested GPUs .* is greater than`)
	usage       = regexp.MustCompile(`^error: (unexpected argument '|unrecognized subcommand '|invalid value '.*' for '-|the following required arguments )`)
	otherPeer   = regexp.MustCompile(`the peer has (Evenkeel protocol version|version \d+ of the reduction protocol)`)
	failed      = regexp.MustCompile(`^(error:|# error:)|Test (NCCL|CUDA|HIP) failure|NCCL WARN|Invalid number of GPUs|requested GPUs .* is greater than`)
)

// line parses one line. Whole is false for a last line without its end, which may be truncated within a number.
func (p *parser) line(line string, whole bool) {
	line = launcherTag.ReplaceAllString(line, "")
	trimmed := strings.TrimSpace(line)
	if trimmed == "" {
		return
	}
	p.last = line
	if strings.HasPrefix(trimmed, "{") {
		p.json([]byte(trimmed))
		return
	}
	if failed.MatchString(line) {
		p.failure(line)
	}
	if !whole || p.network(line) {
		return
	}
	switch m := outOfBounds.FindStringSubmatch(line); {
	case m != nil && !p.inJSON:
		n, err := strconv.ParseInt(m[1], 10, 64)
		p.report.OutOfBounds, p.bounds = n, err == nil && (n == 0) == (m[2] == "OK")
		return
	case m != nil:
		return
	}
	if m := lockedLimit.FindStringSubmatch(line); m != nil {
		limit := int64(-1)
		if n, err := strconv.ParseInt(m[1], 10, 64); err == nil {
			limit = n << 10
		}
		p.report.LockedMemory = &limit
		return
	}
	if m := benchDelay.FindStringSubmatch(line); m != nil {
		if v, ok := number(m[1]); ok && !p.inJSON {
			p.report.LatencyUS = v
		}
		return
	}
	if m := averageBW.FindStringSubmatch(line); m != nil {
		if v, ok := number(m[1]); ok && !p.inJSON {
			p.report.AverageBusBW, p.avg = v, true
		}
		return
	}
	if !p.inJSON {
		p.row(line)
	}
}

func (p *parser) network(line string) bool {
	if m := benchNet.FindStringSubmatch(line); m != nil {
		version, _ := strconv.Atoi(m[2])
		p.addNetwork(Network{Name: m[1], Version: version, Library: m[3], SHA256: m[4]})
		return true
	}
	if m := benchRank.FindStringSubmatch(line); m != nil {
		p.addNetwork(Network{Name: m[1]})
		return true
	}
	if m := ncclLoaded.FindStringSubmatch(line); m != nil {
		if p.loaded == nil {
			p.loaded = map[string]int{}
		}
		p.loaded[m[1]], _ = strconv.Atoi(m[2])
		return true
	}
	if m := ncclUsing.FindStringSubmatch(line); m != nil {
		p.addNetwork(Network{Name: m[1], Version: p.loaded[m[1]]})
	}
	return false
}

// addNetwork records a network. It keeps the most complete description, and merges the transports of all ranks.
func (p *parser) addNetwork(n Network) {
	if n.Name == "" {
		return
	}
	known := p.networks[n.Name]
	switch {
	case n.Transport == "":
		n.Transport = known.Transport
	case known.Transport != "" && known.Transport != n.Transport:
		n.Transport = Mixed
	}
	if known.Version != 0 {
		known.Transport = n.Transport
		n = known
	}
	p.networks[n.Name] = n
}

// failure records the first cause. A missing driver or plugin, or another version, takes precedence: it explains the
// other failures.
func (p *parser) failure(line string) {
	kind := FailureRun
	switch {
	case driverGone.MatchString(line):
		kind = FailureDriver
	case strings.Contains(line, "no plugin loaded"):
		kind = FailurePlugin
	case usage.MatchString(line), otherPeer.MatchString(line):
		kind = FailureVersion
	}
	if p.report.Failure == nil || (p.report.Failure.Kind == FailureRun && kind != FailureRun) {
		p.report.Failure = &Failure{Kind: kind, Line: oneLine(line)}
	}
}

// row parses a line that may be a row. nccl-tests writes the beginning of a row before it runs, and the numbers after.
// NCCL's messages are on the same stdout: a message may follow the beginning, and the numbers may be on a line of their
// own.
func (p *parser) row(line string) {
	if at := ncclMessage.FindStringIndex(line); at != nil {
		// The message's host name follows the last field without a space. That field is the root, which is not kept.
		if head := strings.Fields(line); at[0] > 0 && len(head) > 4 && isHead(head) {
			p.head = head[:4]
		}
		return
	}
	fields := strings.Fields(line)
	if p.head != nil {
		if _, ok := number(fields[0]); ok && len(fields)%4 == 0 && !isHead(fields) {
			fields = slices.Concat(p.head, fields)
		}
		p.head = nil
	}
	if row, ok := parseRow(fields); ok {
		p.report.Rows = append(p.report.Rows, row)
	}
}

func isHead(fields []string) bool {
	_, ok := parseHead(fields)
	return ok
}

// parseHead parses size, count, type and operation.
func parseHead(fields []string) (Row, bool) {
	if len(fields) < 4 || !isWord(fields[2]) || !isWord(fields[3]) {
		return Row{}, false
	}
	size, err1 := strconv.ParseInt(fields[0], 10, 64)
	count, err2 := strconv.ParseInt(fields[1], 10, 64)
	return Row{Size: size, Count: count, Type: fields[2], Op: fields[3]}, err1 == nil && err2 == nil && size >= 0 && count >= 0
}

func isWord(s string) bool {
	return len(s) <= 32 && unicode.IsLetter(rune(s[0])) && !strings.ContainsFunc(s, func(r rune) bool {
		return r >= unicode.MaxASCII || !unicode.IsLetter(r) && !unicode.IsDigit(r) && r != '_'
	})
}

// parseRow parses a row: the head, the root (absent in old versions), then four numbers for each half, or eight with
// per-iteration times. A timestamp of two fields may follow.
func parseRow(fields []string) (Row, bool) {
	row, ok := parseHead(fields)
	if !ok {
		return row, false
	}
	rest := fields[4:]
	if len(rest)%2 == 1 {
		if _, err := strconv.Atoi(rest[0]); err != nil {
			return row, false
		}
		rest = rest[1:]
	}
	width := 4
	switch len(rest) {
	case 8, 10:
	case 16, 18:
		width = 8
	default:
		return row, false
	}
	var ok1, ok2 bool
	row.OutOfPlace, ok1 = parseHalf(rest[:4])
	row.InPlace, ok2 = parseHalf(rest[width : width+4])
	return row, ok1 && ok2
}

func parseHalf(fields []string) (h Half, ok bool) {
	for i, to := range []*float64{&h.TimeUS, &h.AlgBW, &h.BusBW} {
		if *to, ok = number(fields[i]); !ok {
			return h, false
		}
	}
	if fields[3] == "N/A" {
		return h, true
	}
	wrong, ok := number(fields[3])
	h.Wrong, h.Checked = elements(wrong), true
	return h, ok
}

// number parses a finite number that is not negative.
func number(s string) (float64, bool) {
	v, err := strconv.ParseFloat(s, 64)
	return v, err == nil && v >= 0 && !math.IsInf(v, 0)
}

// elements converts a count that was printed as a floating-point number.
func elements(v float64) int64 { return int64(max(-1, min(v, 1<<53))) }

// incomplete returns an error that says what the run lacks; nil if it is complete.
func (p *parser) incomplete() error {
	if p.avg && p.bounds && len(p.report.Rows) > 0 {
		return nil
	}
	var have string
	switch {
	case p.last == "":
		return errors.New("the log is empty; the benchmark wrote nothing")
	case len(p.report.Rows) == 0:
		have = "no results"
	case !p.avg || !p.bounds:
		have = fmt.Sprintf("%d rows and no summary", len(p.report.Rows))
	}
	if f := p.report.Failure; f != nil {
		return fmt.Errorf("the run is not complete: %s; it reports: %s", have, f.Line)
	}
	return fmt.Errorf("the run is not complete: %s; the log ends with: %s", have, oneLine(p.last))
}

// maxLine is the maximum length of a log line in a message, bytes.
const maxLine = 300

// oneLine cleans and shortens a log line for a message.
func oneLine(s string) string {
	s = strings.Map(func(r rune) rune {
		if r == unicode.ReplacementChar || !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, s)
	return text.Clip(strings.Join(strings.Fields(s), " "), maxLine)
}
