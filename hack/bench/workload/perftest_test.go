package workload

import (
	"errors"
	"testing"
)

func TestPerftestOutput(t *testing.T) {
	bandwidth := `---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[MiB/sec]    BW average[MiB/sec]   MsgRate[Mpps]
 1048576    200              70.51              68.25		   0.000068
---------------------------------------------------------------------------------------
`
	if got, err := perftestColumn(bandwidth, 1<<20, 3); err != nil || got != 68.25 {
		t.Errorf("bandwidth %v, %v", got, err)
	}
	latency := ` #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec]
 8       1000          40.11          9812.00      45.20     	       61.11        	300.10		120.00    		9812.00
`
	if got, err := perftestColumn(latency, 8, 4); err != nil || got != 45.2 {
		t.Errorf("latency %v, %v", got, err)
	}
	for _, text := range []string{"Couldn't connect", " 1048576    200    0.00    0.00    0.000000\n"} {
		if _, err := perftestColumn(text, 1<<20, 3); !errors.Is(err, errNoFigure) {
			t.Errorf("%q: %v", text, err)
		}
	}
}
