package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/bench/experiments"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/bench/runner"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// The lines between which README.md has its figures.
const (
	figuresBegin = "<!-- Figures: written by `go run ./hack/bench readme` from the records in docs/results. -->\n"
	figuresEnd   = "<!-- End of the figures. -->\n"
)

// A figure is a row of README.md: the headline of a case.
type figure struct{ title, experiment, of string }

// figures are the rows: what each part is for, and the case in which most is lost to plain sockets.
var figures = []figure{
	{"Messages over 4 links, three of 1 Gbit/s and one of 200 Mbit/s", "tcp", "slow-link"},
	{"Messages over an unshaped link, 1 connection", "tcp", "one-connection"},
	{"Messages over 4 links of 1 Gbit/s that lose half a per cent of the packets", "tcp", "lossy-links"},
	{"All-reduce of 64 MiB by 4 workers, through 4 reduction servers, links of 1 Gbit/s", "reduction", "4and4-1gbit"},
	{"All-reduce of 20 MB by 4 processes on CPUs, links of 1 Gbit/s", "collectives", "hosts"},
}

func readmeCommand() *cobra.Command {
	return &cobra.Command{
		Use: "readme", Short: "Write the figures of README.md from the records, without measuring", Args: cobra.NoArgs,
		Example: `  go run ./hack/bench readme`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			root, err := toolbox.Root()
			if err != nil {
				return err
			}
			path := filepath.Join(root, "README.md")
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			written, lacking, err := withFigures(string(text), resultsFolder(root))
			if err != nil {
				return fmt.Errorf("%s: %w", path, err)
			}
			for _, line := range lacking {
				fmt.Fprintln(cmd.ErrOrStderr(), line)
			}
			return os.WriteFile(path, []byte(written), 0o644)
		},
	}
}

// withFigures is a text with the figures of the records in a folder. A row whose case has no record stays as it is, and
// is one of those that are lacking.
func withFigures(text, folder string) (written string, lacking []string, err error) {
	before, rest, begins := strings.Cut(text, figuresBegin)
	old, after, ends := strings.Cut(rest, figuresEnd)
	if !begins || !ends {
		return "", nil, errors.New("no lines for the figures: " + strings.TrimSpace(figuresBegin) + " and " + strings.TrimSpace(figuresEnd))
	}
	table := page.Table{Heading: []string{"", "Evenkeel", "Best of the others", "Ratio"}}
	var b bytes.Buffer
	for _, f := range figures {
		e, err := experiments.Named(f.experiment)
		if err != nil {
			return "", nil, err
		}
		store, err := runner.OpenStore(record(folder, e.Name))
		if err != nil {
			return "", nil, err
		}
		title := fmt.Sprintf("[%s](docs/results/%s.md)", f.title, e.Name)
		if subject, others, ratio, ok := page.NewResults(e, store.Samples).Headline(f.of); ok {
			table.Add(title, subject, others, ratio)
			continue
		}
		lacking = append(lacking, fmt.Sprintf("README.md: %q stays as it is: %s has no run of %s that can be compared", f.title, record(folder, e.Name), f.of))
		_, row, has := strings.Cut(old, "| "+title+" | ")
		row, _, _ = strings.Cut(row, " |\n")
		cells := strings.Split(row, " | ")
		if !has || len(cells) != len(table.Heading)-1 {
			return "", nil, fmt.Errorf("there is neither a record nor a row for %q", f.title)
		}
		table.Add(append([]string{title}, cells...)...)
	}
	b.WriteString("\n")
	table.Markdown(&b)
	b.WriteString("\n")
	return before + figuresBegin + b.String() + figuresEnd + after, lacking, nil
}
