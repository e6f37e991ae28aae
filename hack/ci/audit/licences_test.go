package main

import (
	"errors"
	"os/exec"
	"strings"
	"testing"
)

func TestLicencesOfModulesAreAllowedOrNamed(t *testing.T) {
	module := func(name, licence string) string {
		return `{"name":"` + name + `","version":"v1.0.0","type":"go-module","licenses":[{"spdxExpression":"","urls":["a"]},{"spdxExpression":"` + licence + `","urls":["LICENSE"]}]}`
	}
	bill := func(modules ...string) []byte { return []byte(`{"artifacts":[` + strings.Join(modules, ",") + `]}`) }
	if err := checkLicences(bill(module("example.com/a", "MIT"), module("example.com/b", "Apache-2.0"))); err != nil {
		t.Error(err)
	}
	for want, bad := range map[string][]byte{
		"example.com/c v1.0.0 has the licence GPL-3.0-only": bill(module("example.com/a", "MIT"), module("example.com/c", "GPL-3.0-only")),
		"example.com/d v1.0.0 has no licence":               bill(module("example.com/d", "")),
		"no Go module":                                      bill(),
		"read syft's output":                                []byte("{"),
	} {
		if err := checkLicences(bad); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", bad, err, want)
		}
	}
}

// A database that cannot be reached is told from a finding.
func TestUnreachableDatabaseIsNotChecked(t *testing.T) {
	run := func(script string) error {
		return outcome(exec.CommandContext(t.Context(), "sh", "-c", script), "failed to fetch")
	}
	if err := run("exit 0"); err != nil {
		t.Error(err)
	}
	if err := run("echo error: failed to fetch the list: no such host; exit 1"); !errors.Is(err, errNotChecked) || !strings.Contains(err.Error(), "no such host") {
		t.Errorf("unreachable: %v", err)
	}
	if err := run("echo a finding; exit 1"); err == nil || errors.Is(err, errNotChecked) || !strings.Contains(err.Error(), "a finding") {
		t.Errorf("a finding: %v", err)
	}
}
