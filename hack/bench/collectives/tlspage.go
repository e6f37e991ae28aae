package main

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/bench/internal/stats"
)

const tlsHeading = `# Collectives with TLS against Gloo with TLS

Written by ` + "`make bench-collectives-tls`" + `; do not edit. [What is protected from whom](../encryption.md) and [the collectives in clear](collectives.md) are other pages.

%s

An all-reduce (sum of float32) by Evenkeel, which chooses the algorithm, and by Gloo with each of its algorithms (%s). The best of them
at each size, by its median, is what Evenkeel is compared with. Gloo is %s, built here from Debian's sources with its transport over TLS, which Debian's
library lacks; in clear it is the same build. In each round all contenders run once, one after the other, in rotating order. A figure is the median of the
rounds' medians on rank 0, with the least and the greatest in brackets.

Everything encrypted is TLS 1.3. Gloo has one connection for each pair of ranks, and records by %s. Evenkeel's transport ` + "`tls`" + ` authenticates
ranks as Gloo does: each shows a certificate of one authority. Records are by rustls. Both take AES-256-GCM. With ` + "`EVENKEEL_ENCRYPTION=required`" + ` and a
job key there are no certificates, the cipher is AES-128-GCM, and the store and probes are encrypted too. Connections are open before the first figure.

Before that, a capture of each showed records of TLS and no element in clear. Gloo's own function that joins ranks, ` + "`connectFullMesh`" + `, makes connections
in clear in this version, also over its TLS device: a capture of that showed its elements. So ranks are joined here by the function of its base class, which
makes those of the device.

Gloo runs in its default blocking mode. Evenkeel's caller polls for 2 ms before it sleeps. So the ratios at small sizes compare a polling waiter with a
sleeping one. All processes share one machine: each byte is encrypted and decrypted on the same cores.

`

// write writes the page into a folder; without one, it does nothing.
func (r *tlsResults) write(folder string) error {
	if folder == "" {
		return nil
	}
	return page.Write(folder, map[string][]byte{"collectives-tls.md": r.markdown()})
}

// A tlsRow is a measurement in words, at a size.
type tlsRow struct {
	of       *measured
	where    string
	elements int
	unit     string
	scale    float64 // of a microsecond in the unit
}

// rows are those of the tables that have been measured.
func (r *tlsResults) rows() []tlsRow {
	var rows []tlsRow
	for i, m := range r.Local {
		if m.rounds != nil {
			rows = append(rows, tlsRow{m, fmt.Sprintf("%d processes, %s", tlsProcesses, count(r.Elements[i])), r.Elements[i], "us", 1})
		}
	}
	if r.Star.rounds != nil {
		rows = append(rows, tlsRow{&r.Star, fmt.Sprintf("%d hosts with links of %s, %s", hosts, linkRate, count(starElements)), starElements, "ms", 1e-3})
	}
	return rows
}

func count(elements int) string {
	if elements == 1 {
		return "1 element"
	}
	return fmt.Sprintf("%d elements", elements)
}

// time is a figure in words.
func (row tlsRow) time(medians []float64) string {
	var scaled []float64
	for _, f := range medians {
		scaled = append(scaled, f*row.scale)
	}
	return stats.MedianAndRange(scaled) + " " + row.unit
}

// ratio is how many times one figure is another.
func ratio(of, to []float64) float64 { return stats.Median(of) / stats.Median(to) }

// markdown is the page.
func (r *tlsResults) markdown() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, tlsHeading, r.taken(), strings.Join(algorithms, ", "), r.Gloo, r.OpenSSL)
	b.WriteString(page.OneProcessor + "\n\n" + page.OwnGoals + "\n\n")
	goals := page.Table{Heading: []string{"case", "Gloo's best with TLS", "contender", "time", "ratio", "goal", "reached"}}
	cost := page.Table{Heading: []string{"case", "contender", "in clear", "with TLS", "times the time in clear"}}
	rows := r.rows()
	var failed, without []string
	for _, row := range rows {
		for _, name := range row.of.failed {
			if !slices.Contains(row.of.without, name) {
				failed = append(failed, name+" ("+row.where+")")
			}
		}
		for _, name := range row.of.without {
			without = append(without, name+" ("+row.where+")")
		}
		algorithm, reference := row.of.fastest(glooTLS, row.elements)
		if algorithm == "" {
			goals.Add(row.where, "no run ended", "", "", "", "at most Gloo's best with TLS", "not measured")
			continue
		}
		where, best := row.where, row.time(reference)+", "+algorithm
		clearAlgorithm, clear := row.of.fastest(gloo, row.elements)
		cost.Add(where, "Gloo's best", row.time(clear)+", "+clearAlgorithm, best, fmt.Sprintf("%.2f", ratio(reference, clear)))
		for _, name := range []string{withCertificates, withJobKey} {
			own, inClear := row.of.medians(name, row.elements), row.of.medians(tcp, row.elements)
			share := ratio(own, reference)
			goals.Add(where, best, name, row.time(own), fmt.Sprintf("%.2f", share), "at most Gloo's best with TLS", page.YesNo(share <= 1))
			cost.Add("", name, row.time(inClear), row.time(own), fmt.Sprintf("%.2f", ratio(own, inClear)))
			where, best = "", ""
		}
	}
	goals.Markdown(&b)
	if len(rows) <= len(r.Elements) {
		b.WriteString("\nThe run was interrupted: the other cases were not measured.\n")
	}
	listFailed(&b, failed)
	if len(without) > 0 {
		fmt.Fprintf(&b, "\nLeft out, as all of %d tries failed or did not end within %s: %s.\n", glooTries, tlsLimit, strings.Join(without, "; "))
	}
	fmt.Fprintf(&b, "\nBetween hosts, each in a network namespace of its own with a link to a switch, figures take %s.\n\n## What TLS costs each of them\n\n", r.StarLength)
	cost.Markdown(&b)
	return b.Bytes()
}
