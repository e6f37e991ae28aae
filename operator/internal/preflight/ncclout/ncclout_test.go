package ncclout_test

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/google/go-cmp/cmp"

	"evenkeel.dev/evenkeel/operator/internal/preflight/ncclout"
)

func read(t testing.TB, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return data
}

var ours = []ncclout.Network{{Name: "Evenkeel", Version: 12, Library: "/opt/evenkeel/libnccl-net-evenkeel.so", SHA256: "3d9ab04b3d46"}}

// The logs of testdata: evenkeel-* are recorded from evenkeel-bench, cut-* and garbled-* are damaged copies of those.
// nccl-tests-no-driver.log is recorded from nccl-tests without a GPU. synthetic-* are written by hand in the layout of
// nccl-tests: no run on a GPU is recorded.
func TestParseLogs(t *testing.T) {
	tests := map[string]struct {
		rows     int
		average  float64
		peak     float64
		networks []ncclout.Network
		err      string
		failure  ncclout.FailureKind
	}{
		"evenkeel-text.log":                    {rows: 5, average: 1.1466, peak: 1.86, networks: ours},
		"evenkeel-json.log":                    {rows: 4, average: 1.5668593318998754, peak: 2.3485077334158744, networks: ours},
		"evenkeel-record.log":                  {rows: 3, average: 0.28324226462724567, peak: 0.4138717056759348, networks: []ncclout.Network{{Name: "Evenkeel", Version: 12, Library: "/opt/evenkeel/libnccl-net-evenkeel.so", SHA256: "f4b0f79b0dbb", Transport: "tcp"}}},
		"evenkeel-unchecked.log":               {rows: 3, average: 1.4321, peak: 2.38, networks: ours},
		"evenkeel-info.log":                    {rows: 3, average: 1.0603, peak: 1.72, networks: ours},
		"evenkeel-info-json.log":               {rows: 3, average: 1.0152227920394943, peak: 1.5874832122760103, networks: ours},
		"evenkeel-cycles.log":                  {rows: 6, average: 0.6023, peak: 1.09, networks: ours},
		"evenkeel-noplugin.log":                {err: "no results; it reports: error: no plugin loaded: /opt/evenkeel/libnccl-net-other.so", failure: ncclout.FailurePlugin},
		"cut-evenkeel-in-number.log":           {rows: 5, peak: 1.86, networks: ours, err: "5 rows and no summary; the log ends with: # Avg bus bandwidth"},
		"cut-evenkeel-after-two-rows.log":      {rows: 2, peak: 1.22, networks: ours, err: "2 rows and no summary; the log ends with: 262144 65536 float"},
		"garbled-evenkeel-row-lost.log":        {rows: 4, average: 1.1466, peak: 1.86, networks: ours},
		"synthetic-nccl-tests.log":             {rows: 3, average: 3.5, peak: 6, networks: []ncclout.Network{{Name: "Evenkeel", Version: 11}}},
		"synthetic-nccl-tests-mpirun-tags.log": {rows: 3, average: 3.5, peak: 6, networks: []ncclout.Network{{Name: "Evenkeel", Version: 11}}},
		"synthetic-nccl-tests-json.log":        {rows: 3, average: 3.5, peak: 6, networks: []ncclout.Network{{Name: "Evenkeel", Version: 11}}},
		"synthetic-nccl-tests-fallback.log":    {rows: 3, average: 3.5, peak: 6, networks: []ncclout.Network{{Name: "Socket"}}},
		"synthetic-nccl-tests-no-driver.log":   {err: "no results; it reports: node-a: Test CUDA failure common.cu:1234 'no CUDA-capable device is detected'", failure: ncclout.FailureDriver},
		"synthetic-rccl-tests-no-driver.log":   {err: "no results; it reports: node-a: Test HIP failure common.cu:1234 'no ROCm-capable device is detected'", failure: ncclout.FailureDriver},
		"nccl-tests-no-driver.log":             {err: "no results; it reports: nccl-b4084f-p1-0-worker-0: Test CUDA failure util.cu:674 'CUDA driver version is insufficient for CUDA runtime version'", failure: ncclout.FailureDriver},
	}
	files, err := filepath.Glob("testdata/*.log")
	if err != nil || len(files) != len(tests) {
		t.Errorf("testdata has %d logs, the table %d (%v)", len(files), len(tests), err)
	}
	for name, want := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := ncclout.Parse(read(t, name))
			if want.err == "" && err != nil || want.err != "" && (err == nil || !strings.Contains(err.Error(), want.err)) {
				t.Errorf("error %v, want %q", err, want.err)
			}
			if len(got.Rows) != want.rows || math.Abs(got.AverageBusBW-want.average) > 1e-9 || math.Abs(got.PeakBusBW()-want.peak) > 1e-9 || got.OutOfBounds != 0 {
				t.Errorf("%d rows, average %v, peak %v, %d wrong; want %d, %v, %v, 0", len(got.Rows), got.AverageBusBW, got.PeakBusBW(), got.OutOfBounds, want.rows, want.average, want.peak)
			}
			if diff := cmp.Diff(want.networks, got.Networks); diff != "" {
				t.Error(diff)
			}
			if (got.Failure == nil) != (want.failure == "") || got.Failure != nil && got.Failure.Kind != want.failure {
				t.Errorf("failure %v, want %q", got.Failure, want.failure)
			}
		})
	}
}

func TestParseRows(t *testing.T) {
	half := func(time, bw float64) ncclout.Half {
		return ncclout.Half{TimeUS: time, AlgBW: bw, BusBW: bw, Checked: true}
	}
	unchecked := half(1000, 4)
	unchecked.Checked = false
	want := []ncclout.Row{
		{Size: 8388608, Count: 2097152, Type: "float", Op: "sum", OutOfPlace: half(1000, 1), InPlace: half(1000, 2)},
		{Size: 16777216, Count: 4194304, Type: "float", Op: "sum", OutOfPlace: half(1000, 3), InPlace: unchecked},
		{Size: 33554432, Count: 8388608, Type: "float", Op: "sum", OutOfPlace: half(1000, 5), InPlace: half(1.2e7, 6)},
	}
	got, _ := ncclout.Parse(read(t, "synthetic-nccl-tests.log"))
	if diff := cmp.Diff(want, got.Rows); diff != "" {
		t.Error(diff)
	}
}

// Lines that are, or only resemble, a row.
func TestParseRowLayouts(t *testing.T) {
	tests := map[string]struct {
		line string
		rows int
		bus  float64
	}{
		"without a root":                {"1024 256 float sum 10.0 1.0 2.0 0 10.0 1.0 3.0 0", 1, 3},
		"with a time stamp":             {"1024 256 float sum -1 10.0 1.0 2.0 0 10.0 1.0 3.0 0 2026-01-01 00:00:00", 1, 3},
		"per iteration":                 {"1024 256 float sum -1 10.0 1.0 2.0 0 9 99 99 9 10.0 1.0 3.0 0 9 99 99 9", 1, 3},
		"with both":                     {"1024 256 float sum -1 10.0 1.0 2.0 0 9 99 99 9 10.0 1.0 3.0 0 9 99 99 9 2026-01-01 00:00:00", 1, 3},
		"errors as a float":             {"1024 256 float sum -1 10.0 1.0 2.0 0e+00 10.0 1.0 3.0 N/A", 1, 3},
		"no operation":                  {"1024 256 int8 none -1 10.0 1.0 2.0 0 10.0 1.0 3.0 0", 1, 3},
		"one half":                      {"1024 256 float sum -1 10.0 1.0 2.0 0", 0, 0},
		"cut in the last half":          {"1024 256 float sum -1 10.0 1.0 2.0 0 10.0 1.0", 0, 0},
		"not a number":                  {"1024 256 float sum -1 10.0 1.0 nan 0 10.0 1.0 3.0 0", 0, 0},
		"infinite":                      {"1024 256 float sum -1 10.0 1.0 2.0 0 10.0 1.0 inf 0", 0, 0},
		"negative":                      {"1024 256 float sum -1 10.0 1.0 -2.0 0 10.0 1.0 3.0 0", 0, 0},
		"another line":                  {"1024 256 files and 3 folders are 10 1 2 0 10 1 3 0", 0, 0},
		"numbers of an older beginning": {"1024 256 float sum -1h:1:1 [0] NCCL INFO x\nhello\n10.0 1.0 2.0 0 10.0 1.0 3.0 0", 0, 0},
		"a row after a beginning":       {"1024 256 float sum -1h:1:1 [0] NCCL INFO x\n1024 256 float sum 10.0 1.0 2.0 0 10.0 1.0 3.0 0", 1, 3},
		"numbers alone":                 {"10.0 1.0 2.0 0 10.0 1.0 3.0 0", 0, 0},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := ncclout.Parse([]byte(test.line + "\n"))
			if len(got.Rows) != test.rows || got.PeakBusBW() != test.bus {
				t.Errorf("got %+v", got.Rows)
			}
			if err == nil {
				t.Error("a run without a summary is complete")
			}
		})
	}
}

func TestParseWrongData(t *testing.T) {
	log := "1024 256 float sum -1 10.0 1.0 2.0 7 10.0 1.0 3.0 0\n# Out of bounds values : 7 FAILED\n# Avg bus bandwidth : 2.5\nerror: 7 wrong elements\n"
	got, err := ncclout.Parse([]byte(log))
	if err != nil || got.OutOfBounds != 7 || got.Rows[0].OutOfPlace.Wrong != 7 || got.Failure.Line != "error: 7 wrong elements" {
		t.Errorf("%+v, %v", got, err)
	}
	got, err = ncclout.Parse([]byte(strings.Replace(log, "7 FAILED", "7 OK", 1)))
	if err == nil || got.OutOfBounds != 7 {
		t.Errorf("a summary that contradicts itself counts: %+v", got)
	}
	got, _ = ncclout.Parse(bytes.Replace(read(t, "evenkeel-json.log"), []byte(`"wrong":0}`), []byte(`"wrong":3}`), 1))
	if got.OutOfBounds != 3 {
		t.Errorf("JSON: %d wrong, want 3", got.OutOfBounds)
	}
}

func TestParseJSON(t *testing.T) {
	const start = `{"results":[{"size":8,"count":2,"type":"float","redop":"sum","out_of_place":`
	const end = `,"in_place":null}],"out_of_bounds":{"count":0},"average_bus_bandwidth":{"bandwidth":1.5},"errors":["unhandled system error"]}`
	log := start + `{"cpu_time":2,"alg_bw":1,"bus_bw":1.5,"nwrong":0}` + end
	row := "16 4 float sum -1 1 1 9 0 1 1 9 0\n# Out of bounds values : 5 FAILED\n# Avg bus bandwidth : 9\n"
	for _, log := range []string{log, log + "\n" + row, row + log} {
		got, err := ncclout.Parse([]byte(log))
		if err != nil || len(got.Rows) != 1 || got.Rows[0].OutOfPlace.TimeUS != 2 || got.PeakBusBW() != 1.5 || got.AverageBusBW != 1.5 || got.OutOfBounds != 0 {
			t.Errorf("%s: %+v, %v", log, got, err)
		}
		if got.Failure == nil || !strings.Contains(got.Failure.Line, "unhandled system error") {
			t.Errorf("failure %+v", got.Failure)
		}
	}
	for _, bad := range []string{
		start + `{"time":-2,"alg_bw":1,"bus_bw":1.5,"nwrong":0}` + end,
		strings.Replace(log, `"count":0`, `"count":-1`, 1),
		strings.Replace(log, `"bandwidth":1.5`, `"bandwidth":-1.5`, 1),
		strings.Replace(log, `"bandwidth":1.5`, `"bandwidth":"nan"`, 1),
		strings.Replace(log, `"average_bus_bandwidth":{"bandwidth":1.5},`, ``, 1),
		strings.Replace(log, `"out_of_bounds":{"count":0},`, ``, 1),
		`{"type":"float","redop":"sum","rows":[{"size":8,"count":2,"in_place":{"wrong":-1}}],"wrong":0,"average_busbw":1}`,
		`{"rows":[],"wrong":0,"average_busbw":1}`,
	} {
		if got, err := ncclout.Parse([]byte(bad)); err == nil {
			t.Errorf("%s is complete: %+v", bad, got)
		}
	}
}

func TestParseReportsFirstFailure(t *testing.T) {
	got, err := ncclout.Parse([]byte("error: rank 1 lost\nerror: rank 0 lost\n"))
	if err == nil || got.Failure.Line != "error: rank 1 lost" {
		t.Errorf("%+v", got.Failure)
	}
	if _, err := ncclout.Parse([]byte("# Out of bounds values : 0 OK\n# Avg bus bandwidth : 1\n")); err == nil {
		t.Error("a summary without rows is complete")
	}
	if _, err := ncclout.Parse(nil); err == nil || !strings.Contains(err.Error(), "empty") {
		t.Errorf("%v", err)
	}
}

func TestParseRanksDisagree(t *testing.T) {
	log := bytes.Replace(read(t, "synthetic-nccl-tests.log"), []byte("node-b:10:10 [0] NCCL INFO Using network Evenkeel"), []byte("node-b:10:10 [0] NCCL INFO Using network Socket"), 1)
	got, _ := ncclout.Parse(log)
	want := []ncclout.Network{{Name: "Evenkeel", Version: 11}, {Name: "Socket"}}
	if diff := cmp.Diff(want, got.Networks); diff != "" {
		t.Error(diff)
	}
}

func TestParsePrefersDriverFailure(t *testing.T) {
	got, err := ncclout.Parse([]byte("h:1:1 [0] init.cc:1 NCCL WARN something\nTest CUDA failure x.cu:1 'CUDA driver version is insufficient for CUDA runtime version'\nerror: lost\n"))
	if got.Failure == nil || got.Failure.Kind != ncclout.FailureDriver || err == nil || !strings.Contains(err.Error(), "insufficient") {
		t.Errorf("%+v, %v", got.Failure, err)
	}
}

// A log cut at any byte never gives a row, network or average that the whole one has not.
func TestParseTruncatedLogs(t *testing.T) {
	files, err := filepath.Glob("testdata/[es]*.log")
	if err != nil || len(files) == 0 {
		t.Fatal(err)
	}
	for _, file := range files {
		log := read(t, filepath.Base(file))
		whole, wholeErr := ncclout.Parse(log)
		for at := range log {
			got, err := ncclout.Parse(log[:at])
			if len(got.Rows) > len(whole.Rows) || !slices.Equal(got.Rows, whole.Rows[:len(got.Rows)]) && !bytes.Contains(log, []byte("{")) {
				t.Fatalf("%s cut at %d: rows %v", file, at, got.Rows)
			}
			if err == nil && (wholeErr != nil || got.AverageBusBW != whole.AverageBusBW || !cmp.Equal(got.Rows, whole.Rows)) {
				t.Fatalf("%s cut at %d passes as complete: %+v", file, at, got)
			}
		}
	}
}

func FuzzParseLog(f *testing.F) {
	files, err := filepath.Glob("testdata/*.log")
	if err != nil {
		f.Fatal(err)
	}
	for _, file := range files {
		f.Add(read(f, filepath.Base(file)))
	}
	f.Add([]byte("1 1 float sum -1h:1:1 [0] NCCL INFO x\n1 1 1 1e99 1 1 1 N/A\n# Out of bounds values : 9999999999999999999 FAILED\n"))
	f.Fuzz(func(t *testing.T, log []byte) {
		got, err := ncclout.Parse(log)
		if err != nil && (len(err.Error()) > 500 || strings.ContainsFunc(err.Error(), func(r rune) bool { return !unicode.IsPrint(r) })) {
			t.Errorf("not one clear line: %q", err)
		}
		if err == nil && (len(got.Rows) == 0 || !(got.AverageBusBW >= 0) || math.IsInf(got.AverageBusBW, 0)) {
			t.Errorf("complete without results: %+v", got)
		}
		for _, row := range got.Rows {
			for _, h := range []ncclout.Half{row.OutOfPlace, row.InPlace} {
				for _, v := range []float64{h.TimeUS, h.AlgBW, h.BusBW, float64(h.Wrong), float64(row.Size)} {
					if !(v >= 0) || math.IsInf(v, 0) {
						t.Errorf("a row that no run gives: %+v", row)
					}
				}
			}
			if got.OutOfBounds < row.OutOfPlace.Wrong || got.OutOfBounds < row.InPlace.Wrong {
				t.Errorf("wrong data is lost: %+v", got)
			}
		}
		for _, n := range got.Networks {
			if n.Name == "" {
				t.Error("a network without a name")
			}
		}
	})
}

func TestParseTransportAndMemlock(t *testing.T) {
	const report = `{"type":"float","redop":"sum","ranks":[{"network":{"name":"Evenkeel","version":12A}},{"network":{"name":"Evenkeel","version":12B}}],"rows":[{"size":4,"count":1,"out_of_place":{"busbw":1},"in_place":{"busbw":1}}],"wrong":0,"average_busbw":1}`
	with := func(a, b string) string { return strings.NewReplacer("A", a, "B", b).Replace(report) }
	tcp, rdma := `,"transport":"tcp"`, `,"transport":"rdma"`
	for _, test := range []struct{ log, want string }{
		{with(rdma, rdma), "rdma"}, {with(tcp, tcp), "tcp"}, {with(tcp, rdma), ncclout.Mixed}, {with(rdma, tcp), ncclout.Mixed}, {with("", ""), ""}, {with(rdma, ""), "rdma"}, {with("", rdma), "rdma"},
		{with(`,"transport":"something that nobody would ever say"`, ""), "something that n"},
	} {
		r, err := ncclout.Parse([]byte("# Network: Evenkeel (ncclNet v12), /x.so, sha256 ab\n" + test.log + "\n"))
		if err != nil {
			t.Fatal(err)
		}
		if len(r.Networks) != 1 || r.Networks[0].Transport != test.want || r.Networks[0].Version != 12 {
			t.Errorf("%s: %+v, want %q", test.log, r.Networks, test.want)
		}
	}
	for line, want := range map[string]string{"64": "65536", "unlimited": "-1", "": "nil", "-3": "nil", "9999999999999999": "nil"} {
		r, _ := ncclout.Parse([]byte("# Locked memory, KiB: " + line + "\n"))
		got := "nil"
		if r.LockedMemory != nil {
			got = fmt.Sprint(*r.LockedMemory)
		}
		if got != want {
			t.Errorf("%q: %s, want %s", line, got, want)
		}
	}
}

func TestParseLatency(t *testing.T) {
	const end = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 1\n"
	for name, test := range map[string]struct {
		log     string
		latency float64
		devices int
	}{
		"JSON":               {`{"ranks":[{"network":{"devices":1}},{"network":{"devices":3}}],"rows":[],"latency_us":23.5}` + "\n", 23.5, 3},
		"JSON without it":    {`{"ranks":[{"network":{}}],"rows":[]}` + "\n", 0, 0},
		"JSON, negative":     {`{"rows":[],"latency_us":-1}` + "\n", 0, 0},
		"text":               {"# Latency: 23.50 us from one rank to the next\n" + end, 23.5, 0},
		"text, not a number": {"# Latency: NaN us from one rank to the next\n" + end, 0, 0},
		"text, cut":          {"# Latency: 2", 0, 0},
	} {
		if got, _ := ncclout.Parse([]byte(test.log)); got.LatencyUS != test.latency || got.Devices != test.devices {
			t.Errorf("%s: %v us, %d devices", name, got.LatencyUS, got.Devices)
		}
	}
}
