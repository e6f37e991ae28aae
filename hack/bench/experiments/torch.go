package experiments

import (
	"fmt"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/workload"
)

// torch measures the backend of torch.distributed against Gloo's.
func torch() experiment.Experiment {
	const gloo = "Gloo"
	python, open := opened(workload.NewTorch)
	// with adds both backends to a case.
	with := func(c experiment.Case, backend func(name, backend string, torch func() *workload.Torch) experiment.Contender) experiment.Case {
		theirs := backend(gloo, "gloo", python)
		theirs.Reference = true
		c.Contenders = []experiment.Contender{backend(experiment.Ours, "evenkeel", python), theirs}
		return c
	}
	return experiment.Experiment{
		Name: "torch", Title: "PyTorch on CPUs", Summary: "the backend of torch.distributed against Gloo's (installs PyTorch, 5 GB)", DriverOnly: true,
		About: "torch.distributed with the backend `evenkeel`, and with Gloo, which comes with torch. All ranks are on one host. There `evenkeel` takes shared memory,\n" +
			"and Gloo has only TCP. Between hosts: [collectives](collectives.md).\n\n" +
			"A run starts the ranks anew, and has the median time on rank 0. Before each operation of either backend the ranks meet at a barrier of `evenkeel`,\n" +
			"which does not count. [PyTorch's own tests of a backend](../pytorch.md#pytorchs-own-tests) are on another page.",
		Rounds: 5, QuickRounds: 1,
		Open: open,
		Cases: func(quick bool) []experiment.Case {
			var all []experiment.Case
			for _, ranks := range []int{2, 4} {
				for _, w := range torchOperations(ranks, quick) {
					c := experiment.Case{
						Name: fmt.Sprintf("%d-processes-%s", ranks, w.Name), Title: fmt.Sprintf("%d processes, %s", ranks, strings.ReplaceAll(w.Name, "ddp-", "DDP ")),
						Load: fmt.Sprintf("about %s for each size", w.Length), Headline: w.Time(), Timeout: 5 * time.Minute,
					}
					if len(w.Bytes) > 1 {
						c.Sweep = &experiment.Sweep{Of: "bytes", Points: points(w.Bytes)}
					} else {
						c.Load = fmt.Sprintf("%d MiB, about %s", w.Bytes[0]>>20, w.Length)
					}
					all = append(all, with(c, w.Backend))
				}
			}
			rendezvous := workload.Rendezvous{Ranks: []int{16, 64, 256, 1000}}
			if quick {
				rendezvous.Ranks = []int{16, 64}
			}
			return append(all, with(experiment.Case{
				Name: "rendezvous", Title: "rendezvous of many ranks, until the last has the sum of a first all-reduce",
				Load:     "a `TCPStore` of torch, all ranks on this host over TCP, 16 as threads of each process, given up after 180 s",
				Headline: workload.RendezvousTime, Sweep: &experiment.Sweep{Of: "ranks", Points: points(rendezvous.Ranks)}, Timeout: workload.RendezvousTimeout,
			}, rendezvous.Backend))
		},
	}
}

// torchOperations are all-reduces of many sizes, and what a training of a small model does.
func torchOperations(ranks int, quick bool) []workload.TorchOperation {
	const model = 25 << 20
	length, step := 250*time.Millisecond, 1
	if quick {
		length, step = 100*time.Millisecond, 3
	}
	var sizes []int
	for exponent := 1; exponent <= 13; exponent += step {
		sizes = append(sizes, 1<<(2*exponent))
	}
	all := []workload.TorchOperation{{Name: "all-reduce", Ranks: ranks, Bytes: sizes, Length: length}}
	for _, name := range []string{"ddp-step", "all-gather", "reduce-scatter"} {
		all = append(all, workload.TorchOperation{Name: name, Ranks: ranks, Bytes: []int{model}, Length: length})
	}
	return all
}
