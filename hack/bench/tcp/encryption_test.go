package main

import (
	"slices"
	"strings"
	"testing"
)

// The page compares what is encrypted with the same in clear, by each case's goal.
func TestEncryptionPageComparesWithClear(t *testing.T) {
	result := func(name string, clear, encrypted outcome, more ...series) caseResult {
		all := cases(true)
		c := all[slices.IndexFunc(all, func(c benchCase) bool { return c.name == name })]
		return caseResult{testCase: c, Contenders: append([]series{
			{clearName, []outcome{clear}}, {encryptedName, []outcome{encrypted}},
		}, more...)}
	}
	r := encryptionReport{
		cases: []caseResult{
			result("slow-link", outcome{Rate: 0.4}, outcome{Rate: 0.36}),
			result("ping-pong", outcome{P50: 20e-6}, outcome{P50: 25e-6}),
			result("one-connection", outcome{Rate: 5, Send: 0.2, Receive: 0.2}, outcome{Rate: 2, Send: 0.4, Receive: 0.4},
				series{opensslName, []outcome{{Rate: 1, Send: 0.75, Receive: 0.5, Own: 0.6, Busy: 0.8}}}, series{cipherName, []outcome{{Rate: 4}}}),
			result("silent-link", outcome{Failure: "it hung"}, outcome{Rate: 1}),
		},
		setUp: map[string][]float64{clearName: {0.02}, encryptedName: {0.028}},
	}
	page := string(r.markdown())
	for _, want := range []string{
		"| median | 0.400 GB/s | 0.360 GB/s | 0.90 | at least 0.95 | no |",
		"| median round trip | 20.0 us | 25.0 us | 1.25 | at most 1.3 | yes |",
		"| processor time for each GB | 0.40 s | 0.80 s | 2.00 | at most 1.5 | no |",
		"| AES-GCM alone: 4.00 | 2.50 | 0.62 | at least 0.8 | no |",
		"| openssl s_client, one connection: 1.000 GB/s | 2.000 GB/s | 2.00 | at least 1 | yes |",
		"| time to open | 20.0 ms | 28.0 ms | 1.40 | at most 1.5 | yes |",
		"so the least is 2.25 times the time in clear. A sender's core spends 0.25 s on that and 0.20 s on sending, so it sends at most 0.56 of what",
		"no: all runs of one failed",
		"in clear, run 1 failed: it hung",
		"; messages of 512 KiB, 8 in flight on each of 1 connections, runs of about 1s.\n\n| contender",
		"| processors: own share, in all |",
		"| openssl s_client, one connection | 1.000 GB/s | 1.000 GB/s | 1.000 GB/s | 0 % | 0.75 + 0.50 | 60 %, 80 % |",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("no %q in\n%s", want, page)
		}
	}
}
