package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// sample is the text of one of the files that others run.
func sample(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "config", "samples", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// runScript runs one of Slurm's scripts with programs of our own in the place of kubectl-evenkeel, which ends with the status, and of
// Slurm's. It returns the script's exit status and what it called them with.
func runScript(t *testing.T, name string, status int, line, reason string, environment ...string) (code int, calls string) {
	t.Helper()
	dir := t.TempDir()
	log := filepath.Join(dir, "calls")
	for program, body := range map[string]string{
		"kubectl-evenkeel": fmt.Sprintf("echo kubectl-evenkeel \"$*\" >>'%s'\necho '%s'\nexit %d\n", log, line, status),
		"logger":           fmt.Sprintf("echo logger \"$*\" >>'%s'\n", log),
		"scontrol":         fmt.Sprintf("if [ \"$1\" = show ]; then printf 'NodeName=%%s\\n   State=IDLE\\n' \"$3\"\n%s\nfi\necho scontrol \"$*\" >>'%s'\n", shown(reason), log),
	} {
		if err := os.WriteFile(filepath.Join(dir, program), []byte("#!/bin/sh\n"+body), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	text := sample(t, name)
	const path = "PATH=/usr/local/bin:"
	if !strings.Contains(text, path) {
		t.Fatalf("%s sets no %s", name, path)
	}
	script := filepath.Join(dir, "script")
	if err := os.WriteFile(script, []byte(strings.Replace(text, path, "PATH="+dir+":", 1)), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), script)
	cmd.Env = append(environment, "SLURMD_NODENAME=n1") // slurmd gives no path
	if out, err := cmd.CombinedOutput(); cmd.ProcessState == nil || len(out) > 0 {
		t.Fatalf("%s: %v: %s", name, err, out)
	}
	called, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), strings.ReplaceAll(string(called), "kubectl-evenkeel check node n1\n", "")
}

// shown is what scontrol shows of a reason.
func shown(reason string) string {
	if reason == "" {
		return ""
	}
	return fmt.Sprintf("printf '   Reason=%%s [root@2026-11-21T12:00:00]\\n' '%s'", reason)
}

func TestSlurmPrologStopsJobsOnFailedNodesOnly(t *testing.T) {
	for status, want := range map[int]int{ExitNodeProven: 0, ExitNodeFailed: 1, ExitNodeUnknown: 0, 3: 0, 127: 0, 137: 0} {
		code, calls := runScript(t, "slurm-prolog.sh", status, "with n2: 9.8 GB/s", "")
		if code != want || (calls == "logger -t evenkeel with n2: 9.8 GB/s\n") != (want == 1) {
			t.Errorf("the check ends with %d: exit status %d, want %d; it calls %q", status, code, want, calls)
		}
	}
}

func TestSlurmHealthCheckDrainsAndResumes(t *testing.T) {
	const show, drain, resume = "scontrol show node n1\n", "scontrol update NodeName=n1 State=DRAIN Reason=evenkeel: failed: with n2: 9.8 GB/s\n", "scontrol update NodeName=n1 State=RESUME\n"
	for name, test := range map[string]struct {
		status int
		reason string
		health string
		want   string
	}{
		"it failed":                             {ExitNodeFailed, "", "", show + drain},
		"it failed, and slurmd says healthy":    {ExitNodeFailed, "", "yes", show + drain},
		"it failed before":                      {ExitNodeFailed, "evenkeel: failed: with n3: 9 GB/s", "no", show},
		"it failed, and was drained by others":  {ExitNodeFailed, "new memory", "no", show},
		"it passed":                             {ExitNodeProven, "", "", show},
		"it passed, and slurmd says healthy":    {ExitNodeProven, "", "yes", ""},
		"it passed after it failed":             {ExitNodeProven, "evenkeel: failed: with n2: 9.8 GB/s", "no", show + resume},
		"it passed, and slurmd says nothing":    {ExitNodeProven, "evenkeel: failed: with n2: 9.8 GB/s", "", show + resume},
		"it passed, and was drained by others":  {ExitNodeProven, "new memory", "no", show},
		"nobody knows":                          {ExitNodeUnknown, "evenkeel: failed: with n2: 9.8 GB/s", "no", ""},
		"nobody knows, as there is no program":  {127, "", "", ""},
		"nobody knows, as the program was shot": {137, "", "", ""},
	} {
		var environment []string
		if test.health != "" {
			environment = append(environment, "SLURM_NODE_IS_HEALTHY="+test.health)
		}
		if code, calls := runScript(t, "slurm-health-check.sh", test.status, "failed: with n2: 9.8 GB/s", test.reason, environment...); code != 0 || calls != test.want {
			t.Errorf("%s: exit status %d, it calls %q, want %q", name, code, calls, test.want)
		}
	}
}

// detectorConfig is what node-problem-detector reads of a custom plugin's configuration.
type detectorConfig struct {
	Plugin           string `json:"plugin"`
	Source           string `json:"source"`
	MetricsReporting bool   `json:"metricsReporting"`
	PluginConfig     struct {
		InvokeInterval  string `json:"invoke_interval"`
		Timeout         string `json:"timeout"`
		MaxOutputLength int    `json:"max_output_length"`
		Concurrency     int    `json:"concurrency"`
		OnMessage       bool   `json:"enable_message_change_based_condition_update"`
	} `json:"pluginConfig"`
	Conditions []struct {
		Type, Reason, Message string
	} `json:"conditions"`
	Rules []struct {
		Type, Condition, Reason, Path, Timeout string
		Args                                   []string
	} `json:"rules"`
}

// TestProblemDetectorPlugin runs the rule's command as node-problem-detector does: with the node's name in the environment only.
func TestProblemDetectorPlugin(t *testing.T) {
	decoder := json.NewDecoder(strings.NewReader(sample(t, "node-problem-detector.json")))
	decoder.DisallowUnknownFields()
	var c detectorConfig
	if err := decoder.Decode(&c); err != nil {
		t.Fatal(err)
	}
	if c.Plugin != "custom" || c.Source == "" || len(c.Conditions) != 1 || len(c.Rules) != 1 {
		t.Fatalf("%+v", c)
	}
	rule := c.Rules[0]
	if rule.Type != "permanent" || rule.Condition != c.Conditions[0].Type || rule.Condition == evenkeel.ConditionNodeHealthy || rule.Reason == "" || filepath.Base(rule.Path) != "kubectl-evenkeel" {
		t.Errorf("%+v", rule)
	}
	// A rule may not take longer than all may, and is killed if it takes longer than it may.
	all, err := time.ParseDuration(c.PluginConfig.Timeout)
	if err != nil {
		t.Fatal(err)
	}
	if own, err := time.ParseDuration(rule.Timeout); err != nil || own > all || own <= answerTimeout {
		t.Errorf("the rule's timeout is %s (%v), that of all %s, and ours %s", own, err, all, answerTimeout)
	}
	t.Setenv("NODE_NAME", "gpu-17")
	for want, api := range map[int]*nodeAPI{
		0: judgedNode(corev1.ConditionTrue, "Proven", "with gpu-18: 46.1 GB/s", evenkeel.HealthyValue),
		1: judgedNode(corev1.ConditionFalse, "TooSlow", "with gpu-18: 9.8 GB/s", evenkeel.UnhealthyValue),
		2: judgedNode(corev1.ConditionUnknown, "NotChecked", "no conclusive check of the node's network yet", ""),
	} {
		t.Setenv("KUBECONFIG", serveNode(t, api))
		var out, errs bytes.Buffer
		status := Run(t.Context(), rule.Args, &out, &errs)
		if status != want || strings.Count(out.String(), "\n") != 1 || out.Len() > c.PluginConfig.MaxOutputLength || errs.Len() > 0 {
			t.Errorf("exit status %d, want %d: %q, %q", status, want, out.String(), errs.String())
		}
	}
}
