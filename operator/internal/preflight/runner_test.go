package preflight

import (
	"cmp"
	"testing"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// On nodes with GPUs a check uses them by default, where that is sound; what it names itself is taken.
func TestRunnerIsChosenByGPUs(t *testing.T) {
	four, eight := int32(4), int32(8)
	of := func(runner evenkeel.RunnerType, gpus ...int32) []Node {
		var all []Node
		for _, n := range gpus {
			all = append(all, Node{GPUs: map[evenkeel.RunnerType]int32{runner: n}})
		}
		return all
	}
	nodes := func(gpus ...int32) []Node { return of(evenkeel.RunnerNCCLTests, gpus...) }
	amds := func(gpus ...int32) []Node { return of(evenkeel.RunnerRCCLTests, gpus...) }
	busy := append(nodes(8, 8), Node{Verdict: evenkeel.VerdictInconclusive})
	for name, test := range map[string]struct {
		change func(*evenkeel.CheckOptions)
		absent bool // the installation's image of nccl-tests
		rccl   bool // the installation has one of rccl-tests
		nodes  []Node
		gpus   *int32              // nil: Bench
		want   evenkeel.RunnerType // default: NCCLTests
	}{
		"GPUs":                           {nodes: nodes(8, 8), gpus: &eight},
		"as many as the smallest has":    {nodes: nodes(8, 4), gpus: &four},
		"nodes that are not tested":      {nodes: busy, gpus: &eight},
		"no image":                       {nodes: nodes(8, 8), absent: true},
		"a node without GPUs":            {nodes: nodes(8, 0)},
		"no node to test":                {nodes: busy[2:]},
		"one GPU has no partner":         {nodes: nodes(1, 1)},
		"an image of one's own":          {nodes: nodes(8, 8), change: func(o *evenkeel.CheckOptions) { o.Runner.Image = "mine:1" }},
		"GPUs that others use":           {nodes: nodes(8, 8), change: func(o *evenkeel.CheckOptions) { o.BusyNodes = evenkeel.BusyNodesTest }},
		"a stage of Bench":               {nodes: nodes(8, 8), change: func(o *evenkeel.CheckOptions) { o.Stages = append(o.Stages, evenkeel.StageRDMA) }},
		"another stage of Bench":         {nodes: nodes(8, 8), change: func(o *evenkeel.CheckOptions) { o.Stages = append(o.Stages, evenkeel.StageRails) }},
		"Bench by name":                  {nodes: nodes(8, 8), change: func(o *evenkeel.CheckOptions) { o.Runner.Type = evenkeel.RunnerBench }},
		"NCCLTests by name":              {nodes: nodes(0, 0), absent: true, change: func(o *evenkeel.CheckOptions) { o.Runner.Type, o.Runner.GPUsPerNode = evenkeel.RunnerNCCLTests, &four }, gpus: &four},
		"AMD's GPUs":                     {nodes: amds(8, 4), rccl: true, gpus: &four, want: evenkeel.RunnerRCCLTests},
		"AMD's GPUs alone":               {nodes: amds(8, 8), absent: true, rccl: true, gpus: &eight, want: evenkeel.RunnerRCCLTests},
		"no image for AMD's GPUs":        {nodes: amds(8, 8)},
		"no image for NVIDIA's GPUs":     {nodes: nodes(8, 8), absent: true, rccl: true},
		"GPUs of both":                   {nodes: append(nodes(8), amds(8)...), rccl: true},
		"both images, NVIDIA's GPUs":     {nodes: nodes(8, 8), rccl: true, gpus: &eight},
		"one GPU, without a stage Local": {nodes: nodes(1), change: func(o *evenkeel.CheckOptions) { o.Stages = []evenkeel.Stage{evenkeel.StagePairs} }, gpus: new(int32)},
	} {
		o := evenkeel.CheckOptions{}.WithDefaults()
		if test.change != nil {
			test.change(&o)
		}
		want := evenkeel.RunnerBench
		if test.gpus != nil {
			want = cmp.Or(test.want, evenkeel.RunnerNCCLTests)
			if *test.gpus == 0 {
				*test.gpus = 1
			}
		}
		var installed []evenkeel.RunnerType
		if !test.absent {
			installed = append(installed, evenkeel.RunnerNCCLTests)
		}
		if test.rccl {
			installed = append(installed, evenkeel.RunnerRCCLTests)
		}
		runner, gpus := ChooseRunner(o, installed, test.nodes)
		if runner != want || (gpus == nil) != (test.gpus == nil) || gpus != nil && *gpus != *test.gpus {
			t.Errorf("%s: %s with %v GPUs, want %s", name, runner, gpus, want)
		}
		// A check goes on with what it began with, also where the nodes have changed meanwhile.
		named := o.Runner
		(&Record{Runner: runner, GPUsPerNode: gpus}).SetRunner(&named)
		if named.Type != runner || named.GPUsPerNode != gpus {
			t.Errorf("%s: it goes on with %+v", name, named)
		}
	}
	earlier := evenkeel.RunnerSpec{}
	if (&Record{}).SetRunner(&earlier); earlier.Type != evenkeel.RunnerBench {
		t.Errorf("without a record: %+v", earlier)
	}
}
