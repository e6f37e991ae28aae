package experiments

import (
	"fmt"
	"math"
	"strings"
	"testing"
)

func TestRingBetweenHostsIsBoundByItsLinks(t *testing.T) {
	if bound := ringBound(hostsElements); math.Abs(bound-251) > 1 {
		t.Errorf("a ring's bound is %f ms", bound)
	}
}

// What encrypts is compared with what encrypts, and what that costs with the same in clear.
func TestReferencesOfTLSEncrypt(t *testing.T) {
	for _, c := range collectivesTLS().Cases(false)[1:] {
		for _, of := range c.Contenders {
			encrypts := strings.Contains(of.Name, "TLS")
			if gloo := strings.HasPrefix(of.Name, "Gloo"); of.Reference != (gloo && encrypts) {
				t.Errorf("%s, %s: counts as a reference: %t", c.Name, of.Name, of.Reference)
			}
			if encrypts != (of.Base != "") || strings.Contains(of.Base, "TLS") {
				t.Errorf("%s, %s: its base is %q", c.Name, of.Name, of.Base)
			}
		}
	}
}

// What encrypts has to, and each algorithm of Gloo in clear shows that the capture sees elements.
func TestEachContenderWithTLSIsCaptured(t *testing.T) {
	var goals []string
	cases := collectivesTLS().Cases(false)
	for _, g := range cases[0].Goals {
		goals = append(goals, g.Contender)
	}
	asked := strings.Join(goals, "\n")
	for _, c := range cases[1:] {
		for _, of := range c.Contenders {
			if of.Name != overTCP && !strings.Contains(asked, fmt.Sprintf("capture of %s", of.Name)) {
				t.Errorf("%s is not captured", of.Name)
			}
		}
	}
}
