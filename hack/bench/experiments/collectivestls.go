package experiments

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/workload"
)

// Contenders that encrypt.
const (
	withCertificates = "Evenkeel, TLS with certificates"
	withJobKey       = "Evenkeel, TLS with the job key"
)

// collectivesTLS measures all-reduces on CPUs against Gloo's with TLS.
func collectivesTLS() experiment.Experiment {
	build, open := opened(workload.NewGlooTLS)
	secret := make([]byte, 32)
	rand.Read(secret) //nolint:errcheck // it never fails
	environment := []string{"EVENKEEL_ENCRYPTION=required", "EVENKEEL_JOB_KEY=" + hex.EncodeToString(secret)}
	// Some of Gloo's runs do not end at large sizes, so that each size has runs of its own.
	sized := func(elements int, quick bool) experiment.Case {
		w := workload.Collective{Ranks: 4, Elements: []int{elements}, Length: collectiveLength(quick)}
		size := fmt.Sprintf("%d elements", elements)
		if elements == 1 {
			size = "1 element"
		}
		c := experiment.Case{
			Name: strings.ReplaceAll(size, " ", "-"), Title: fmt.Sprintf("%d processes, %s", w.Ranks, size), Load: fmt.Sprintf("%s for each run", w.Length),
			Headline: w.Median(), More: []experiment.Quantity{w.Minimum(), workload.FailedTries}, Timeout: workload.CollectiveTimeout,
		}
		return encrypted(c, w, build, environment)
	}
	return experiment.Experiment{
		Name: "collectives-tls", Title: "Collectives with TLS against Gloo with TLS", Summary: "all-reduces on CPUs with TLS, against Gloo's with TLS, and each in clear",
		Subject: withCertificates, DriverOnly: true,
		About: "[What is protected from whom](../encryption.md) and [the collectives in clear](collectives.md) are other pages.\n\n" +
			"An all-reduce (sum of float32) by Evenkeel, which chooses the algorithm, and by Gloo with each of its algorithms (" + strings.Join(workload.GlooAlgorithms, ", ") + ").\n" +
			"The best of them at each size, by its median, is what Evenkeel is compared with. Gloo is built from Debian's sources with its transport over TLS, which\n" +
			"Debian's library lacks; in clear it is the same build. A run has the median time on rank 0. What TLS costs is the ratio of a contender to its base:\n" +
			"the same in clear.\n\n" +
			"Everything encrypted is TLS 1.3. Gloo has one connection for each pair of ranks, and records by OpenSSL. Evenkeel's transport `tls` authenticates\n" +
			"ranks as Gloo does: each shows a certificate of one authority. Records are by rustls. Both take AES-256-GCM. With `EVENKEEL_ENCRYPTION=required` and a\n" +
			"job key there are no certificates, the cipher is AES-128-GCM, and the store and probes are encrypted too. Connections are open before the first figure.\n\n" +
			glooWaits + "\n" +
			"All processes share one machine: each byte is encrypted and decrypted on the same cores.",
		Notes: glooFails + " A contender with TLS whose tries all fail, or do not\n" +
			"end within 20 s, is left out of the rest of the case.",
		Rounds: 5, QuickRounds: 2,
		Open: open,
		Cases: func(quick bool) []experiment.Case {
			all := []experiment.Case{captures(build, environment)}
			for _, elements := range []int{1, 1000, 100_000, 1_000_000} {
				all = append(all, sized(elements, quick))
			}
			c, w := hostsCase(quick)
			return append(all, encrypted(c, w, build, environment))
		},
	}
}

// encrypted completes a case with contenders that encrypt, the same in clear, and goals.
func encrypted(c experiment.Case, w workload.Collective, build func() *workload.Gloo, environment []string) experiment.Case {
	certificates, jobKey := w.EvenkeelTLS(withCertificates, build), w.Evenkeel(withJobKey, "tcp", environment...)
	certificates.Base, jobKey.Base = overTCP, overTCP
	c.Contenders = []experiment.Contender{certificates, jobKey, w.Evenkeel(overTCP, "tcp")}
	for _, algorithm := range workload.GlooAlgorithms {
		inClear := w.Gloo(algorithm, build)
		inClear.Reference = false // of what encrypts
		c.Contenders = append(c.Contenders, w.GlooTLS(algorithm, build), inClear)
	}
	ofJobKey := share(c.Headline, 1, "")
	ofJobKey.Contender = withJobKey
	c.Goals = []experiment.Goal{share(c.Headline, 1, ""), ofJobKey}
	return c
}

// captures shows that contenders encrypt that should.
func captures(build func() *workload.Gloo, environment []string) experiment.Case {
	w := workload.Collective{Ranks: 4, Elements: []int{100_000}, Length: 100 * time.Millisecond}
	c := experiment.Case{
		Name: "capture", Title: "what is on the network", Load: "A capture of each contender, 4 processes, 100000 elements", Once: true, Timeout: workload.CollectiveTimeout,
		Notes: []string{"A contender with TLS passes if it sends records of TLS and no element. Gloo in clear passes if the capture sees elements, which shows that it would see them.\n" +
			"Gloo's own function that joins ranks, `connectFullMesh`, makes connections in clear in this version, also over its TLS device: a capture of that showed\n" +
			"its elements. So ranks are joined here by the function of its base class, which makes those of the device."},
		Headline: workload.Passed, More: []experiment.Quantity{workload.ClearPackets, workload.RecordPackets},
	}
	add := func(of experiment.Contender, encrypts bool) {
		of = workload.Captured(of, encrypts)
		g := median(workload.Passed, 1, "")
		g.Contender = of.Name
		c.Contenders, c.Goals = append(c.Contenders, of), append(c.Goals, g)
	}
	add(w.EvenkeelTLS(withCertificates, build), true)
	add(w.Evenkeel(withJobKey, "tcp", environment...), true)
	for _, algorithm := range workload.GlooAlgorithms {
		add(w.GlooTLS(algorithm, build), true)
		add(w.Gloo(algorithm, build), false)
	}
	return c
}
