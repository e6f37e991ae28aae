package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// trainingMetrics are metrics like those that train.py prints: a connection in each direction, and one over another
// device.
const trainingMetrics = `evenkeel_message_bytes_total{direction="send",peer="10.244.3.6:40001",device="eth0",comm="0x1"} 240500000
evenkeel_message_bytes_total{direction="recv",peer="10.244.3.6:40002",device="eth0",comm="0x1"} 120000000
evenkeel_message_bytes_total{direction="recv",peer="[fd00::2]:40003",device="eth0",comm="0x1"} 300000
evenkeel_message_bytes_total{direction="send",peer="10.245.3.6:40001",device="eth1",comm="0x1"} 1000000
evenkeel_flow_bytes_total{direction="send",peer="10.244.3.6:40001",device="eth0",comm="0x1",flow="0"} 200000000
evenkeel_flow_bytes_total{direction="send",peer="10.244.3.6:40001",device="eth0",comm="0x1",flow="1"} 40500000
evenkeel_flow_bytes_total{direction="recv",peer="10.244.3.6:40002",device="eth0",comm="0x1",flow="0"} 120000000
evenkeel_flow_bytes_total{direction="send",peer="10.245.3.6:40001",device="eth1",comm="0x1",flow="0"} 1000000
evenkeel_flow_retransmits_total{direction="send",peer="10.244.3.6:40001",device="eth0",comm="0x1",flow="0"} 3
evenkeel_flow_retransmits_total{direction="send",peer="10.244.3.6:40001",device="eth0",comm="0x1",flow="1"} 4
evenkeel_flows_lost_total{direction="send",peer="10.244.3.6:40001",device="eth0",comm="0x1"} 0
evenkeel_flows_lost_total{direction="send",peer="10.245.3.6:40001",device="eth1",comm="0x1"} 2
evenkeel_flows_replaced_total{direction="send",peer="10.245.3.6:40001",device="eth1",comm="0x1"} 1
evenkeel_repaths_total{direction="send",peer="10.245.3.6:40001",device="eth1",comm="0x1"} 3
evenkeel_recoveries_total{direction="send",peer="10.245.3.6:40001",device="eth1",comm="0x1"} 1
`

// trainingLog is a log like that of train.py.
func trainingLog(difference string, loss func(step int) float64) string {
	var log strings.Builder
	log.WriteString("torch 2.14.1, rank 0 of 2, backend evenkeel\n" + trainingMetrics)
	for step := range 100 {
		fmt.Fprintf(&log, "step %d loss %.6f\n", step, loss(step))
	}
	fmt.Fprintf(&log, "trained 100 steps in 3.0 s, 9 bytes of gradients each\nlargest difference of a weight from one process %s\n", difference)
	return log.String()
}

func falling(step int) float64 { return 2 / float64(step+1) }

func TestTrainingPage(t *testing.T) {
	got, err := parseTraining(trainingLog("3.0e-07", falling))
	if err != nil {
		t.Fatal(err)
	}
	chart := lossChart(got.losses)
	rows := strings.Split(strings.TrimSpace(chart), "\n")
	if len(rows) != chartRows || !strings.HasPrefix(strings.TrimSpace(rows[19]), "steps  95-99 ") {
		t.Errorf("%d rows:\n%s", len(rows), chart)
	}
	if strings.Count(rows[0], "#") != chartColumns || strings.Count(rows[19], "#") >= strings.Count(rows[1], "#") {
		t.Errorf("bars do not follow the loss:\n%s", chart)
	}
	if len(got.facts) != 3 {
		t.Errorf("facts %q", got.facts)
	}
}

func TestTrainingPageSummarizesTraffic(t *testing.T) {
	got, err := parseTraining(trainingLog("0", falling))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"  eth0: 240.5 MB sent, 120.3 MB received, 3 flows, no repairs, 7 segments retransmitted",
		"  eth1: 1.0 MB sent, 0.0 MB received, 1 flows, 2 lost, 1 replaced, 3 moved to another path, 1 connections recovered, 0 segments retransmitted",
	}
	if lines := trafficLines(got.devices); !slices.Equal(lines, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(lines, "\n"), strings.Join(want, "\n"))
	}
	for name := range strings.SplitSeq("message_bytes flow_bytes flow_retransmits flows_lost flows_replaced repaths recoveries", " ") {
		if !strings.Contains(trainScript, `"evenkeel_`+name+`_total"`) {
			t.Errorf("the script does not print %s", name)
		}
	}
}

func TestTrainingThatIsNotOneIsAnError(t *testing.T) {
	for name, test := range map[string]struct{ log, want string }{
		"a loss that stays":          {trainingLog("0", func(int) float64 { return 1 }), "did not fall"},
		"a loss that is no number":   {strings.ReplaceAll(trainingLog("0", falling), "loss 0", "loss nan"), "no losses"},
		"other weights":              {trainingLog("0.2", falling), "a weight differs by 0.2"},
		"weights that are no number": {trainingLog("nan", falling), "a weight differs"},
		"another backend":            {strings.ReplaceAll(trainingLog("0", falling), "backend evenkeel", "backend gloo"), "does not show"},
		"no counters":                {strings.ReplaceAll(trainingLog("0", falling), "evenkeel_", ""), "does not show"},
		"nothing that was received":  {strings.ReplaceAll(trainingLog("0", falling), "recv", "send"), "does not show"},
		"a metric that is no number": {strings.ReplaceAll(trainingLog("0", falling), "} 240500000", "} many"), "metric"},
		"nothing":                    {"", "no losses"},
	} {
		if _, err := parseTraining(test.log); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", name, err, test.want)
		}
	}
}
