package reduction

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

func TestServerCount(t *testing.T) {
	for _, test := range []struct {
		workers        int
		worker, server float64
		want           int
	}{
		{8, 12.5, 25, 4},
		{8, 12.5, 12.5, 8},
		{8, 12.5, 24, 5}, // 4.2
		{3, 0.1, 0.3, 1}, // exactly one, were it not for floating point
		{2, 1, 1000, 1},
		{1, 1, 1, 0},
		{0, 1, 1, 0},
		{1 << 30, 1e9, 1e-9, 1<<31 - 1},
	} {
		if got, err := Size(test.workers, test.worker, test.server); err != nil || got != test.want {
			t.Errorf("%d workers of %g, servers of %g: %d (%v), want %d", test.workers, test.worker, test.server, got, err, test.want)
		}
	}
	for _, bad := range [][2]float64{{0, 1}, {1, 0}, {-1, 1}} {
		if _, err := Size(4, bad[0], bad[1]); err == nil {
			t.Errorf("bandwidths %v are fine", bad)
		}
	}
}

// Fewer servers than Size says cannot keep up, and those it says can.
func TestServerCountIsMinimal(t *testing.T) {
	for workers := 2; workers <= 64; workers++ {
		for _, server := range []float64{0.5, 1, 1.5, 2, 3, 7, 100} {
			n, err := Size(workers, 1, server)
			if err != nil {
				t.Fatal(err)
			}
			received := func(servers int) float64 { return float64(workers) / float64(servers) / server } // time, of what a worker needs to send
			if received(n) > 1+1e-9 || (n > 1 && received(n-1) <= 1) {
				t.Errorf("%d workers, servers of %g: %d", workers, server, n)
			}
		}
	}
}

func TestServersByAnnotation(t *testing.T) {
	profile := func(change func(*evenkeel.ReductionSpec)) *evenkeel.NetworkProfile {
		p := &evenkeel.NetworkProfile{}
		p.Name = "default"
		if change != nil {
			change(&p.Spec.Reduction)
		}
		return p
	}
	three, many := int32(3), int32(32)
	off := profile(func(s *evenkeel.ReductionSpec) { s.Mode = evenkeel.ReductionOff })
	always := profile(func(s *evenkeel.ReductionSpec) { s.Mode = evenkeel.ReductionAlways })
	alwaysThree := profile(func(s *evenkeel.ReductionSpec) { s.Mode, s.Servers = evenkeel.ReductionAlways, &three })
	sized := profile(func(s *evenkeel.ReductionSpec) {
		s.MaxServers = &many
		s.Sizing = evenkeel.SizingSpec{WorkerBandwidth: resource.MustParse("12500M"), ServerBandwidth: resource.MustParse("25G")}
	})
	slow := profile(func(s *evenkeel.ReductionSpec) {
		s.Sizing = evenkeel.SizingSpec{WorkerBandwidth: resource.MustParse("25G"), ServerBandwidth: resource.MustParse("12500M")}
	})
	broken := profile(func(s *evenkeel.ReductionSpec) {
		s.Sizing = evenkeel.SizingSpec{WorkerBandwidth: resource.MustParse("0"), ServerBandwidth: resource.MustParse("25G")}
	})
	nothing, little := resource.MustParse("0"), resource.MustParse("8Mi")
	noCPU := profile(func(s *evenkeel.ReductionSpec) { s.Server.CPU = &nothing })
	noMemory := profile(func(s *evenkeel.ReductionSpec) { s.Server.Memory = &little })
	for _, test := range []struct {
		name    string
		asked   string
		profile *evenkeel.NetworkProfile
		workers int
		want    int
		refused string
	}{
		{"nobody asks", "", profile(nil), 8, 0, ""},
		{"a number", "4", profile(nil), 8, 4, ""},
		{"one for each worker", "Auto", profile(nil), 8, 8, ""},
		{"no more than allowed", "Auto", profile(nil), 100, 16, ""},
		{"by bandwidth", "Auto", sized, 8, 4, ""},
		{"by bandwidth, more than the default allows", "Auto", sized, 50, 25, ""},
		{"by bandwidth, of slow servers", "Auto", slow, 2, 4, ""},
		{"not by bandwidth", "3", slow, 2, 3, ""},
		{"as many as there may be", "16", profile(nil), 2, 16, ""},
		{"alone", "Auto", profile(nil), 1, 0, ""},
		{"alone, and yet", "2", profile(nil), 1, 2, ""},
		{"every job", "", always, 4, 4, ""},
		{"every job, so many", "", alwaysThree, 4, 3, ""},
		{"every job but this", "Off", alwaysThree, 4, 0, ""},
		{"not this many", "2", alwaysThree, 4, 2, ""},
		{"one for each worker of this", "Auto", alwaysThree, 2, 2, ""},
		{"off, declined", "Off", off, 4, 0, ""},
		{"off, silent", "", off, 4, 0, ""},
		{"off, asked", "4", off, 4, 0, "NetworkProfile default has reduction.mode Off"},
		{"off, asked for Auto", "Auto", off, 4, 0, "NetworkProfile default has reduction.mode Off"},
		{"too many", "17", profile(nil), 4, 0, "17 is more than the 16 that NetworkProfile default allows"},
		{"a word", "many", profile(nil), 4, 0, `is "many": a number from 1 to 16, Auto or Off`},
		{"a digit and what cannot be seen", "\u200b1", profile(nil), 4, 0, "a number from 1 to 16"},
		{"zero", "0", profile(nil), 4, 0, `is "0": a number from 1 to 16`},
		{"beyond all bounds", "99999999999999999999", profile(nil), 4, 0, "a number from 1 to 16"},
		{"another case", "auto", profile(nil), 4, 0, `is "auto"`},
		{"servers that cannot work", "2", noCPU, 4, 0, "cpu 0 and memory 1Gi"},
		{"servers that cannot hold anything", "2", noMemory, 4, 0, "cpu 2 and memory 8Mi"},
		{"servers that are not wanted", "", noMemory, 4, 0, ""},
		{"figures that are none", "Auto", broken, 4, 0, "NetworkProfile default: reduction.sizing"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := Servers(test.asked, test.profile, test.workers)
			if got != test.want || (err == nil) != (test.refused == "") || (err != nil && !strings.Contains(err.Error(), test.refused)) {
				t.Errorf("%d, %v; want %d, %q", got, err, test.want, test.refused)
			}
			if err != nil && strings.Contains(err.Error(), "\n") {
				t.Errorf("more than a line: %v", err)
			}
		})
	}
}
