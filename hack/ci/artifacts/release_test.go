package artifacts

import (
	"debug/elf"
	"os/exec"
	"strings"
	"testing"
)

// A program of this machine needs some version of glibc: limits above that pass, limits below do not.
func TestCheckGlibc(t *testing.T) {
	program, err := exec.LookPath("ls")
	if err != nil {
		t.Fatal(err)
	}
	if err := CheckGlibc(program, "99.0"); err != nil {
		t.Errorf("limit of 99.0: %v", err)
	}
	err = CheckGlibc(program, "2.0")
	if err == nil || !strings.Contains(err.Error(), program) || !strings.Contains(err.Error(), "must run with 2.0") {
		t.Errorf("limit of 2.0: %v", err)
	}
	if err := CheckGlibc("/dev/null", "2.28"); err == nil {
		t.Error("/dev/null is no program, and passed")
	}
	if file, err := elf.Open(program); err != nil {
		t.Errorf("the test needs a program in ELF: %v", err)
	} else if err := file.Close(); err != nil {
		t.Error(err)
	}
}

func TestLaterVersion(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want bool
	}{
		{"2.34", "2.28", true}, {"2.28", "2.28", false}, {"2.4", "2.28", false}, {"3", "2.28", true}, {"2.2.5", "2.2", true},
		{"2.2", "2.2.5", false}, {"PRIVATE", "2.28", true}, {"ABI_DT_RELR", "2.28", true},
	} {
		if got := laterVersion(c.a, c.b); got != c.want {
			t.Errorf("laterVersion(%q, %q) = %v", c.a, c.b, got)
		}
	}
}
