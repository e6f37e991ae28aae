package main

import (
	"bytes"
	"fmt"
	"html"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// A chartCase is a section of docs/results/tcp.md with medians of contenders.
type chartCase struct {
	title                  string
	strongest              string  // name of the fastest contender of plain sockets
	equalName              string  // of the contender that cuts messages into equal shares
	plain, evenkeel, equal float64 // medians, GB/s
}

// maxChartCases is the number of cases drawn: those whose links have a rate, which come first.
const maxChartCases = 4

// tcpChart draws the medians of the cases with shaped links from docs/results/tcp.md.
func tcpChart(root string) ([]byte, error) {
	text, err := os.ReadFile(filepath.Join(root, "docs", "results", "tcp.md"))
	if err != nil {
		return nil, err
	}
	cases, err := readCases(string(text))
	if err != nil {
		return nil, err
	}
	return drawCases(cases), nil
}

// readCases reads the first sections that have a table of contenders with a median rate.
func readCases(text string) ([]chartCase, error) {
	var cases []chartCase
	for _, section := range strings.Split(text, "\n## ")[1:] {
		title, body, _ := strings.Cut(section, "\n")
		c := chartCase{title: strings.TrimSpace(title)}
		for line := range strings.Lines(body) {
			cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
			if len(cells) < 3 {
				continue
			}
			name := strings.TrimSpace(cells[0])
			rate, ok := strings.CutSuffix(strings.TrimSpace(cells[1]), " GB/s")
			value, err := strconv.ParseFloat(rate, 64)
			switch {
			case !ok || err != nil:
			case strings.Contains(name, "plain socket"):
				if value > c.plain {
					c.plain, c.strongest = value, name
				}
			case name == "Evenkeel":
				c.evenkeel = value
			case strings.HasPrefix(name, "NCCL ") && strings.HasSuffix(name, " sockets"):
				c.equal, c.equalName = value, name
			case strings.HasPrefix(name, "Evenkeel,") && c.equalName == "":
				c.equal, c.equalName = value, "equal shares (Evenkeel's static mode)"
			}
		}
		if c.plain == 0 || c.evenkeel == 0 || c.equal == 0 {
			continue
		}
		if cases = append(cases, c); len(cases) == maxChartCases {
			return cases, nil
		}
	}
	return nil, fmt.Errorf("docs/results/tcp.md has %d cases with plain sockets, Evenkeel and its equal shares, not %d", len(cases), maxChartCases)
}

const (
	chartWidth  = 960
	chartTop    = 64
	chartLeft   = 330
	chartRight  = 90 // room for the value at a bar's end
	barHeight   = 18
	barStep     = 22
	caseSpacing = 26
)

const chartStyle = `<style>
  text { font-family: -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 13px; fill: #1f2328; }
  .page { fill: #ffffff; stroke: #d1d9e0; }
  .head { font-weight: 600; font-size: 15px; }
  .small { fill: #57606a; font-size: 12.5px; }
  .plain { fill: #8c959f; }
  .evenkeel { fill: #0969da; }
  .equal { fill: #bc4c00; }
  .axis { stroke: #8c959f; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .page { fill: #0d1117; stroke: #3d444d; }
    .small { fill: #9198a1; }
    .plain { fill: #656c76; }
    .evenkeel { fill: #4493f8; }
    .equal { fill: #db6d28; }
    .axis { stroke: #656c76; }
  }
</style>
`

// drawCases draws a group of three bars for each case.
func drawCases(cases []chartCase) []byte {
	top := 0.0
	for _, c := range cases {
		top = max(top, c.plain, c.evenkeel, c.equal)
	}
	group := 3*barStep + caseSpacing
	height := chartTop + len(cases)*group + 14
	scale := float64(chartWidth-chartLeft-chartRight-24) / top
	var out bytes.Buffer
	fmt.Fprintf(&out, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" role=\"img\" aria-labelledby=\"title\">\n",
		chartWidth, height, chartWidth, height)
	out.WriteString("<title id=\"title\">Bandwidth over unequal TCP paths, medians from docs/results/tcp.md</title>\n")
	out.WriteString(chartStyle)
	fmt.Fprintf(&out, "<rect class=\"page\" x=\"0.5\" y=\"0.5\" width=\"%d\" height=\"%d\" rx=\"8\"/>\n", chartWidth-1, height-1)
	out.WriteString("<text class=\"head\" x=\"24\" y=\"34\">Bandwidth over unequal TCP paths, GB/s</text>\n")
	x := 376
	for _, key := range []struct{ class, text string }{
		{"plain", "plain sockets"}, {"evenkeel", "Evenkeel"}, {"equal", cases[0].equalName},
	} {
		fmt.Fprintf(&out, "<rect class=\"%s\" x=\"%d\" y=\"22\" width=\"14\" height=\"14\" rx=\"2\"/><text x=\"%d\" y=\"34\">%s</text>\n",
			key.class, x, x+20, html.EscapeString(key.text))
		x += 46 + 6*len(key.text)
	}
	for i, c := range cases {
		y := chartTop + i*group
		for n, line := range split(c.title, 44) {
			fmt.Fprintf(&out, "<text x=\"24\" y=\"%d\">%s</text>\n", y+14+n*18, html.EscapeString(line))
		}
		fmt.Fprintf(&out, "<line class=\"axis\" x1=\"%d\" y1=\"%d\" x2=\"%d\" y2=\"%d\"/>\n", chartLeft, y-4, chartLeft, y+3*barStep)
		for n, bar := range []struct {
			class, note string
			value       float64
		}{{"plain", c.strongest, c.plain}, {"evenkeel", "", c.evenkeel}, {"equal", "", c.equal}} {
			at := y + n*barStep
			length := bar.value * scale
			fmt.Fprintf(&out, "<rect class=\"%s\" x=\"%d\" y=\"%d\" width=\"%.1f\" height=\"%d\"/>\n", bar.class, chartLeft+1, at, length, barHeight)
			label := fmt.Sprintf("%.3f", bar.value)
			fmt.Fprintf(&out, "<text x=\"%.1f\" y=\"%d\">%s</text>\n", chartLeft+length+8, at+14, label)
		}
		fmt.Fprintf(&out, "<text class=\"small\" x=\"24\" y=\"%d\">reference: %s</text>\n", y+14+18*len(split(c.title, 44)), html.EscapeString(c.strongest))
	}
	out.WriteString("</svg>\n")
	return out.Bytes()
}

// split breaks a text into lines of at most width characters.
func split(text string, width int) []string {
	var lines []string
	for _, word := range strings.Fields(text) {
		if n := len(lines); n > 0 && len(lines[n-1])+1+len(word) <= width {
			lines[n-1] += " " + word
		} else {
			lines = append(lines, word)
		}
	}
	return lines
}
