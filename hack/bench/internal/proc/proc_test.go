package proc

import (
	"testing"

	"evenkeel.dev/evenkeel/hack/internal/child"
)

func TestWaitBothReturnsTheFirstAndTheErrorsOfBoth(t *testing.T) {
	start := func(role, script string) *Process {
		p, err := Start(t.Context(), nil, "", role, []string{"SAID=broken"}, "sh", "-c", script)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	text, err := WaitBoth(start("sender", "echo one"), start("receiver", "echo two; echo $SAID >&2; exit 3"))
	if want := "receiver: exit status 3: broken"; string(text) != "one\n" || err == nil || err.Error() != want {
		t.Errorf("%q, %v; want one, and %s", text, err, want)
	}
}

func TestErrorOfAProgramHasTheEndOfWhatItSaid(t *testing.T) {
	_, err := Output(t.Context(), child.Command(t.Context(), "", "sh", "-c", "seq 9 >&2; exit 3"))
	if want := "sh: exit status 3: 7\n8\n9"; err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
	if text, err := Output(t.Context(), child.Command(t.Context(), "", "echo", "one")); err != nil || string(text) != "one\n" {
		t.Errorf("%q, %v", text, err)
	}
}
