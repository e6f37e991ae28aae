package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/preflight"
	"evenkeel.dev/evenkeel/operator/internal/preflight/pairing"
)

func TestCommandLineErrorsAreOneLine(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	t.Setenv("HOME", t.TempDir())
	unreachable := filepath.Join(t.TempDir(), "config")
	text := "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{name: c, context: {cluster: c}}]\nclusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]\n"
	if err := os.WriteFile(unreachable, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for args, want := range map[string]string{
		"chek":                                     `unknown command "chek"`,
		"check rum":                                `unknown command "rum"`,
		"check run extra":                          `unknown command "extra"`,
		"check run --node=a":                       "--node",
		"check run --nodes=a,b --selector=x=y":     "--nodes and --selector: one of them",
		"check run --selector=x~y":                 `--selector "x~y"`,
		"check run --stage=Fast":                   `--stage "Fast": want Capacity, Local, RDMA, Pairs, Rails, Gang`,
		"check run --runner=iperf":                 `--runner "iperf": want Bench, NCCLTests, RCCLTests`,
		"check run --launcher=ssh":                 `--launcher "ssh"`,
		"check run --min-bandwidth=fast":           `--min-bandwidth "fast": want a number`,
		"check run --min-bandwidth=-1G":            `--min-bandwidth "-1G"`,
		"check run --max-bytes=0":                  `--max-bytes "0"`,
		"check run --nodes=a":                      "--nodes a: stage Pairs needs at least two nodes",
		"check run":                                "no cluster configured (set KUBECONFIG or --kubeconfig)",
		"check why":                                "accepts 1 arg(s)",
		"check status --kubeconfig=/nowhere":       "/nowhere",
		"report":                                   "accepts 1 arg(s)",
		"doctor -o yaml":                           `--output "yaml": want json`,
		"doctor --kubeconfig=" + unreachable:       "127.0.0.1:1",
		"why /":                                    "no cluster",
		"check status --kubeconfig=" + unreachable: "127.0.0.1:1",
		"why a --request-timeout=1s --kubeconfig=" + unreachable: "127.0.0.1:1",
	} {
		var out, errs bytes.Buffer
		code := Run(t.Context(), strings.Fields(args), &out, &errs)
		if code != ExitError || !strings.Contains(errs.String(), want) || strings.Count(errs.String(), "\n") != 1 || out.Len() > 0 {
			t.Errorf("%s: exit status %d, %q, %q; want one line with %s", args, code, out.String(), errs.String(), want)
		}
	}
}

func TestEveryCommandHasExamples(t *testing.T) {
	var visit func(cmd *cobra.Command)
	visit = func(cmd *cobra.Command) {
		if !strings.Contains(cmd.Example, "kubectl evenkeel ") || cmd.Short == "" {
			t.Errorf("%s: no example", cmd.CommandPath())
		}
		for _, sub := range cmd.Commands() {
			visit(sub)
		}
	}
	visit(rootCommand())
	var out bytes.Buffer
	if code := Run(t.Context(), []string{"check", "run", "--help"}, &out, &out); code != 0 || !strings.Contains(out.String(), "kubectl evenkeel check run [flags]") || strings.Contains(out.String(), "--as-group") {
		t.Errorf("%d: %s", code, out.String())
	}
}

func TestCheckRunFlags(t *testing.T) {
	f := checkFlags{
		nodes: []string{"b", "a", "b"}, stages: []string{"pairs", "GANG"}, profile: "fast", runner: "nccltests", launcher: "mpijob", image: "i", gpus: 8,
		maxBytes: "1Gi", minBandwidth: "340G", timeout: 90 * time.Second,
	}
	check, err := f.check("n")
	if err != nil {
		t.Fatal(err)
	}
	s := check.Spec
	if check.Namespace != "n" || check.GenerateName == "" || !slices.Equal(s.Nodes.Names, []string{"a", "b"}) || !slices.Equal(s.Stages, []evenkeel.Stage{"Pairs", "Gang"}) || s.ProfileName != "fast" {
		t.Errorf("%+v", check)
	}
	if r := s.Runner; r.Type != "NCCLTests" || r.Launcher != "MPIJob" || r.Image != "i" || *r.GPUsPerNode != 8 {
		t.Errorf("runner %+v", r)
	}
	if *s.Sweep.MaxBytes != 1<<30 || s.Thresholds.MinBusBandwidth.Value() != 340e9 || *s.TimeoutSeconds != 90 {
		t.Errorf("%+v", s)
	}
	f = checkFlags{runner: "Bench", selector: "pool=h100", name: "mine"}
	if check, err = f.check("n"); err != nil || check.Name != "mine" || check.GenerateName != "" || check.Spec.Nodes.Selector.MatchLabels["pool"] != "h100" || check.Spec.Nodes.Names != nil {
		t.Errorf("%+v %v", check, err)
	}
	f = checkFlags{runner: "Bench", nodes: []string{"a"}, stages: []string{"Local"}}
	if _, err = f.check("n"); err != nil {
		t.Errorf("one node by itself: %v", err)
	}
}

func TestCheckWhyAdviceForEveryReason(t *testing.T) {
	f := &nodeFacts{node: &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}, system: systemNamespace}
	fallback := f.advice("", nil)
	for _, reason := range []string{
		string(pairing.ReasonProven), string(pairing.ReasonFallback), string(pairing.ReasonWrongData), string(pairing.ReasonBroken), string(pairing.ReasonSlow), string(pairing.ReasonFabricSuspect),
		string(pairing.ReasonInfrastructure), string(pairing.ReasonUnconfirmed), string(pairing.ReasonNothingToCompare), string(pairing.ReasonNoPartner), string(pairing.ReasonUnfinished),
		preflight.ReasonReady, preflight.ReasonLocalBroken, preflight.ReasonPlugin,
		preflight.ReasonMissingGPUs, preflight.ReasonNotReady, preflight.ReasonCordoned, preflight.ReasonTainted,
	} {
		if text := f.advice(reason, []string{"n2"}); text == fallback || !strings.Contains(text, "kubectl evenkeel check run") {
			t.Errorf("%s: %q", reason, text)
		}
	}
	if text := f.advice(string(pairing.ReasonSlow), []string{"n2"}); !strings.Contains(text, "--nodes n1,n2 --wait") {
		t.Errorf("the partner that passed is not named: %s", text)
	}
}

func at(minute int) metav1.Time {
	return metav1.NewTime(time.Date(2026, 11, 21, 12, minute, 0, 0, time.UTC))
}

func TestCheckWhySince(t *testing.T) {
	result := func(minute int, v evenkeel.Verdict) evenkeel.HealthResult {
		return evenkeel.HealthResult{Time: at(minute), Verdict: v, Check: "c"}
	}
	f := &nodeFacts{health: &evenkeel.NodeNetworkHealthStatus{History: []evenkeel.HealthResult{
		result(9, "Inconclusive"), result(8, "Fail"), result(7, "Inconclusive"), result(6, "Fail"), result(5, "Pass"), result(4, "Fail"),
	}}}
	deciding := f.deciding()
	if since, atLeast := f.since(deciding); deciding.Time != at(8) || !since.Equal(at(6).Time) || atLeast {
		t.Errorf("decided at %s, since %s, at least: %t", deciding.Time, since, atLeast)
	}
	f.health.History = nil
	for i := range evenkeel.HistoryLength {
		f.health.History = append(f.health.History, result(40-i, "Fail"))
	}
	if since, atLeast := f.since(f.deciding()); !since.Equal(at(21).Time) || !atLeast {
		t.Errorf("since %s, at least: %t", since, atLeast)
	}
}

func TestCheckWhyUncheckedNode(t *testing.T) {
	f := &nodeFacts{node: &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}, system: "elsewhere"}
	var out bytes.Buffer
	if err := f.explain(&out, at(0).Time); err != nil || !strings.Contains(out.String(), "Unknown") || !strings.Contains(out.String(), "check run --nodes n1,A-HEALTHY-NODE --wait -n elsewhere") {
		t.Errorf("%v: %s", err, out.String())
	}
}

func TestProgressWithoutTerminal(t *testing.T) {
	var out bytes.Buffer
	p := progressLine{out: &out}
	for _, text := range []string{"a", "a", "b"} {
		p.show(text, time.Second)
	}
	p.end()
	if out.String() != "a\nb\n" {
		t.Errorf("%q", out.String())
	}
	out.Reset()
	p = progressLine{out: &out, terminal: true}
	p.show("a", 1500*time.Millisecond)
	p.end()
	if out.String() != "\r\x1b[Ka  1s\r\x1b[K" {
		t.Errorf("%q", out.String())
	}
}

func TestFormatSpeed(t *testing.T) {
	for bytes, want := range map[float64]string{0: "", 12: "12 B/s", 4.8e6: "4.8 MB/s", 123.4e6: "123 MB/s", 1e9: "1 GB/s", 46.1e9: "46.1 GB/s", 5e15: "5e+03 TB/s"} {
		if got := formatSpeed(bytes); got != want {
			t.Errorf("%g: %q, want %q", bytes, got, want)
		}
	}
}
