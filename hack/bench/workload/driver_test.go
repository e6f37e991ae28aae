package workload

import (
	"strings"
	"testing"
)

func TestReportOfEvenkeelBench(t *testing.T) {
	row := `{"rows":[{"size":8,"time_us":100,"bandwidth":0.081,"p50_us":90,"p99_us":100,"send_cpu":0.5,"receive_cpu":0.25,"wrong":0}]}`
	if got, err := readNet([]byte(row)); err != nil || got != (netRow{Bandwidth: 0.081, P50: 90, Send: 0.5, Receive: 0.25}) {
		t.Errorf("%+v, %v", got, err)
	}
	for _, wrong := range []string{"", `{"rows":[]}`, strings.Replace(row, `"wrong":0`, `"wrong":1`, 1)} {
		if _, err := readNet([]byte(wrong)); err == nil {
			t.Errorf("%q has a result", wrong)
		}
	}
}
