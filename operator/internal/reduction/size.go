// Package reduction decides how many reduction servers a job gets, what they are called, and what they are made of. It is
// pure: the webhook tells a job's pods the servers' names before any server exists, and the controller makes servers of
// those names.
package reduction

import (
	"errors"
	"fmt"
	"math"
	"strconv"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// Values of the annotation, besides numbers.
const (
	Auto = "Auto"
	Off  = "Off"
)

// minMemory is what a server needs for its buffers to do anything at all.
const minMemory = 16 << 20

// Servers is how many a job of so many workers gets: what it asks for in the annotation, else what its profile says. An
// error is the user's to mend, or that of whoever wrote the profile.
func Servers(asked string, profile *evenkeel.NetworkProfile, workers int) (int, error) {
	servers, err := count(asked, profile, workers)
	if err != nil || servers == 0 {
		return 0, err
	}
	server := profile.Spec.Reduction.Server.WithDefaults()
	if server.CPU.Sign() <= 0 || server.Memory.Value() < minMemory {
		return 0, fmt.Errorf("NetworkProfile %s: reduction.server has cpu %s and memory %s: a server needs some, and at least 16Mi",
			profile.Name, server.CPU, server.Memory)
	}
	return servers, nil
}

func count(asked string, profile *evenkeel.NetworkProfile, workers int) (int, error) {
	spec := profile.Spec.Reduction
	most := MaxServers(profile)
	switch asked {
	case Off:
		return 0, nil
	case "":
		if spec.Mode != evenkeel.ReductionAlways {
			return 0, nil
		}
		if spec.Servers != nil {
			return int(*spec.Servers), nil
		}
		asked = Auto
	}
	number, err := strconv.Atoi(asked)
	switch {
	case asked != Auto && (err != nil || number < 1 || number > evenkeel.MaxReductionServers):
		return 0, fmt.Errorf("annotation %s is %q: a number from 1 to %d, Auto or Off", evenkeel.ReductionKey, asked, max(most, 1))
	case most == 0:
		return 0, fmt.Errorf("annotation %s: %s, but NetworkProfile %s has reduction.mode Off", evenkeel.ReductionKey, asked, profile.Name)
	case asked == Auto:
		return size(spec.Sizing, profile.Name, workers, most)
	case number > most:
		return 0, fmt.Errorf("annotation %s: %d is more than the %d that NetworkProfile %s allows", evenkeel.ReductionKey, number, most, profile.Name)
	}
	return number, nil
}

// MaxServers is how many servers a job of the profile may have.
func MaxServers(profile *evenkeel.NetworkProfile) int {
	spec := profile.Spec.Reduction
	switch {
	case spec.Mode == evenkeel.ReductionOff:
		return 0
	case spec.MaxServers != nil:
		return int(*spec.MaxServers)
	default:
		return evenkeel.DefaultMaxReductionServers
	}
}

func size(sizing evenkeel.SizingSpec, profile string, workers, most int) (int, error) {
	worker, server := 1.0, 1.0
	if sizing != (evenkeel.SizingSpec{}) {
		worker, server = sizing.WorkerBandwidth.AsApproximateFloat64(), sizing.ServerBandwidth.AsApproximateFloat64()
	}
	n, err := Size(workers, worker, server)
	if err != nil {
		return 0, fmt.Errorf("NetworkProfile %s: reduction.sizing: %w", profile, err)
	}
	return min(n, most), nil
}

// Size is how many servers keep up with so many workers, the bandwidths in the same unit: R servers receive R parts of
// what each of N workers sends, so a vector takes as long as it has to when R = ceil(N x worker / server). A single worker
// has nobody to sum with, and needs none.
func Size(workers int, worker, server float64) (int, error) {
	if !(worker > 0) || !(server > 0) {
		return 0, errors.New("a bandwidth is not above zero")
	}
	if workers < 2 {
		return 0, nil
	}
	// What floating point adds to a quotient that is whole shall not cost a server.
	n := math.Ceil(float64(workers)*worker/server - 1e-9)
	return int(math.Max(1, math.Min(n, math.MaxInt32))), nil
}
