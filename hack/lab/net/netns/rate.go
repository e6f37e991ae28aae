package netns

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// A Rate is in bits per second, as on the wire; zero is unlimited.
type Rate uint64

const (
	Kbit Rate = 1_000
	Mbit Rate = 1_000_000
	Gbit Rate = 1_000_000_000
)

const (
	minRate = 100 * Kbit
	maxRate = 100 * Gbit
)

var rateUnits = []struct {
	name string
	rate Rate
}{{"gbit", Gbit}, {"mbit", Mbit}, {"kbit", Kbit}}

// ParseRate reads tc's notation, such as 200mbit or 2.5gbit, or "unlimited".
func ParseRate(text string) (Rate, error) {
	if text == "unlimited" {
		return 0, nil
	}
	for _, unit := range rateUnits {
		number, ok := strings.CutSuffix(text, unit.name)
		if !ok {
			continue
		}
		n, err := strconv.ParseFloat(number, 64)
		if err != nil || math.IsNaN(n) {
			break
		}
		bits := n * float64(unit.rate)
		if bits < float64(minRate) || bits > float64(maxRate) {
			return 0, fmt.Errorf("rate %q: from %s to %s", text, minRate, maxRate)
		}
		return Rate(math.Round(bits)), nil
	}
	return 0, fmt.Errorf(`rate %q: a number and kbit, mbit or gbit, such as 200mbit, or "unlimited"`, text)
}

// ParseRates reads a list of rates, such as 3x1gbit,200mbit.
func ParseRates(text string) ([]Rate, error) {
	var rates []Rate
	for part := range strings.SplitSeq(text, ",") {
		times := 1
		if count, rate, ok := strings.Cut(part, "x"); ok {
			n, err := strconv.Atoi(count)
			if err != nil || n < 1 || n > MaxLinks {
				return nil, fmt.Errorf("rates %q: %q is not a number from 1 to %d", text, count, MaxLinks)
			}
			times, part = n, rate
		}
		rate, err := ParseRate(part)
		if err != nil {
			return nil, err
		}
		for range times {
			rates = append(rates, rate)
		}
	}
	return rates, nil
}

// String is in the notation that ParseRate and tc read.
func (r Rate) String() string {
	if r == 0 {
		return "unlimited"
	}
	for _, unit := range rateUnits {
		if r%unit.rate == 0 {
			return fmt.Sprintf("%d%s", r/unit.rate, unit.name)
		}
	}
	return fmt.Sprintf("%dbit", uint64(r))
}

// bytesIn is the number of bytes that pass within a time.
func (r Rate) bytesIn(seconds float64) int { return int(float64(r) / 8 * seconds) }
