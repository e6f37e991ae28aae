package workload

import "evenkeel.dev/evenkeel/hack/bench/experiment"

// Quantities of transfers over a network.
var (
	// Rate is that of payload; a GB is 10^9 bytes.
	Rate = experiment.Quantity{Name: "rate", Title: "rate", Unit: "GB/s", Digits: 3}
	// RoundTrip is the median of a run's.
	RoundTrip = experiment.Quantity{Name: "round_trip", Title: "round trip", Unit: "us", Digits: 1, LowerIsBetter: true}
	// Processor is the processor time of both sides, with their system calls; Sending and Receiving are its parts.
	Processor = experiment.Quantity{Name: "cpu", Title: "processor time for each GB", Unit: "s", Digits: 2, LowerIsBetter: true}
	Sending   = experiment.Quantity{Name: "send_cpu", Title: "that of the sender", Unit: "s", Digits: 2, LowerIsBetter: true}
	Receiving = experiment.Quantity{Name: "receive_cpu", Title: "that of the receiver", Unit: "s", Digits: 2, LowerIsBetter: true}
	// PerCore is how much the sender sends for each second of a processor.
	PerCore = experiment.Quantity{Name: "per_core", Title: "GB sent in a second of a core", Digits: 2}
	// OwnShare is the share of all processors' time that both sides used.
	OwnShare = experiment.Quantity{Name: "own", Title: "processors' time of both sides", Unit: "%", LowerIsBetter: true}
	// RiseTime is how long a run takes from its first byte to the wire limit.
	RiseTime = experiment.Quantity{Name: "rise_time", Title: "rise time", Unit: "s", Digits: 2, LowerIsBetter: true, Reached: true}
	// Before is the rate before a fault, and Recovery how long after it the rate is that of the remaining links.
	Before   = experiment.Quantity{Name: "rate_before", Title: "rate before the fault", Unit: "GB/s", Digits: 3}
	Recovery = experiment.Quantity{Name: "recovery", Title: "recovered after", Unit: "s", Digits: 2, LowerIsBetter: true, Reached: true}
	// IdleUse is what idle connections use of a processor, on the worse side, and Threads the plugin's, on the side that
	// has more.
	IdleUse = experiment.Quantity{Name: "idle_use", Title: "use of a core while idle", Unit: "%", Digits: 2, LowerIsBetter: true}
	Threads = experiment.Quantity{Name: "threads", Title: "threads", LowerIsBetter: true}
)
