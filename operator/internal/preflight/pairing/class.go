package pairing

import (
	"math"
	"slices"
	"strings"
)

// class is the result of a run. Bad classes come last, ordered by severity.
type class int

const (
	classNone class = iota
	classPass
	// classUncompared: the run could be compared with nothing yet.
	classUncompared
	classFault
	classSlow
	classBroken
	classWrong
	classFallback
)

func (c class) bad() bool { return c >= classSlow }

// measured reports whether the run measured the expected network.
func (c class) measured() bool { return c == classPass || c == classSlow || c == classUncompared }

func (c class) reason() Reason {
	switch c {
	case classFallback:
		return ReasonFallback
	case classWrong:
		return ReasonWrongData
	case classBroken:
		return ReasonBroken
	default:
		return ReasonSlow
	}
}

// classify returns the class of a run without regard to its speed. A slow run is classPass until it is compared.
func (c *Check) classify(run *Run) class {
	if len(run.InUse) > 0 || run.Outcome != Measured && run.Outcome != Broken {
		return classFault
	}
	other := func(network string) bool { return !strings.EqualFold(network, c.Network) }
	switch {
	case c.Network != "" && slices.ContainsFunc(run.Networks, other):
		return classFallback
	case run.Outcome == Broken:
		return classBroken
	case c.Network != "" && len(run.Networks) == 0:
		return classFault // it is unknown what was measured
	case run.Wrong > 0:
		return classWrong
	case !(run.BusBW > 0) || math.IsInf(run.BusBW, 0):
		return classFault
	}
	return classPass
}

const (
	defaultPercent = 85
	// minRunsForSpread is the minimum number of runs whose spread is meaningful.
	minRunsForSpread = 5
	// spreadFactor is three standard deviations of normally distributed data, in median absolute deviations.
	spreadFactor = 3 * 1.4826
	// maxTolerance is the share of the median below which a run is too slow, whatever the spread.
	maxTolerance = 0.5
)

// limits are the thresholds of the pools, by name. A pool's median is computed once, from the first round with two of its runs, and
// then stays: the class of a run does not change with later runs. Runs of several rounds have nodes in common, and those with the
// same slow node are equally slow: where no round has two runs, fabric.limitAmongNodes compares nodes instead.
type limits map[string]Limit

func newLimits(c *Check) limits {
	l := limits{}
	for _, n := range c.Nodes {
		minimum := c.Thresholds.MinBusBW
		if !(minimum > 0) {
			minimum = c.Thresholds.PoolMinBusBW[n.Pool]
		}
		l[n.Pool] = Limit{MinBusBW: max(0, minimum)}
	}
	return l
}

// addRound adds the runs of a round. Runs between pools set no median: a pool that is tested with others has one node.
func (l limits) addRound(s *state, runs []int) {
	values := map[string][]float64{}
	for _, i := range runs {
		run := &s.check.Runs[i]
		pool := s.byName[run.Nodes[0]].pool
		if s.class[i] == classPass && !(l[pool].MinBusBW > 0) {
			values[pool] = append(values[pool], run.BusBW)
		}
	}
	t := s.check.Thresholds
	for pool, all := range values {
		if len(all) < 2 {
			all = nil
			if usual := t.UsualBusBW[pool]; usual > 0 {
				all = []float64{usual}
			}
		}
		if len(all) > 0 {
			l[pool] = limitFromMedian(all, t.MinPercentOfMedian)
		}
	}
}

func limitFromMedian(values []float64, percent float64) Limit {
	if !(percent > 0) {
		percent = defaultPercent
	}
	median, mad := MedianAndMAD(values)
	minimum := median * min(percent, 100) / 100
	if len(values) >= minRunsForSpread {
		minimum = min(minimum, max(median-spreadFactor*mad, median*maxTolerance))
	}
	return Limit{MinBusBW: minimum, Median: median, MAD: mad}
}

// limitFor returns the limit of a run: the lowest limit of its nodes' pools, 0 if one of them has none.
func (l limits) limitFor(s *state, nodes []string) float64 {
	minimum := math.Inf(1)
	for _, name := range nodes {
		minimum = min(minimum, l[s.byName[name].pool].MinBusBW)
	}
	return minimum
}
