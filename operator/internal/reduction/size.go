// Package reduction decides how many reduction servers a job gets, their names, and their objects. It is pure: the webhook writes
// the servers' addresses into the job's pods before any server exists, and the controller creates servers of those names.
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

// minMemory is the minimum for the buffers of a server.
const minMemory = 16 << 20

// Servers is the number of servers for a job with this number of workers: the job's annotation decides, else its profile. An
// error is for the user, or for the author of the profile.
func Servers(asked string, profile *evenkeel.NetworkProfile, workers int) (int, error) {
	servers, err := count(asked, profile, workers)
	if err != nil || servers == 0 {
		return 0, err
	}
	server := profile.Spec.Reduction.Server.WithDefaults()
	if server.CPU.Sign() <= 0 || server.Memory.Value() < minMemory {
		return 0, fmt.Errorf("NetworkProfile %s: reduction.server has cpu %s and memory %s: a server needs cpu above 0 and at least 16Mi of memory",
			profile.Name, server.CPU, server.Memory)
	}
	return servers, nil
}

func count(asked string, profile *evenkeel.NetworkProfile, workers int) (int, error) {
	spec := profile.Spec.Reduction
	maximum := MaxServers(profile)
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
		return 0, fmt.Errorf("annotation %s is %q: a number from 1 to %d, Auto or Off", evenkeel.ReductionKey, asked, max(maximum, 1))
	case maximum == 0:
		return 0, fmt.Errorf("annotation %s: %s, but NetworkProfile %s has reduction.mode Off", evenkeel.ReductionKey, asked, profile.Name)
	case asked == Auto:
		return size(spec.Sizing, profile.Name, workers, maximum)
	case number > maximum:
		return 0, fmt.Errorf("annotation %s: %d is more than the %d that NetworkProfile %s allows", evenkeel.ReductionKey, number, maximum, profile.Name)
	}
	return number, nil
}

// MaxServers is the maximum number of servers for a job of the profile.
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

func size(sizing evenkeel.SizingSpec, profile string, workers, maximum int) (int, error) {
	worker, server := 1.0, 1.0
	if sizing != (evenkeel.SizingSpec{}) {
		worker, server = sizing.WorkerBandwidth.AsApproximateFloat64(), sizing.ServerBandwidth.AsApproximateFloat64()
	}
	n, err := Size(workers, worker, server)
	if err != nil {
		return 0, fmt.Errorf("NetworkProfile %s: reduction.sizing: %w", profile, err)
	}
	return min(n, maximum), nil
}

// Size is the number of servers that keep up with the workers; both bandwidths are in the same unit. R servers receive R parts of
// what each of N workers sends, so the servers are no bottleneck with R = ceil(N x worker / server). A single worker needs no
// server.
func Size(workers int, worker, server float64) (int, error) {
	if !(worker > 0) || !(server > 0) {
		return 0, errors.New("a bandwidth is not above zero")
	}
	if workers < 2 {
		return 0, nil
	}
	// A rounding error must not add a server.
	n := math.Ceil(float64(workers)*worker/server - 1e-9)
	return int(math.Max(1, math.Min(n, math.MaxInt32))), nil
}
