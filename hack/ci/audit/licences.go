package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// allowed are the licences of Go modules that may be in programs of the Apache License 2.0, by their names in SPDX.
// plugin/deny.toml has those of crates.
var allowed = []string{"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT"}

// checkLicences reads syft's own JSON. A module needs at least one licence that is known, and no known one that is not
// allowed.
func checkLicences(bill []byte) error {
	var document struct {
		Artifacts []struct {
			Name, Version, Type string
			Licenses            []struct {
				SPDXExpression string
				URLs           []string
			}
		}
	}
	if err := json.Unmarshal(bill, &document); err != nil {
		return fmt.Errorf("read syft's output: %w", err)
	}
	modules := 0
	var refused []error
	for _, a := range document.Artifacts {
		if a.Type != "go-module" || a.Name == toolbox.Module || a.Name == "stdlib" {
			continue
		}
		modules++
		known := false
		for _, l := range a.Licenses {
			switch {
			case l.SPDXExpression == "": // a file that syft cannot tell
			case slices.Contains(allowed, l.SPDXExpression):
				known = true
			default:
				refused = append(refused, fmt.Errorf("%s %s has the licence %s (%s)", a.Name, a.Version, l.SPDXExpression, strings.Join(l.URLs, ", ")))
			}
		}
		if !known {
			refused = append(refused, fmt.Errorf("%s %s has no licence that is known and allowed", a.Name, a.Version))
		}
	}
	if modules == 0 {
		return errors.New("syft found no Go module")
	}
	return errors.Join(refused...)
}
