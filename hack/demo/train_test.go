package main

import (
	"fmt"
	"strings"
	"testing"
)

// trainingLog is a log like that of train.py.
func trainingLog(difference string, loss func(step int) float64) string {
	var log strings.Builder
	log.WriteString("torch 2.14.1, rank 0 of 2, backend evenkeel\nevenkeel_message_bytes_total{direction=\"send\"} 5\n")
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
	if len(got.facts) != 3 || len(got.network) != 1 {
		t.Errorf("facts %q, network %q", got.facts, got.network)
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
		"nothing":                    {"", "no losses"},
	} {
		if _, err := parseTraining(test.log); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", name, err, test.want)
		}
	}
}
