package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
	"evenkeel.dev/evenkeel/hack/bench/internal/stats"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// Names of the contenders over TLS; those in clear have the names of the other page.
const (
	withCertificates = "Evenkeel, TLS with certificates"
	withJobKey       = "Evenkeel, TLS with the job key"
)

func glooTLS(algorithm string) string { return "Gloo with TLS, " + algorithm }

// The measurement on one machine: the number of processes, and its sizes.
const tlsProcesses = 4

// tlsLimit is several times what a run of Gloo with TLS takes, if it ends.
const tlsLimit = 20 * time.Second

var tlsElementCounts = []int{1, 1000, 100_000, 1_000_000}

// tlsResults are all measurements with TLS, and the same in clear.
type tlsResults struct {
	setting
	OpenSSL string // its version, for Gloo
	// Local has one for each number of elements, each with runs of its own: some of Gloo's runs do not end at large ones.
	Local []*measured
	Star  measured
}

func tlsCommand() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   "tls",
		Short: "Measure the collectives with TLS against Gloo with TLS, and write docs/results/collectives-tls.md",
		Long: `Measure the collectives with TLS against Gloo with TLS, and write docs/results/collectives-tls.md.

Debian's libgloo has no TLS, so Gloo is built with it from Debian's sources, once. In each round all contenders run
once, one after the other, with TLS and in clear: Evenkeel with certificates and with the job key, and Gloo with each
of its algorithms. Installs what Gloo's build needs. Needs root, openssl, and a machine that does nothing else.`,
		Example: `  go run ./hack/bench/collectives tls
  go run ./hack/bench/collectives tls --quick`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runTLS(cmd.Context(), cmd.OutOrStdout(), o) },
	}
	o.addFlags(cmd.Flags(), "collectives-tls.md")
	return cmd
}

func runTLS(ctx context.Context, out io.Writer, o options) error {
	var r tlsResults
	w, err := o.prepare(ctx, &r.setting, func(ctx context.Context, root, folder string) error {
		dir, version, err := toolbox.GlooWithTLS(ctx, os.Stderr)
		if err != nil {
			return err
		}
		r.Gloo = "Gloo " + version
		program := toolbox.Program{Name: "openssl", Package: "openssl"}
		return buildDriver(ctx, root, folder, []toolbox.Program{program}, "-I"+filepath.Join(dir, "include"), filepath.Join(dir, "lib", "libgloo.a"), "-lssl", "-lcrypto")
	})
	if err != nil {
		return err
	}
	defer os.RemoveAll(w.folder)
	r.Elements = tlsElementCounts
	openssl, err := proc.Output(ctx, "openssl", "version")
	if err != nil {
		return err
	}
	words := strings.Fields(string(openssl)) // and the day of its release
	r.OpenSSL = strings.Join(words[:min(2, len(words))], " ")
	contenders, err := tlsContenders(w)
	if err != nil {
		return err
	}
	if err := checkEncryption(ctx, contenders); err != nil {
		return err
	}
	var cases []func() error
	for _, n := range r.Elements {
		m := &measured{ranks: tlsProcesses}
		r.Local = append(r.Local, m)
		cases = append(cases, func() error {
			return m.measure(ctx, contenders, r.Rounds, task{tlsProcesses, r.Length, []int{n}, loopback})
		})
	}
	cases = append(cases, func() error { return measureStar(ctx, &r.Star, contenders, r.Rounds, r.StarLength) })
	err = r.run(cases, func() error { return r.write(w.output) })
	if err == nil && w.output == "" {
		_, err = out.Write(r.markdown())
	}
	return err
}

// tlsContenders are Evenkeel and all algorithms of Gloo, each with TLS and in clear.
func tlsContenders(w workplace) ([]contender, error) {
	files, err := makeCertificates(w.folder)
	if err != nil {
		return nil, err
	}
	secret := make([]byte, 32)
	if _, err := rand.Read(secret); err != nil {
		return nil, fmt.Errorf("make a key: %w", err)
	}
	tls := []string{"tls", "--cert", files.certificate, "--pkey", files.key, "--ca-file", files.authority}
	contenders := []contender{
		{name: withCertificates, encrypts: true, run: evenkeel(w.bench, w.folder, tls)},
		{name: withJobKey, encrypts: true, run: evenkeel(w.bench, w.folder, []string{"tcp"}, "EVENKEEL_ENCRYPTION=required", "EVENKEEL_JOB_KEY="+hex.EncodeToString(secret))},
		{name: tcp, run: evenkeel(w.bench, w.folder, []string{"tcp"})},
	}
	for _, algorithm := range algorithms {
		contenders = append(contenders,
			contender{
				name: glooTLS(algorithm), encrypts: true, run: driven(w.folder, algorithm, "--tls", files.certificate, files.key, files.authority),
				tries: glooTries, limit: tlsLimit,
			},
			contender{name: gloo(algorithm), run: driven(w.folder, algorithm), tries: glooTries})
	}
	return contenders, nil
}

// medians are a contender's medians in all rounds, in microseconds.
func (m *measured) medians(name string, elements int) []float64 {
	var all []float64
	for _, round := range m.rounds {
		all = append(all, round[name][elements].median)
	}
	return all
}

// fastest is Gloo's best algorithm at a size, by the median of its rounds, and its medians. The names are with TLS or in clear. There
// is none where all algorithms have been left out.
func (m *measured) fastest(name func(algorithm string) string, elements int) (algorithm string, medians []float64) {
	for _, candidate := range algorithms {
		if slices.Contains(m.without, name(candidate)) {
			continue
		}
		all := m.medians(name(candidate), elements)
		if algorithm == "" || stats.Median(all) < stats.Median(medians) {
			algorithm, medians = candidate, all
		}
	}
	return algorithm, medians
}
