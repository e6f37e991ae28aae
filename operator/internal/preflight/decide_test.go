package preflight

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/accelerator"
	"evenkeel.dev/evenkeel/operator/internal/preflight/ncclout"
	"evenkeel.dev/evenkeel/operator/internal/preflight/pairing"
)

func pool(count int) *Record {
	r := &Record{Started: time.Unix(0, 0).UTC(), Launcher: evenkeel.LauncherIndexedJob}
	for i := range count {
		r.Nodes = append(r.Nodes, Node{Name: fmt.Sprintf("gpu-%04d", i), Pool: "h100"})
	}
	return r
}

func good(speed float64) Measurement {
	return Measurement{Outcome: pairing.Measured, BusBW: speed, Networks: []ncclout.Network{{Name: "Evenkeel", Version: 10}}}
}

var all = Options{Network: "Evenkeel", Rails: 4, Seed: 7, Stages: []evenkeel.Stage{
	evenkeel.StageCapacity, evenkeel.StageLocal, evenkeel.StagePairs, evenkeel.StageRails, evenkeel.StageGang,
}}

// play runs a check to its end, and returns how many runs each stage had.
func play(t *testing.T, o Options, r *Record, run func(PlannedRun) Measurement) (Decision, map[evenkeel.Stage]int) {
	t.Helper()
	counts := map[evenkeel.Stage]int{}
	for range 1000 {
		d := Decide(o, r)
		if len(d.Pending) == 0 {
			return d, counts
		}
		for _, w := range d.Pending {
			if w.Stage != d.Stage {
				t.Errorf("work of stage %s in stage %s", w.Stage, d.Stage)
			}
			counts[w.Stage]++
			if !r.Add(w, run(w)) || r.Add(w, run(w)) {
				t.Fatalf("%s of stage %s: a result counts once", w.Name(), w.Stage)
			}
		}
	}
	t.Fatal("the check has no end")
	return Decision{}, nil
}

func verdicts(d Decision) map[string]string {
	out := map[string]string{}
	for _, n := range d.Nodes {
		if n.Verdict != evenkeel.VerdictPass {
			out[n.Name] = string(n.Verdict) + " " + n.Reason + " in " + string(n.Stage)
		}
	}
	return out
}

func TestStagesSkipFailedNodes(t *testing.T) {
	r := pool(8)
	r.Nodes[0].Verdict, r.Nodes[0].Reason = evenkeel.VerdictFail, ReasonMissingGPUs
	seen := map[string]bool{}
	d, counts := play(t, all, r, func(w PlannedRun) Measurement {
		for _, n := range w.Nodes {
			seen[string(w.Stage)+n] = true
		}
		if w.Stage == evenkeel.StageLocal && w.Nodes[0] == "gpu-0001" {
			return Measurement{Outcome: pairing.Broken, Detail: "error: no such device"}
		}
		if w.Stage == evenkeel.StageLocal && w.Nodes[0] == "gpu-0002" {
			return Measurement{Outcome: pairing.Fault, Detail: "ImagePullBackOff"}
		}
		return good(40)
	})
	want := map[string]string{
		"gpu-0000": "Fail MissingGPUs in Capacity", "gpu-0001": "Fail LocalRunBroken in Local", "gpu-0002": "Inconclusive InfrastructureFault in Local",
	}
	if got := verdicts(d); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%v, want %v", got, want)
	}
	if seen["Localgpu-0000"] || seen["Pairsgpu-0001"] || seen["Pairsgpu-0002"] || !seen["Ganggpu-0007"] {
		t.Error("a node was tried again after it was left out, or left out without a reason")
	}
	if counts[evenkeel.StageLocal] != 7 || counts[evenkeel.StagePairs] != 2 || counts[evenkeel.StageGang] != 1 || d.Verdict != evenkeel.VerdictFail || d.Median != 40 {
		t.Errorf("runs %v, %s, median %g", counts, d.Verdict, d.Median)
	}
}

func TestLocalStageBlamesPluginIfMostFail(t *testing.T) {
	d, counts := play(t, all, pool(5), func(w PlannedRun) Measurement {
		if w.Nodes[0] == "gpu-0004" {
			return good(1)
		}
		return Measurement{Outcome: pairing.Broken, Detail: "error: undefined symbol"}
	})
	if d.Verdict != evenkeel.VerdictFail || len(d.Fabrics) == 0 || d.Fabrics[0].Reason != ReasonPlugin || counts[evenkeel.StagePairs] != 0 {
		t.Errorf("%+v", d)
	}
	for _, n := range d.Nodes {
		if n.Verdict == evenkeel.VerdictFail {
			t.Errorf("%s is blamed: %s", n.Name, n.Message)
		}
	}
}

// Where a NetworkPolicy denies the checks' pods to connect, no pair ever does, and no node is to blame.
func TestPairsThatNeverConnectMayBeDenied(t *testing.T) {
	for connected, want := range map[bool]bool{false: true, true: false} {
		d, _ := play(t, all, pool(6), func(w PlannedRun) Measurement {
			switch {
			case w.Stage == evenkeel.StageLocal:
				return good(40)
			case connected: // but not over the plugin
				m := good(1)
				m.Networks[0].Name = "Socket"
				return m
			}
			return Measurement{Outcome: pairing.Broken, Detail: "error: connection timed out"}
		})
		if len(d.Fabrics) == 0 || d.Fabrics[0].Verdict != evenkeel.VerdictFail {
			t.Fatalf("%+v", d)
		}
		if got := strings.Contains(d.Fabrics[0].Message, "does a NetworkPolicy of the checks' namespace deny it"); got != want {
			t.Errorf("connected %t: %q", connected, d.Fabrics[0].Message)
		}
		for _, n := range d.Nodes {
			if n.Verdict == evenkeel.VerdictFail {
				t.Errorf("connected %t: %s fails: %s", connected, n.Name, n.Message)
			}
		}
	}
}

func TestRailsStageNamesSlowRail(t *testing.T) {
	d, counts := play(t, all, pool(6), func(w PlannedRun) Measurement {
		bad := strings.Contains(strings.Join(w.Nodes, " "), "gpu-0003")
		switch {
		case bad && w.Stage == evenkeel.StagePairs, bad && w.Stage == evenkeel.StageRails && w.Device == 2:
			return good(4)
		}
		return good(40)
	})
	if counts[evenkeel.StageRails] != 4 || verdicts(d)["gpu-0003"] != "Fail TooSlow in Rails" || !strings.HasPrefix(d.Nodes[3].Message, "rail 2 reaches 4 GB/s of the rails' median 40") {
		t.Errorf("%v %+v", counts, d.Nodes[3])
	}
}

func TestGangStageFailsFabric(t *testing.T) {
	for name, gang := range map[string]Measurement{
		"slow": good(10), "broken": {Outcome: pairing.Broken, Detail: "rank 3 is gone"}, "no result": {Outcome: pairing.Fault, Detail: "evicted"},
	} {
		d, _ := play(t, all, pool(4), func(w PlannedRun) Measurement {
			if w.Stage == evenkeel.StageGang {
				return gang
			}
			return good(40)
		})
		want := evenkeel.VerdictFail
		if name == "no result" {
			want = evenkeel.VerdictInconclusive
		}
		last := d.Fabrics[len(d.Fabrics)-1]
		if d.Verdict != want || last.Verdict != want || len(verdicts(d)) != 0 {
			t.Errorf("%s: %s, %+v, nodes %v", name, d.Verdict, last, verdicts(d))
		}
	}
}

func TestRecordEndedEarly(t *testing.T) {
	r := pool(4)
	r.Ended = "the check's timeout expired"
	d := Decide(all, r)
	if len(d.Pending) != 0 || d.Verdict != evenkeel.VerdictInconclusive {
		t.Fatalf("%+v", d)
	}
	for _, n := range d.Nodes {
		if n.Verdict != evenkeel.VerdictInconclusive || n.Message != r.Ended {
			t.Errorf("%+v", n)
		}
	}
	if d := Decide(all, &Record{}); d.Verdict != evenkeel.VerdictInconclusive {
		t.Errorf("no nodes: %s", d.Verdict)
	}
}

func TestRecordRoundTrip(t *testing.T) {
	r := pool(4)
	play(t, all, r, func(PlannedRun) Measurement { return good(40) })
	head, err := r.EncodeHead()
	if err != nil {
		t.Fatal(err)
	}
	lines, mark, err := r.EncodeLines(Mark{})
	if err != nil {
		t.Fatal(err)
	}
	if more, again, err := r.EncodeLines(mark); err != nil || len(more) > 0 || again != mark {
		t.Errorf("nothing was added, and there are lines %q, %v", more, err)
	}
	back, read, err := Decode(head, lines...)
	if err != nil || read != mark {
		t.Fatal(err)
	}
	if a, b := Decide(all, r), Decide(all, back); fmt.Sprint(a) != fmt.Sprint(b) {
		t.Errorf("%v\n%v", a, b)
	}
	const one = `{"node": {"name": "a"}}` + "\n"
	for _, bad := range [][2]string{
		{"", ""}, {"[]", ""}, {`{"nodes": 1}`, ""}, {`{}`, `{"run": {"stage": "Pairs", "nodes": [0, 1]}}`}, {`{"nodes": 1}`, one + `{"run": {"nodes": [-1]}}`},
		{`{"nodes": 1}`, one + `{"run": {"nodes": [0], "networks": [0]}}`}, {`{"nodes": 1}`, one + `{"run": {"nodes": []}}`}, {`{"nodes": 1}`, one + `{"run": {"nodes": [0], "inUse": [1]}}`}, {`{}`, "{"},
	} {
		if _, _, err := Decode(bad[0], bad[1]); err == nil {
			t.Errorf("%s: no error", bad)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(`{"nodes": 2}`, `{"node": {"name": "a"}}
{"node": {"name": "b"}}
{"run": {"stage": "Rails", "round": -3, "nodes": [1, 0], "outcome": "Measured"}}
{"run": {"stage": "Gang", "nodes": [0], "inUse": [1]}}`)
	f.Fuzz(func(t *testing.T, head, lines string) {
		r, _, err := Decode(head, lines)
		if err != nil || len(r.Nodes) > 50 {
			return
		}
		Report("fuzz", r, Decide(all, r))
	})
}

// TestReportOfLargePoolFitsConfigMap has many nodes fail with a long reason: the largest possible files for people.
func TestReportOfLargePoolFitsConfigMap(t *testing.T) {
	r := pool(5000)
	d, _ := play(t, Options{Network: "Evenkeel", Stages: []evenkeel.Stage{evenkeel.StagePairs}}, r, func(w PlannedRun) Measurement {
		if w.Index%20 == 0 {
			return Measurement{Outcome: pairing.Broken, Detail: strings.Repeat("long ", 100)}
		}
		return good(46.123456789)
	})
	files := Report("large", r, d)
	if size := len(files.Markdown) + len(files.SVG); size > 1<<19 {
		t.Errorf("%d bytes", size)
	}
}

func TestReportIsWellFormed(t *testing.T) {
	r := pool(3)
	r.Nodes[0].Name = `<a&"b`
	d, _ := play(t, all, r, func(w PlannedRun) Measurement {
		if w.Stage == evenkeel.StagePairs {
			return Measurement{Outcome: pairing.Broken, Detail: "a | b < c"}
		}
		return good(1)
	})
	files := Report("odd", r, d)
	decoder := xml.NewDecoder(strings.NewReader(files.SVG))
	for {
		if _, err := decoder.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("%v\n%s", err, files.SVG)
		}
	}
	for line := range strings.SplitSeq(files.Markdown, "\n") {
		if strings.HasPrefix(line, "| <a") && strings.Count(strings.ReplaceAll(line, `\|`, ""), "|") != 7 {
			t.Errorf("a row with other than six cells: %s", line)
		}
	}
}

func TestCapacity(t *testing.T) {
	node := func(change func(*corev1.Node)) *corev1.Node {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"nvidia.com/gpu.count": "8"}}}
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
		n.Status.Allocatable = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("8")}
		change(n)
		return n
	}
	tolerations := []corev1.Toleration{{Key: "gpu", Operator: corev1.TolerationOpEqual, Value: "yes", Effect: corev1.TaintEffectNoSchedule}}
	taint := func(value string, effect corev1.TaintEffect) func(*corev1.Node) {
		return func(n *corev1.Node) {
			n.Spec.Taints = []corev1.Taint{{Key: "gpu", Value: value, Effect: effect}}
		}
	}
	for want, change := range map[string]func(*corev1.Node){
		"":                          func(*corev1.Node) {},
		" ":                         taint("yes", corev1.TaintEffectNoSchedule),
		"  ":                        taint("no", corev1.TaintEffectPreferNoSchedule),
		"Inconclusive NodeTainted":  taint("no", corev1.TaintEffectNoSchedule),
		"Inconclusive NodeTainted ": taint("yes", corev1.TaintEffectNoExecute),
		"Inconclusive NodeNotReady": func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionUnknown },
		"Inconclusive NodeCordoned": func(n *corev1.Node) { n.Spec.Unschedulable = true },
		"Inconclusive NodeWindows":  func(n *corev1.Node) { n.Labels[corev1.LabelOSStable] = "windows" },
		"Fail MissingGPUs":          func(n *corev1.Node) { n.Status.Allocatable["nvidia.com/gpu"] = resource.MustParse("7") },
		"   ":                       func(n *corev1.Node) { n.Labels = nil },
	} {
		v, reason, _ := Capacity(node(change), tolerations, accelerator.DRA{})
		if got := strings.TrimSpace(string(v) + " " + reason); got != strings.TrimSpace(want) {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// TestCapacityGPUs has the ways in which clusters offer GPUs. Labels are those of the GPU feature discovery.
func TestCapacityGPUs(t *testing.T) {
	for name, test := range map[string]struct {
		labels  map[string]string // without the domain nvidia.com
		offered map[string]string
		dra     accelerator.DRA
		want    string
	}{
		"all":                              {map[string]string{"gpu.count": "8", "gpu.replicas": "1"}, map[string]string{"gpu": "8"}, accelerator.DRA{}, ""},
		"one is broken":                    {map[string]string{"gpu.count": "8"}, map[string]string{"gpu": "7"}, accelerator.DRA{}, "Fail MissingGPUs"},
		"the device plugin is not up yet":  {map[string]string{"gpu.count": "8"}, nil, accelerator.DRA{}, "Inconclusive GPUsPending"},
		"the device plugin is replaced":    {map[string]string{"gpu.count": "8"}, map[string]string{"gpu": "0"}, accelerator.DRA{}, "Inconclusive GPUsPending"},
		"time-slicing":                     {map[string]string{"gpu.count": "2", "gpu.replicas": "4"}, map[string]string{"gpu": "8"}, accelerator.DRA{}, ""},
		"time-slicing, one is broken":      {map[string]string{"gpu.count": "2", "gpu.replicas": "4"}, map[string]string{"gpu": "4"}, accelerator.DRA{}, "Fail MissingGPUs"},
		"time-slicing by another name":     {map[string]string{"gpu.count": "2", "gpu.replicas": "4"}, map[string]string{"gpu.shared": "8"}, accelerator.DRA{}, ""},
		"MIG single":                       {map[string]string{"gpu.count": "14", "gpu.replicas": "1", "mig.strategy": "single"}, map[string]string{"gpu": "14"}, accelerator.DRA{}, ""},
		"MIG mixed":                        {map[string]string{"gpu.count": "2", "gpu.replicas": "0", "mig.strategy": "mixed", "mig-1g.10gb.count": "14", "mig-1g.10gb.replicas": "1"}, map[string]string{"mig-1g.10gb": "14"}, accelerator.DRA{}, ""},
		"MIG mixed, a part is broken":      {map[string]string{"gpu.count": "2", "mig.strategy": "mixed", "mig-1g.10gb.count": "14"}, map[string]string{"mig-1g.10gb": "13"}, accelerator.DRA{}, "Fail MissingGPUs"},
		"MIG is being changed":             {map[string]string{"gpu.count": "8", "mig.config.state": "pending"}, map[string]string{"gpu": "2"}, accelerator.DRA{}, "Inconclusive GPUsPending"},
		"MIG was changed":                  {map[string]string{"gpu.count": "8", "mig.config.state": "success"}, map[string]string{"gpu": "8"}, accelerator.DRA{}, ""},
		"invalid MIG":                      {map[string]string{"gpu.count": "0", "mig.strategy": "single"}, nil, accelerator.DRA{}, ""},
		"DRA":                              {map[string]string{"gpu.count": "8"}, nil, accelerator.DRA{Listed: 8, Usable: 8}, ""},
		"DRA, one is tainted":              {map[string]string{"gpu.count": "8"}, nil, accelerator.DRA{Listed: 8, Usable: 7}, "Fail MissingGPUs"},
		"DRA, all are tainted":             {map[string]string{"gpu.count": "8"}, nil, accelerator.DRA{Listed: 8}, "Fail MissingGPUs"},
		"DRA beside a device plugin":       {map[string]string{"gpu.count": "8"}, map[string]string{"gpu": "7"}, accelerator.DRA{Listed: 8, Usable: 8}, "Fail MissingGPUs"},
		"DRA, without labels":              {nil, nil, accelerator.DRA{Listed: 8, Usable: 8}, ""},
		"DRA, without labels, one tainted": {nil, nil, accelerator.DRA{Listed: 8, Usable: 7}, "Fail MissingGPUs"},
		"a plugin, and DRA without labels": {nil, map[string]string{"gpu": "8"}, accelerator.DRA{Listed: 8, Usable: 7}, ""},
		"another vendor's, without labels": {nil, map[string]string{"gpu": "3"}, accelerator.DRA{}, ""},
	} {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{}}}
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
		n.Status.Allocatable = corev1.ResourceList{}
		for key, value := range test.labels {
			n.Labels["nvidia.com/"+key] = value
		}
		for key, value := range test.offered {
			n.Status.Allocatable[corev1.ResourceName("nvidia.com/"+key)] = resource.MustParse(value)
		}
		v, reason, message := Capacity(n, nil, test.dra)
		if got := strings.TrimSpace(string(v) + " " + reason); got != test.want {
			t.Errorf("%s: %q (%s), want %q", name, got, message, test.want)
		}
	}
}

// BenchmarkDecide plans and judges a pool of which one in a hundred nodes is slow.
func BenchmarkDecide(b *testing.B) {
	for _, nodes := range []int{256, 1000, 5000} {
		b.Run(fmt.Sprint(nodes), func(b *testing.B) {
			r := pool(nodes)
			o := Options{Network: "Evenkeel", Stages: []evenkeel.Stage{evenkeel.StageLocal, evenkeel.StagePairs}}
			for {
				d := Decide(o, r)
				if len(d.Pending) == 0 {
					break
				}
				for _, w := range d.Pending {
					m := good(40)
					for _, n := range w.Nodes {
						if strings.HasSuffix(n, "50") && w.Stage == evenkeel.StagePairs {
							m = good(4)
						}
					}
					r.Add(w, m)
				}
			}
			for b.Loop() {
				Decide(o, r)
			}
		})
	}
}

var withRDMA = Options{Network: "Evenkeel", Stages: []evenkeel.Stage{evenkeel.StageCapacity, evenkeel.StageLocal, evenkeel.StageRDMA, evenkeel.StagePairs}}

// over is a good run that says what it used, and how much memory it may lock.
func over(transport string, locked int64) Measurement {
	m := good(40)
	m.Networks[0].Transport, m.LockedMemory = transport, &locked
	return m
}

func TestRDMAStage(t *testing.T) {
	const unlimited, much, little = -1, 1 << 30, 8 << 20
	local := func(w PlannedRun) bool { return w.Stage == evenkeel.StageLocal }
	for name, test := range map[string]struct {
		strict bool // every run has to use RDMA
		lacks  bool // gpu-0000 has no device
		exempt bool // by the capability
		odd    Measurement
		want   string // what is said of gpu-0000; of the others nothing
	}{
		"all is well":             {odd: over("rdma", unlimited)},
		"enough may be locked":    {odd: over("rdma", much)},
		"carried by TCP":          {odd: over("tcp", unlimited), want: "Fail WrongTransport in RDMA"},
		"by both":                 {odd: over(ncclout.Mixed, unlimited), want: "Fail WrongTransport in RDMA"},
		"does not say":            {odd: over("", unlimited), want: "Inconclusive InfrastructureFault in RDMA"},
		"little may be locked":    {odd: over("rdma", little), want: "Fail MemoryLockTooLow in RDMA"},
		"and so it broke":         {odd: Measurement{Outcome: pairing.Broken, Detail: "error: ibv_reg_mr: ENOMEM", LockedMemory: over("", little).LockedMemory}, want: "Fail MemoryLockTooLow in RDMA"},
		"little, and no result":   {odd: Measurement{Outcome: pairing.Fault, Detail: "no plugin loaded", LockedMemory: over("", little).LockedMemory}, want: "Fail MemoryLockTooLow in RDMA"},
		"little, and exempt":      {exempt: true, odd: over("rdma", little)},
		"broke by itself":         {odd: Measurement{Outcome: pairing.Broken, Detail: "error: no device"}, want: "Fail LocalRunBroken in RDMA"},
		"no device":               {lacks: true, odd: over("rdma", unlimited)},
		"no device, and needs it": {lacks: true, strict: true, odd: over("rdma", unlimited), want: "Fail NoRDMADevice in RDMA"},
	} {
		t.Run(name, func(t *testing.T) {
			r := pool(4)
			for i := range r.Nodes {
				r.Nodes[i].RDMA = i > 0 || !test.lacks
			}
			if test.exempt {
				r.Plugin = map[string]string{evenkeel.MemoryLockKey: "Capability"}
			}
			if test.strict {
				r.Transport = TransportRDMA
			}
			d, counts := play(t, withRDMA, r, func(w PlannedRun) Measurement {
				if w.Stage == evenkeel.StageRDMA && w.Nodes[0] == "gpu-0000" {
					return test.odd
				}
				if local(w) && !test.strict {
					return over("tcp", little) // of no matter there
				}
				return over("rdma", unlimited)
			})
			want := map[string]string{}
			if test.want != "" {
				want["gpu-0000"] = test.want
			}
			if got := verdicts(d); fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("%v, want %v: %+v", got, want, d.Nodes)
			}
			if tried := 4; !test.lacks && counts[evenkeel.StageRDMA] != tried {
				t.Errorf("%d runs, want %d", counts[evenkeel.StageRDMA], tried)
			}
		})
	}
}

func TestRDMAStageLowMemlockEverywhereFailsNoNode(t *testing.T) {
	r := pool(3)
	for i := range r.Nodes {
		r.Nodes[i].RDMA = true
	}
	d, _ := play(t, withRDMA, r, func(PlannedRun) Measurement { return over("rdma", 64<<10) })
	if len(d.Fabrics) != 1 || d.Fabrics[0].Reason != ReasonPlugin || d.Verdict != evenkeel.VerdictFail {
		t.Errorf("%+v", d.Fabrics)
	}
	for _, n := range d.Nodes {
		if n.Verdict != evenkeel.VerdictInconclusive || !strings.Contains(n.Message, "64 KiB") || !strings.Contains(n.Message, "LimitMEMLOCK") {
			t.Errorf("%s: %s %q", n.Name, n.Verdict, n.Message)
		}
	}
}

func TestRDMATransportRequired(t *testing.T) {
	for transport, want := range map[string]string{
		"rdma": "map[]", "tcp": "map[gpu-0002:Fail FallbackNetwork in Pairs]", "": "map[gpu-0002:Inconclusive InfrastructureFault in Pairs]",
	} {
		r := pool(6)
		r.Transport = TransportRDMA
		d, _ := play(t, Options{Network: "Evenkeel", Stages: []evenkeel.Stage{evenkeel.StagePairs}}, r, func(w PlannedRun) Measurement {
			if strings.Contains(strings.Join(w.Nodes, " "), "gpu-0002") {
				return over(transport, -1)
			}
			return over("rdma", -1)
		})
		if got := fmt.Sprint(verdicts(d)); got != want {
			t.Errorf("%q: %s, want %s", transport, got, want)
		}
	}
}

func TestPlannedRunNamesAreUnique(t *testing.T) {
	names := map[string]evenkeel.Stage{}
	for _, stage := range []evenkeel.Stage{evenkeel.StageLocal, evenkeel.StageRDMA, evenkeel.StagePairs, evenkeel.StageRails, evenkeel.StageGang} {
		name := PlannedRun{Stage: stage, Round: 1, Index: 2}.Name()
		if other, taken := names[name]; taken {
			t.Errorf("%s and %s are both %s", stage, other, name)
		}
		names[name] = stage
	}
}
