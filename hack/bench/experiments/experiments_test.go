package experiments

import (
	"regexp"
	"slices"
	"testing"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
)

var namePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9-]*$`)

// What the runner and the page expect of each table.
func TestTablesAreComplete(t *testing.T) {
	for _, e := range All() {
		if again, err := Named(e.Name); err != nil || again.Title != e.Title {
			t.Errorf("%s: %v", e.Name, err)
		}
		if e.Title == "" || e.Summary == "" || e.About == "" || e.Rounds < 1 || e.QuickRounds < 1 {
			t.Errorf("%s lacks its title, summary, description or rounds", e.Name)
		}
		for _, quick := range []bool{false, true} {
			cases, groups := map[string]experiment.Case{}, map[string]experiment.Case{}
			for _, c := range e.Cases(quick) {
				if _, twice := cases[c.Name]; twice || !namePattern.MatchString(c.Name) {
					t.Errorf("%s: the case %q is there twice, or its name has other characters than letters, digits and dashes", e.Name, c.Name)
				}
				cases[c.Name] = c
			}
			for name, c := range cases {
				checkCase(t, e, c, cases)
				if c.Headline.Name == "" || c.Title == "" {
					t.Errorf("%s, %s lacks its headline or title", e.Name, name)
				}
				if c.Headline.Statistic == experiment.Share {
					t.Errorf("%s, %s: a share is no headline: it has neither a worst nor a best run", e.Name, name)
				}
				if first := groups[c.Group]; c.Group != "" && first.Name == "" {
					groups[c.Group] = c
				} else if c.Group != "" && (first.Headline != c.Headline || !slices.Equal(first.More, c.More) || c.Limit > 0 || len(c.Traces) > 0) {
					t.Errorf("%s, %s cannot be a row of its group's table", e.Name, name)
				}
			}
		}
	}
	if _, err := Named("none"); err == nil {
		t.Error("no error for an experiment that does not exist")
	}
}

// checkCase checks that what goals name exists.
func checkCase(t *testing.T, e experiment.Experiment, c experiment.Case, cases map[string]experiment.Case) {
	t.Helper()
	has := func(c experiment.Case, name string) bool {
		for _, of := range c.Contenders {
			if name == "" && of.Reference || name == of.Name {
				return true
			}
		}
		return false
	}
	for _, of := range c.Contenders {
		if of.Name == "" || of.Run == nil {
			t.Errorf("%s, %s: the contender %q has no name or no run", e.Name, c.Name, of.Name)
		}
		if of.Base != "" && !has(c, of.Base) {
			t.Errorf("%s, %s: there is no base of %s", e.Name, c.Name, of.Name)
		}
	}
	if c.Sweep != nil && (len(c.Sweep.Points) == 0 || !slices.IsSorted(c.Sweep.Points) || c.Sweep.Points[0] <= 0) {
		t.Errorf("%s, %s: the points are not above zero in increasing order: %v", e.Name, c.Name, c.Sweep.Points)
	}
	for _, g := range c.Goals {
		name := g.Contender
		if name == "" {
			name = e.SubjectName()
		}
		if !has(c, name) || (g.Figure == 0) == (g.Share == 0) {
			t.Errorf("%s, %s: the goal about %s has no such contender, or not one of a figure and a share", e.Name, c.Name, g.Of.Title)
		}
		if (g.From > 0 || g.To > 0 || g.Points > 0) && !c.Sweeps(g.Of) {
			t.Errorf("%s, %s: the goal about %s is about points of a sweep that has none of it", e.Name, c.Name, g.Of.Title)
		}
		if g.Share == 0 {
			continue
		}
		of, name := c, g.Reference.Contender
		if g.Reference.Case != "" {
			of = cases[g.Reference.Case]
			if name == "" {
				name = e.SubjectName()
			}
		}
		if !has(of, name) {
			t.Errorf("%s, %s: the goal about %s has no reference", e.Name, c.Name, g.Of.Title)
		}
	}
}
