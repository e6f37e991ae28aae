package workload

import "testing"

func TestSimulationReportHasSharesAndRates(t *testing.T) {
	got, err := readSimulation([]byte(`{"rate":0.4,"share":0.8,"average":0.5,"flows":5,"opened":9,"events":7}` + "\n"))
	if err != nil {
		t.Fatal(err)
	}
	if got[SimulatedRate] != 0.4 || got[SimulatedShare] != 0.8 || got[SimulatedAverage] != 0.5 || got[SimulatedOpened] != 9 {
		t.Errorf("%v", got)
	}
	for _, wrong := range []string{"", "x\n", "{}\n"} {
		if _, err := readSimulation([]byte(wrong)); err == nil {
			t.Errorf("%q is a report", wrong)
		}
	}
}
