package experiments

import (
	"fmt"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/workload"
)

// simulationTimeout is for compiling the program, and for the largest case.
const simulationTimeout = 20 * time.Minute

// measuredBefore says what the TCP benchmark measured at commit e19ee4bf, as shares of the wire limit.
func measuredBefore(ours, plain16, plain4, equal16, one string) []string {
	return []string{fmt.Sprintf("Measured, not simulated (docs/results/tcp.md, medians at commit e19ee4bfefbb): Evenkeel %s, 16 plain sockets %s, 4 plain sockets %s,\n"+
		"16 plain sockets with equal shares %s, NCCL's one socket %s of the wire limit.", ours, plain16, plain4, equal16, one)}
}

// simulation runs the shipped policies over simulated networks.
func simulation() experiment.Experiment {
	return experiment.Experiment{
		Name: "simulation", Title: "Simulated networks", Summary: "the shipped policies over simulated networks of 2 to 1,024 hosts, in virtual time",
		About: "`evenkeel-simulate` runs the code that decides, in virtual time, over simulated hosts, TCP (BBR) and drop-tail queues. **Nothing here is measured on a\n" +
			"network.** It models no processors and no kernels. The first cases are those of the [TCP benchmark](tcp.md), whose measured shares stand beside the simulated\n" +
			"ones: they say how far the simulator can be trusted.\n\n" +
			"The other networks have 16 hosts with cards of 1 Gbit/s at each leaf, and 4 spines. A hash chooses among them. The rate is that of the slowest host. To keep\n" +
			"runs of 1,024 hosts below minutes, 8 packets travel and are lost together there, and a run lasts 2 s, of which the first is not counted.\n" +
			"Rings are in random order, and an all-to-all sends to 4 hosts at a time.\n\n" +
			"NCCL's sockets and Fast Socket's are modelled by how they share out messages. `Perfect spraying` is one socket over one link with the rate of all.",
		Rounds: 5, QuickRounds: 1, Seeded: true, DriverOnly: true,
		Cases: func(bool) []experiment.Case {
			newCase := func(name, title string, notes []string, headline experiment.Quantity, more ...experiment.Quantity) experiment.Case {
				s := workload.Simulation{Case: name}
				return experiment.Case{
					Name: name, Title: title, Notes: notes, Headline: headline, More: more, Timeout: simulationTimeout,
					Contenders: []experiment.Contender{
						s.By("one flow (NCCL's 1 x 1)", "equal-1"), s.By("NCCL's 2 x 8", "equal-16"), s.By("Fast Socket, 8 sockets", "pull-8"),
						s.By("perfect spraying", "spraying"), s.By(experiment.Ours, "evenkeel"),
					},
				}
			}
			pair := func(name, title string, notes []string) experiment.Case {
				c := newCase(name, title, notes, workload.SimulatedShare, workload.SimulatedRate, workload.SimulatedOpened)
				s := workload.Simulation{Case: name}
				c.Contenders = append(c.Contenders, s.By("16 plain sockets", "plain-16"), s.By("4 plain sockets", "plain-4"),
					s.By("Evenkeel, 4 flows without trials", "evenkeel-4-fixed"), s.By("Evenkeel, 1 flow", "evenkeel-1-fixed"), s.By("Evenkeel, 16 flows", "evenkeel-16-fixed"))
				return c
			}
			all := []experiment.Case{
				pair("four-links", "4 links of 1 Gbit/s, from the first byte on", measuredBefore("0.97", "1.00", "0.50", "0.53", "0.25")),
				pair("slow-link", "4 links, three of 1 Gbit/s and one of 200 Mbit/s", measuredBefore("0.97", "0.99", "0.62", "0.21", "0.31")),
				pair("unequal-links", "5 links of 1,000, 700, 400, 150 and 50 Mbit/s", measuredBefore("0.95", "0.99", "0.62", "0.12", "0.12")),
				pair("lossy-links", "4 links of 1 Gbit/s, each of which loses half a per cent of the packets", measuredBefore("0.73", "0.92", "0.70", "0.56", "0.24")),
				pair("one-link", "1 link of 500 Mbit/s", nil),
				pair("foreign-flows", "1 link of 1 Gbit/s with 4 CUBIC flows of others", nil),
			}
			for _, of := range []struct{ name, title string }{
				{"ring-64", "ring of 64 hosts"}, {"ring-64-slow-link", "ring of 64 hosts, one uplink with a tenth of the rate"},
				{"ring-64-lossy-link", "ring of 64 hosts, one uplink that loses 1 %"}, {"ring-64-foreign", "ring of 64 hosts, 4 CUBIC flows of others"},
				{"ring-256", "ring of 256 hosts"}, {"ring-1024", "ring of 1,024 hosts"},
				{"all-to-all-64", "all-to-all of 64 hosts"}, {"all-to-all-256", "all-to-all of 256 hosts"}, {"all-to-all-1024", "all-to-all of 1,024 hosts"},
			} {
				all = append(all, newCase(of.name, of.title, nil, workload.SimulatedShare, workload.SimulatedRate, workload.SimulatedAverage))
			}
			return all
		},
	}
}
