package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"evenkeel.dev/evenkeel/hack/bench/internal/page"
)

// A costRow is what many connections cost. Its figure is on another page, in the table of goals.
type costRow struct {
	what string
	page string
	goal string // how the goal begins on that page
	// more is the contender whose times to open and to close are shown too.
	more  string
	limit string // what is known of why the goal is missed
}

var costRows = []costRow{
	{
		what: "1,024 connection pairs opened and closed, against plain sockets", page: "scale.md", goal: "opening and closing 1,024 pairs",
		more:  "Evenkeel, 1024 pairs",
		limit: "system calls: a pair has 4 flows, each with its options and its place in `epoll`, where NCCL's sockets have 2 ([system calls](polling.md#opening))",
	},
	{
		what: "10,002 connection pairs opened and closed, in 3 pairs of processes", page: "scale.md", goal: "time grows with the number of pairs",
		more:  "Evenkeel, 3 times 3334 pairs",
		limit: "the kernel's search for a free port, which plain sockets need too",
	},
	{what: "descriptors of a pair, 4 flows", page: "scale.md", goal: "a pair with 4 flows has 8 descriptors"},
	{what: "memory of an idle pair, TCP", page: "scale.md", goal: "an idle pair takes at most 64 KiB"},
	{what: "pinned memory of an idle pair, RDMA", page: "rdma.md", goal: "memory that an idle pair pins"},
	{what: "one core's share while 4,000 pairs are idle", page: "scale.md", goal: "4,000 idle pairs use at most 0.5 %"},
}

// idleCosts is the table of what many connections cost, read from the pages in a folder that other programs wrote. It is an error when
// they do not have a row, or not in the form that is known.
func idleCosts(folder string) (page.Table, error) {
	table := page.Table{Heading: []string{"what", "figure", "goal", "reached", "what limits it", "page"}}
	pages := map[string][][]string{}
	for _, row := range costRows {
		rows, read := pages[row.page]
		if !read {
			text, err := os.ReadFile(filepath.Join(folder, row.page))
			if err != nil {
				return page.Table{}, fmt.Errorf("the table of connections' costs: %w", err)
			}
			rows = page.Rows(text)
			pages[row.page] = rows
		}
		figure, goal, reached, err := row.read(rows)
		if err != nil {
			return page.Table{}, fmt.Errorf("the table of connections' costs: %s: %w", row.page, err)
		}
		limit := row.limit
		if reached == page.YesNo(true) {
			limit = ""
		}
		table.Add(row.what, figure, goal, reached, limit, fmt.Sprintf("[%s](%s)", strings.TrimSuffix(row.page, ".md"), row.page))
	}
	return table, nil
}

// read finds the row among those of its page.
func (r costRow) read(rows [][]string) (figure, goal, reached string, err error) {
	find := func(start string) ([]string, error) {
		at := slices.IndexFunc(rows, func(cells []string) bool { return strings.HasPrefix(cells[0], start) })
		if at < 0 || len(rows[at]) < 3 {
			return nil, fmt.Errorf("no row of a table begins with %q and has three cells", start)
		}
		return rows[at], nil
	}
	cells, err := find(r.goal)
	if err != nil {
		return "", "", "", err
	}
	var known bool
	switch r.page {
	case "scale.md": // goal, reached, measured
		goal, reached, figure, known = cells[0], cells[1], cells[2], true
	case "rdma.md": // case, "goal: measured", reached
		goal, figure, known = strings.Cut(cells[1], ": ")
		reached = cells[2]
	}
	if !known || reached != page.YesNo(true) && reached != page.YesNo(false) {
		return "", "", "", fmt.Errorf("the row that begins with %q has not the cells that are expected: %q", r.goal, cells)
	}
	if r.more != "" {
		cells, err := find(r.more)
		if err != nil {
			return "", "", "", err
		}
		figure += fmt.Sprintf("; %s s to open, %s s to close", median(cells[1]), median(cells[2]))
	}
	return figure, goal, reached, nil
}

// median is the figure before the range in brackets.
func median(cell string) string {
	figure, _, _ := strings.Cut(cell, " (")
	return figure
}

// writeIdleCosts writes the section with the table.
func writeIdleCosts(b *bytes.Buffer, table page.Table) {
	b.WriteString("\n## Many connections\n\nRead from the pages of the programs that measured them, which say when and on which machine.\n\n")
	table.Markdown(b)
}
