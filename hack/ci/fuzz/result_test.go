package main

import (
	"strings"
	"testing"
)

const begin = `INFO: Running with entropic power schedule (0xFF, 100).
INFO: Seed: 1520148218
INFO: Loaded 1 modules   (9312 inline 8-bit counters): 9312 [0x5581, 0x5592),
INFO:        4 files found in corpus/verdict
#5	INITED cov: 310 ft: 410 corp: 4/1220b exec/s: 0 rss: 40Mb
#4096	pulse  cov: 400 ft: 800 corp: 90/20Kb lim: 400 exec/s: 2048 rss: 41Mb
`

func TestFuzzResultHasExecutionsAndCoverage(t *testing.T) {
	out := begin + `#8000	NEW    cov: 412 ft: 830 corp: 95/21Kb lim: 400 exec/s: 2000 rss: 41Mb L: 9/400 MS: 1 EraseBytes-
#9000	DONE   cov: 413 ft: 831 corp: 96/21Kb lim: 400 exec/s: 2000 rss: 41Mb
Done 9000 runs in 5 second(s)
stat::number_of_executed_units: 9000
stat::peak_rss_mb:              41
`
	got := parse("verdict", out, false)
	want := result{target: "verdict", executions: "9000", covered: "413", places: "9312", inputs: "96"}
	if got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	if line := got.String(); !strings.Contains(line, "413/9312") || !strings.HasSuffix(line, "ok") {
		t.Error(line)
	}
}

func TestFuzzFailureIsShownWithTheCommandThatRepeatsIt(t *testing.T) {
	out := begin + `artifact_prefix='failures/verdict/'; Test unit written to failures/verdict/slow-unit-0beec7b5
thread '<unnamed>' panicked at src/bin/verdict.rs:60:5:
assertion failed
==77== ERROR: libFuzzer: deadly signal
SUMMARY: libFuzzer: deadly signal
artifact_prefix='failures/verdict/'; Test unit written to failures/verdict/crash-da39a3ee
Base64: AA==
stat::number_of_executed_units: 5000
`
	got := parse("verdict", out, true)
	if !got.failed || got.input != "failures/verdict/crash-da39a3ee" || got.executions != "5000" || got.covered != "400" {
		t.Errorf("%+v", got)
	}
	for _, want := range []string{"FAILED", "panicked at src/bin/verdict.rs:60:5", "make fuzz TARGET=verdict INPUT=failures/verdict/crash-da39a3ee"} {
		if !strings.Contains(got.String(), want) {
			t.Errorf("%s\nlacks %q", got, want)
		}
	}
}

// A target that cannot start prints none of it.
func TestFuzzResultOfNoOutputIsNoPanic(t *testing.T) {
	if line := parse("hello", "no such library", true).String(); !strings.Contains(line, "no such library") || strings.Contains(line, "INPUT") {
		t.Error(line)
	}
}

func TestFuzzHostIsThatOfTheCompiler(t *testing.T) {
	if host, err := hostOf("rustc 1.95.0\nbinary: rustc\nhost: x86_64-unknown-linux-gnu\nrelease: 1.95.0\n"); host != "x86_64-unknown-linux-gnu" || err != nil {
		t.Error(host, err)
	}
	if host, err := hostOf("rustc 1.95.0\n"); err == nil {
		t.Error(host)
	}
}
