package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// stub prints the output of Gloo's benchmark in both layouts; only rank 0 prints a table.
const stub = `#!/bin/sh
while [ $# -gt 1 ]; do
	case $1 in
	--rank) rank=$2 ;;
	--elements) elements=$2 ;;
	esac
	shift
done
[ "$1" = allreduce_ring ] || exit 3
[ "$rank" = 0 ] || exit 0
echo "Device:      tcp, pci=, iface=lo, speed=0, addr=[127.0.0.1]"
if [ "$elements" = 1000 ]; then
	echo "   size (B)   elements   min (us)   p50 (us)   p99 (us)   max (us)   bandwidth (GB/s)   iterations"
	echo "       4000       1000        111        222        333        444              0.010         2345"
else
	echo "   elements   min (us)   p50 (us)   p99 (us)   max (us)    avg (GB/s)    samples"
	echo "        $elements         11         22         33         44         0.010       2345"
fi
`

func TestGloosOwnBenchmarkProgram(t *testing.T) {
	folder := t.TempDir()
	program := filepath.Join(folder, "benchmark")
	if _, err := whichGloo(program); err == nil || !strings.Contains(err.Error(), program) {
		t.Errorf("a program that is not there: %v", err)
	}
	if err := os.WriteFile(program, []byte(stub), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := whichGloo(program); err == nil || !strings.Contains(err.Error(), "not a program") {
		t.Errorf("a file that is no program: %v", err)
	}
	if err := os.Chmod(program, 0o755); err != nil {
		t.Fatal(err)
	}
	gloos, err := whichGloo(program)
	if err != nil {
		t.Fatal(err)
	}
	if want := "ring ring_chunked halving_doubling bcube new_ring"; strings.Join(gloos.algorithms, " ") != want {
		t.Errorf("%v, not %s", gloos.algorithms, want)
	}
	work := task{2, time.Second, []int{1000, 100}, loopback}
	got, err := gloos.runs(folder, "ring")(t.Context(), work)
	if err != nil || got[1000] != (figure{111, 222}) || got[100] != (figure{11, 22}) {
		t.Errorf("%v, %v", got, err)
	}
	if _, err := gloos.runs(folder, "bcube")(t.Context(), work); err == nil {
		t.Error("a run that fails has figures")
	}
	if _, err := readBenchmark("100 nothing here\n", 100); err == nil {
		t.Error("a table without figures has some")
	}
}

func TestPageListsTheMeasuredGlooAlgorithms(t *testing.T) {
	r := sample()
	r.Gloo = "a Gloo benchmark that was built elsewhere"
	for _, m := range r.Local {
		for _, round := range m.rounds {
			delete(round, gloo("new_bcube"))
		}
	}
	page := string(r.markdown())
	if !strings.Contains(page, "by a Gloo benchmark that was built elsewhere over TCP") || strings.Contains(page, "new_bcube") {
		t.Error(page)
	}
	for _, wrong := range []string{"%!", "NaN", " 0 / 0 "} {
		if strings.Contains(page, wrong) {
			t.Errorf("%q in\n%s", wrong, page)
		}
	}
}
