package workload

import (
	"testing"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
)

func TestKernelsReportHasAShareOfTheSlowerHalfType(t *testing.T) {
	rows, err := readKernels([]byte(`{"total":"24 KiB","sources":2,"add":200,"float32":150,"float16":75,"bfloat16":60,"fp8 e4m3":7,"float16 loads":90}` + "\n"))
	if err != nil {
		t.Fatal(err)
	}
	k := &Kernels{rounds: map[int][]kernelRow{3: rows}}
	run := experiment.Run{Round: 3}
	got, err := k.Sum("24 KiB", 2).Run(t.Context(), run)
	if err != nil {
		t.Fatal(err)
	}
	if v := got.Values; v[OfAdd] != 0.75 || v[HalfShare] != 0.4 || v[SumFloat8] != 7 || v[LoadFloat16] != 90 {
		t.Errorf("%v", v)
	}
	if _, err := k.Sum("24 KiB", 4).Run(t.Context(), run); err == nil {
		t.Error("no error for a row that is not there")
	}
	for _, wrong := range []string{"x\n", "{}\n"} {
		if _, err := readKernels([]byte(wrong)); err == nil {
			t.Errorf("%q has rows", wrong)
		}
	}
}
