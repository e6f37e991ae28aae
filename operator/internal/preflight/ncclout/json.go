package ncclout

import (
	"encoding/json"
	"math"
)

// benchReport is what `evenkeel-bench allreduce --json` prints.
type benchReport struct {
	Type  string `json:"type"`
	Redop string `json:"redop"`
	Ranks []struct {
		Network struct {
			Name      string `json:"name"`
			Version   int    `json:"version"`
			Library   string `json:"library"`
			SHA256    string `json:"sha256"`
			Transport string `json:"transport"`
			Devices   int    `json:"devices"`
		} `json:"network"`
	} `json:"ranks"`
	Rows []struct {
		Size       int64     `json:"size"`
		Count      int64     `json:"count"`
		OutOfPlace benchHalf `json:"out_of_place"`
		InPlace    benchHalf `json:"in_place"`
	} `json:"rows"`
	Wrong   *int64   `json:"wrong"`
	Average *float64 `json:"average_busbw"`
	Latency float64  `json:"latency_us"`
}

type benchHalf struct {
	Time  float64 `json:"time_us"`
	AlgBW float64 `json:"algbw"`
	BusBW float64 `json:"busbw"`
	Wrong *int64  `json:"wrong"`
}

func (h benchHalf) half() Half {
	out := Half{TimeUS: h.Time, AlgBW: h.AlgBW, BusBW: h.BusBW}
	if h.Wrong != nil {
		out.Wrong, out.Checked = *h.Wrong, true
	}
	return out
}

// testsReport is the file that nccl-tests writes with -J.
type testsReport struct {
	Results []struct {
		Size       int64      `json:"size"`
		Count      int64      `json:"count"`
		Type       string     `json:"type"`
		Redop      string     `json:"redop"`
		OutOfPlace *testsHalf `json:"out_of_place"`
		InPlace    *testsHalf `json:"in_place"`
	} `json:"results"`
	OutOfBounds *struct {
		Count int64 `json:"count"`
	} `json:"out_of_bounds"`
	Average *struct {
		Bandwidth float64 `json:"bandwidth"`
	} `json:"average_bus_bandwidth"`
	Errors []string `json:"errors"`
}

type testsHalf struct {
	Time    float64  `json:"time"`
	CPUTime float64  `json:"cpu_time"`
	AlgBW   float64  `json:"alg_bw"`
	BusBW   float64  `json:"bus_bw"`
	Wrong   *float64 `json:"nwrong"`
}

func (h *testsHalf) half() Half {
	if h == nil {
		return Half{}
	}
	out := Half{TimeUS: h.Time + h.CPUTime, AlgBW: h.AlgBW, BusBW: h.BusBW}
	if h.Wrong != nil {
		out.Wrong, out.Checked = elements(*h.Wrong), true
	}
	return out
}

// json parses a line that may be a report. Its numbers are exact, so it takes precedence over the text.
func (p *parser) json(line []byte) {
	var keys struct {
		Rows    json.RawMessage `json:"rows"`
		Results json.RawMessage `json:"results"`
	}
	switch err := json.Unmarshal(line, &keys); {
	case err != nil:
	case keys.Rows != nil:
		p.bench(line)
	case keys.Results != nil:
		p.tests(line)
	}
}

func (p *parser) bench(line []byte) {
	var r benchReport
	if json.Unmarshal(line, &r) != nil {
		return
	}
	for _, rank := range r.Ranks {
		n := rank.Network
		p.report.Devices = max(p.report.Devices, n.Devices)
		p.addNetwork(Network{Name: n.Name, Version: n.Version, Library: n.Library, SHA256: n.SHA256, Transport: clipTransport(n.Transport)})
	}
	rows := make([]Row, 0, len(r.Rows))
	for _, row := range r.Rows {
		rows = append(rows, Row{Size: row.Size, Count: row.Count, Type: r.Type, Op: r.Redop, OutOfPlace: row.OutOfPlace.half(), InPlace: row.InPlace.half()})
	}
	p.report.LatencyUS = max(0, r.Latency)
	p.fromJSON(rows, r.Wrong, r.Average)
}

// clipTransport limits the length of a transport.
func clipTransport(transport string) string { return transport[:min(len(transport), 16)] }

func (p *parser) tests(line []byte) {
	var r testsReport
	if json.Unmarshal(line, &r) != nil {
		return
	}
	rows := make([]Row, 0, len(r.Results))
	for _, row := range r.Results {
		rows = append(rows, Row{Size: row.Size, Count: row.Count, Type: row.Type, Op: row.Redop, OutOfPlace: row.OutOfPlace.half(), InPlace: row.InPlace.half()})
	}
	var wrong *int64
	if r.OutOfBounds != nil {
		wrong = &r.OutOfBounds.Count
	}
	var average *float64
	if r.Average != nil {
		average = &r.Average.Bandwidth
	}
	for _, e := range r.Errors {
		if e != "" {
			p.failure("error: " + e)
		}
	}
	p.fromJSON(rows, wrong, average)
}

// fromJSON replaces the values of the text, unless a number is invalid.
func (p *parser) fromJSON(rows []Row, wrong *int64, average *float64) {
	for _, row := range rows {
		for _, h := range []Half{row.OutOfPlace, row.InPlace} {
			if row.Size < 0 || row.Count < 0 || h.Wrong < 0 || math.Min(h.TimeUS, math.Min(h.AlgBW, h.BusBW)) < 0 {
				return
			}
		}
	}
	if wrong != nil && *wrong < 0 || average != nil && *average < 0 {
		return
	}
	p.inJSON = true
	p.report.Rows, p.bounds, p.avg = rows, wrong != nil, average != nil
	if wrong != nil {
		p.report.OutOfBounds = *wrong
	}
	if average != nil {
		p.report.AverageBusBW = *average
	}
}
