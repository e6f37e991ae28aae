package report

import (
	_ "embed" // the page
	"fmt"
	"html/template"
	"io"
	"regexp"
	"slices"
	"time"

	"evenkeel.dev/evenkeel/hack/ci/check/results"
)

// SlowestCount is how many of the slowest tests and set-ups are listed.
const SlowestCount = 60

//go:embed page.html
var pageText string

var pageTemplate = template.Must(template.New("page").Funcs(template.FuncMap{
	"duration": Duration,
	"percent": func(part, whole time.Duration) string {
		if whole <= 0 {
			return "0"
		}
		return fmt.Sprintf("%.2f", 100*float64(part)/float64(whole))
	},
	"clean": func(text string) string { return terminal.ReplaceAllString(text, "") },
}).Parse(pageText))

// terminal is what colors text in a terminal.
var terminal = regexp.MustCompile("\x1b\\[[0-9;]*[a-zA-Z]")

// Duration writes a duration as people read it: 1.24s, 37.1s, 12m04s.
func Duration(d time.Duration) string {
	switch {
	case d < 10*time.Second:
		return fmt.Sprintf("%.2fs", d.Seconds())
	case d < time.Minute:
		return fmt.Sprintf("%.1fs", d.Seconds())
	}
	d = d.Round(time.Second)
	return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
}

// A group is the tests of a program.
type group struct {
	Stage, Program string
	Counts         results.Counts
	Took           time.Duration
	Tests          []results.Result
}

// Page writes one page of HTML that needs no other file.
func Page(w io.Writer, run Run) error {
	var page struct {
		Run
		Counts                   results.Counts
		Failed, Skipped, Slowest []results.Result
		Longest                  time.Duration
		Elsewhere                int
		Groups                   []*group
	}
	page.Run, page.Counts = run, results.Count(run.Results)
	page.Slowest = results.Slowest(run.Results, SlowestCount)
	if len(page.Slowest) > 0 {
		page.Longest = page.Slowest[0].Self
	}
	for _, r := range run.Results {
		switch r.Outcome {
		case results.Failed:
			page.Failed = append(page.Failed, r)
		case results.Skipped:
			page.Skipped = append(page.Skipped, r)
		case results.Elsewhere:
			page.Elsewhere++
			continue
		}
		i := slices.IndexFunc(page.Groups, func(g *group) bool { return g.Stage == r.Stage && g.Program == r.Program })
		if i < 0 {
			i = len(page.Groups)
			page.Groups = append(page.Groups, &group{Stage: r.Stage, Program: r.Program})
		}
		g := page.Groups[i]
		g.Counts.Add(r)
		g.Took += r.Self
		g.Tests = append(g.Tests, r)
	}
	return pageTemplate.Execute(w, page)
}
