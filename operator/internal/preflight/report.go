package preflight

import (
	"cmp"
	"encoding/xml"
	"fmt"
	"slices"
	"strings"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/preflight/pairing"
	"evenkeel.dev/evenkeel/operator/internal/text"
)

// ReportFiles are a check's report for people.
type ReportFiles struct{ Markdown, SVG string }

// Limits of a report: a ConfigMap has at most 1 MiB.
const (
	maxListed = 200
	// maxDrawn is the maximum number of nodes on the heat map: first the nodes that did not pass, then their partners.
	maxDrawn = 48
	cell     = 14
)

// Report writes the check's findings as Markdown, and the pairs as a heat map.
func Report(name string, r *Record, d Decision) ReportFiles {
	return ReportFiles{Markdown: markdown(name, r, d), SVG: heatMap(r, d)}
}

func markdown(name string, r *Record, d Decision) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# Network check %s: %s\n\n", name, d.Verdict)
	counts := map[evenkeel.Verdict]int{}
	for _, n := range d.Nodes {
		counts[n.Verdict]++
	}
	fmt.Fprintf(&b, "%d nodes: %d passed, %d failed, %d inconclusive. %d runs, started by %s from %s on.\n",
		len(d.Nodes), counts[evenkeel.VerdictPass], counts[evenkeel.VerdictFail], counts[evenkeel.VerdictInconclusive], len(r.Runs), r.Launcher, r.Started.Format("2006-01-02 15:04:05 MST"))
	if d.Median > 0 {
		fmt.Fprintf(&b, "Median bus bandwidth between nodes that passed: %.4g GB/s.\n", d.Median)
	}
	for _, n := range r.Networks {
		fmt.Fprintf(&b, "Carried by %s", n.Name)
		if n.Version > 0 {
			fmt.Fprintf(&b, " (ncclNet v%d), %s, sha256 %s", n.Version, n.Library, n.SHA256)
		}
		if n.Transport != "" {
			fmt.Fprintf(&b, ", over %s", n.Transport)
		}
		b.WriteString(".\n")
	}
	if r.Ended != "" {
		fmt.Fprintf(&b, "The check ended early: %s.\n", r.Ended)
	}
	if len(d.Fabrics) > 0 {
		b.WriteString("\n## Fabric\n\n| pool | verdict | reason | at least GB/s | |\n|---|---|---|---|---|\n")
		for _, f := range d.Fabrics[:min(len(d.Fabrics), maxListed)] {
			fmt.Fprintf(&b, "| %s | %s | %s | %.4g | %s |\n", strings.Join(f.Pools, ", "), f.Verdict, f.Reason, f.MinBusBW, escapeCell(f.Message))
		}
	}
	b.WriteString("\n## Nodes\n\n| node | verdict | stage | reason | best GB/s | |\n|---|---|---|---|---|---|\n")
	nodes := slices.Clone(d.Nodes)
	slices.SortStableFunc(nodes, func(a, b NodeResult) int { return evenkeel.WorstFirst(a.Verdict, b.Verdict) })
	for _, n := range nodes[:min(len(nodes), maxListed)] {
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %.4g | %s |\n", n.Name, n.Verdict, n.Stage, n.Reason, n.BusBW, escapeCell(n.Message))
	}
	if more := len(nodes) - maxListed; more > 0 {
		fmt.Fprintf(&b, "\nand %d more, as good or better; record.jsonl has all of them.\n", more)
	}
	return b.String()
}

func escapeCell(s string) string { return strings.NewReplacer("|", "\\|", "\n", " ").Replace(s) }

// heatMap draws the runs of stage Pairs: a row and a column for each node, a square for each pair that was tested.
func heatMap(r *Record, d Decision) string {
	drawn := selectDrawn(r, d)
	at := map[int]int{}
	for place, node := range drawn {
		at[node] = place
	}
	widest := 0
	for _, node := range drawn {
		widest = max(widest, min(len(r.Nodes[node].Name), 40))
	}
	left := 7*widest + 12
	size := left + cell*len(drawn)
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="monospace" font-size="11">`+"\n", size+10, size+34)
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" fill="#fff"/><text x="4" y="%d">%d of %d nodes; GB/s between pairs, median %.4g; grey: no result</text>`+"\n", size+24, len(drawn), len(r.Nodes), d.Median)
	for place, node := range drawn {
		name, colour := text.Clip(r.Nodes[node].Name, 40), "#222"
		if d.Nodes[node].Verdict == evenkeel.VerdictFail {
			colour = "#c00"
		}
		middle := left + cell*place + cell - 3
		fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="end" fill="%s">%s</text>`+"\n", left-4, middle, colour, escape(name))
		fmt.Fprintf(&b, `<text transform="translate(%d,%d) rotate(-90)" fill="%s">%s</text>`+"\n", middle, left-4, colour, escape(name))
	}
	for i := range r.Runs {
		run := &r.Runs[i]
		if run.Stage != evenkeel.StagePairs {
			continue
		}
		for _, x := range run.Nodes {
			for _, y := range run.Nodes {
				px, ok1 := at[x]
				py, ok2 := at[y]
				if x == y || !ok1 || !ok2 {
					continue
				}
				fmt.Fprintf(&b, `<rect x="%d" y="%d" width="%d" height="%d" fill="%s"><title>%s - %s: %s</title></rect>`+"\n",
					left+cell*px, left+cell*py, cell-1, cell-1, colourOf(run, d.Median), escape(r.Nodes[x].Name), escape(r.Nodes[y].Name), escape(describeRun(run)))
			}
		}
	}
	b.WriteString("</svg>\n")
	return b.String()
}

// Nodes with the lowest weights are drawn. Partners of nodes that did not pass come before other nodes that passed.
var drawWeights = map[evenkeel.Verdict]int{evenkeel.VerdictFail: 0, evenkeel.VerdictInconclusive: 2, evenkeel.VerdictPass: 4}

const partnerWeight = 3

// selectDrawn returns the indexes of the nodes to draw, in the order of their names.
func selectDrawn(r *Record, d Decision) []int {
	weight := make([]int, len(r.Nodes))
	for i := range d.Nodes {
		weight[i] = drawWeights[d.Nodes[i].Verdict]
	}
	for i := range r.Runs {
		for _, x := range r.Runs[i].Nodes {
			for _, y := range r.Runs[i].Nodes {
				if d.Nodes[y].Verdict != evenkeel.VerdictPass {
					weight[x] = min(weight[x], partnerWeight)
				}
			}
		}
	}
	places := make([]int, len(r.Nodes))
	for i := range places {
		places[i] = i
	}
	slices.SortStableFunc(places, func(a, b int) int { return cmp.Compare(weight[a], weight[b]) })
	places = places[:min(len(places), maxDrawn)]
	slices.Sort(places)
	return places
}

// colourOf goes from red (half of the median or less) to green (the median or more).
func colourOf(run *Run, median float64) string {
	if run.Outcome == pairing.Fault {
		return "#bbb"
	}
	if run.Outcome == pairing.Broken || run.Wrong > 0 || median == 0 && run.BusBW == 0 {
		return "#800000"
	}
	share := 1.0
	if median > 0 {
		share = max(0, min(1, 2*(run.BusBW/median-0.5)))
	}
	return fmt.Sprintf("hsl(%d,70%%,50%%)", int(120*share))
}

func describeRun(run *Run) string {
	switch run.Outcome {
	case pairing.Measured:
		return fmt.Sprintf("%.4g GB/s, round %d", run.BusBW, run.Round)
	case pairing.Broken:
		return "broken: " + run.Detail
	default:
		return "no result: " + run.Detail
	}
}

func escape(s string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(s)) // a Builder takes everything
	return b.String()
}
