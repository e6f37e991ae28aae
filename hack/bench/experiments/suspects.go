package experiments

import (
	"fmt"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/workload/suspects"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// injections injects faults into jobs, and reads whom the ranks name for them.
func injections() experiment.Experiment {
	var cases []experiment.Case
	patterns := map[string]suspects.Pattern{} // of cases
	for _, kind := range suspects.Kinds {
		for _, pattern := range suspects.Patterns {
			name := strings.NewReplacer(",", "", " ", "-").Replace(string(kind)) + "-in-" + string(pattern)
			patterns[name] = pattern
			cases = append(cases, experiment.Case{
				Name: name, Title: fmt.Sprintf("%s (%s)", kind, pattern), Group: "faults",
				Network: suspects.Network(), Anew: true, Timeout: suspects.InjectionTimeout,
				Contenders: []experiment.Contender{suspects.Injection{Kind: kind, Pattern: pattern}.Plugin(experiment.Ours)},
				Headline:   suspects.Named,
				More: []experiment.Quantity{
					suspects.Right, suspects.Nobody, suspects.Wrong, suspects.Early, suspects.OrCard, suspects.Costly, suspects.Cost,
				},
			})
		}
	}
	return experiment.Experiment{
		Name: "suspects", Title: "Who is named for a slow job", Summary: "faults injected into running jobs, and whom the ranks name (--seed draws others)",
		About: fmt.Sprintf(`Each run is a job of %d pretend hosts with cards of %s: %s, or %s.
It runs for %.0f s without a fault. Then a fault begins, whose place and size are drawn from the seed (`+"`--seed`"+`), the case and the round.
It is right if the first verdict names its host and its class within %.0f s, and nobody was named before. It is wrong if another place or class
is named, or somebody before the fault. A card that has one peer at the time cannot be told from the path to it. A verdict that names the path,
or one of its cards, is right for these.

A fault costs the share of the job's traffic that is gone. It is compared with the median of what all jobs of the pattern carry before their
faults. For a fault that costs less than %d %%, nobody has to be named: only whether the wrong one was counts. Shares have a 95 %% confidence
interval in brackets (Wilson). A run that was not right has a line with what the ranks said.`,
			suspects.Hosts, suspects.CardRate, suspects.Ring.Title(), suspects.AllToAll.Title(), suspects.CalmTime.Seconds(),
			suspects.VerdictTime.Seconds(), suspects.LeastCost),
		Notes:  "[Jobs without a fault](suspects-quiet.md) are another page.",
		Rounds: 15, QuickRounds: 1, Seeded: true,
		Cases: func(bool) []experiment.Case { return cases },
		Derive: func(samples []experiment.Sample) []experiment.Sample {
			return suspects.Weigh(samples, func(s experiment.Sample) suspects.Pattern { return patterns[s.Case] })
		},
	}
}

// noFaults runs jobs in which nobody is to blame, and measures what looking for suspects costs.
func noFaults() experiment.Experiment {
	return experiment.Experiment{
		Name: "suspects-quiet", Title: "Who is named while nobody is to blame, and what it costs",
		Summary: "jobs without a fault: false verdicts, and what looking for suspects costs",
		About: fmt.Sprintf(`Jobs of %d pretend hosts with cards of %s, without [faults](suspects.md). In the first part, nobody is to blame, however uneven
a job is, so each verdict is false.

To see what looking for suspects costs, a job runs with `+"`EVENKEEL_WATCH=on`"+` and without. The cards limit what it carries. Its processor time is
that of all ranks. Pairs scatter, so the share of a processor that a rank's thread takes that watches is measured by itself.`, suspects.Hosts, suspects.CardRate),
		Rounds: 8, QuickRounds: 1,
		Cases: func(quick bool) []experiment.Case {
			length := 2 * time.Minute
			if quick {
				length = time.Minute
			}
			var all []experiment.Case
			for _, load := range suspects.Loads {
				all = append(all, experiment.Case{
					Name: load.Name, Title: load.Title(), Load: fmt.Sprintf("each run lasts %.0f s", length.Seconds()), Group: "jobs without a fault",
					Network: suspects.Network(), Anew: true, Timeout: suspects.QuietTimeout(length),
					Contenders: []experiment.Contender{load.Quiet(experiment.Ours, length)}, Headline: suspects.FalseVerdicts,
				})
			}
			for _, pattern := range suspects.Patterns {
				all = append(all, experiment.Case{
					Name: "cost-" + string(pattern), Title: "what it costs: " + pattern.Title(), Network: suspects.Network(), Anew: true,
					Contenders: []experiment.Contender{pattern.Cost("not watched", false), pattern.Cost(experiment.Ours, true)},
					Headline:   suspects.Carried, More: []experiment.Quantity{suspects.Processor, suspects.Watching},
				})
			}
			return append(all, experiment.Case{
				Name: "datagrams", Title: fmt.Sprintf("what it costs: %d ranks, each of which exchanges with all others", suspects.ManyRanks),
				Load: "all ranks on one host, with headers of IP", Network: &netns.Config{}, Anew: true, Once: true, Timeout: suspects.DatagramsTimeout,
				Contenders: []experiment.Contender{suspects.Datagrams(experiment.Ours)}, Headline: suspects.DatagramRate,
			})
		},
	}
}
