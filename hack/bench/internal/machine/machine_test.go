package machine

import (
	"strings"
	"testing"
)

func TestMachineNamesVectorInstructions(t *testing.T) {
	const all = "avx2 f16c avx512f avx512bw avx512dq avx512vl"
	for flags, want := range map[string]string{
		"fpu sse2 " + all:                        "2 cores (P 7 with AVX-512), K",
		strings.ReplaceAll(all, "avx512vl", "x"): "2 cores (P 7 with AVX2), K",
		"avx avx2 f16c":                          "2 cores (P 7 with AVX2), K",
		"avx avx2":                               "2 cores (P 7), K",
		"":                                       "2 cores (P 7), K",
	} {
		m := Machine{Cores: 2, Kernel: "K"}
		m.readProcessor("processor\t: 0\nmodel name\t: P 7\nflags\t\t: " + flags + "\n\nprocessor\t: 1\nmodel name\t: Q\nflags\t\t: avx2\n\n")
		if got := m.String(); got != want {
			t.Errorf("flags %q: %q, want %q", flags, got, want)
		}
	}
}
