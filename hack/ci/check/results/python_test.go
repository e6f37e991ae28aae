package results

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

func TestPythonEvents(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		end  error
		want string
	}{
		"tests": {`
{"event": "start", "test": "t.A.test_one"}
{"event": "stop", "test": "t.A.test_one", "outcome": "passed", "seconds": 0.5, "reason": "", "output": ""}
{"event": "start", "test": "t.A.test_two"}
{"event": "stop", "test": "t.A.test_two", "outcome": "failed", "seconds": 1, "reason": "", "output": "Traceback\n"}
{"event": "start", "test": "t.A.test_three"}
{"event": "stop", "test": "t.A.test_three", "outcome": "skipped", "seconds": 0, "reason": "no torch", "output": ""}
{"event": "end"}
`, errors.New("exit status 1"), `
passed folder t.A.test_one 500ms/500ms
failed folder t.A.test_two 1s/1s output="Traceback\n"
skipped folder t.A.test_three reason="no torch"
`},
		"the interpreter dies": {`
{"event": "start", "test": "t.A.test_one"}
`, errors.New("signal: segmentation fault"), `
failed folder t.A.test_one output="the program ended before the test did: signal: segmentation fault\n"
`},
		"no tests": {`{"event": "end"}`, nil, `
failed folder (program) output="no tests\n"
`},
		"an import fails before the first test": {"", errors.New("exit status 1"), `
failed folder (program) output="exit status 1\n"
`},
	} {
		_, got := read(strings.TrimLeft(c.text, "\n"), c.end, func(to Receiver) Parser { return NewPython("folder", to) })
		compare(t, name, got, c.want)
	}
}

// The script's events are read as they are written, by a real interpreter.
func TestPythonScriptReportsEveryKindOfTest(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3: ", err)
	}
	dir := t.TempDir()
	const tests = `
import os, unittest

class Kinds(unittest.TestCase):
    def test_passes(self): os.write(1, b"a line of a child\n")
    def test_fails(self): self.assertEqual(1, 2)
    def test_breaks(self): raise RuntimeError("broken")
    @unittest.skip("not here")
    def test_skips(self): pass
    @unittest.expectedFailure
    def test_expected(self): self.fail()
    @unittest.expectedFailure
    def test_unexpected(self): pass
    def test_subtests(self):
        for i in range(3):
            with self.subTest(i=i): self.assertNotEqual(i, 1)

class SetUp(unittest.TestCase):
    @classmethod
    def setUpClass(cls): raise RuntimeError("no set-up")
    def test_never(self): pass
`
	for name, text := range map[string]string{"test_kinds.py": tests, "test_gone.py": "import gone_module"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	events, err := os.Create(filepath.Join(t.TempDir(), "events"))
	if err != nil {
		t.Fatal(err)
	}
	defer events.Close()
	cmd := exec.CommandContext(t.Context(), python, "-B", "-c", PythonScript)
	cmd.Dir, cmd.ExtraFiles = dir, []*os.File{events}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	failure := cmd.Run()
	if failure == nil {
		t.Error("the script reports success")
	}
	text, err := os.ReadFile(events.Name())
	if err != nil {
		t.Fatal(err)
	}
	reported, _ := read(string(text), failure, func(to Receiver) Parser { return NewPython("f", to) })
	got := map[string]Result{}
	for _, r := range reported {
		got[r.Name] = r
	}
	for name, want := range map[string]struct {
		outcome Outcome
		says    string
	}{
		"test_kinds.Kinds.test_passes":          {Passed, ""},
		"test_kinds.Kinds.test_fails":           {Failed, "1 != 2"},
		"test_kinds.Kinds.test_breaks":          {Failed, "broken"},
		"test_kinds.Kinds.test_skips":           {Skipped, "not here"},
		"test_kinds.Kinds.test_expected":        {Passed, ""},
		"test_kinds.Kinds.test_unexpected":      {Failed, "expected to fail"},
		"test_kinds.Kinds.test_subtests":        {Failed, `\(i=1\)`},
		"setUpClass (test_kinds.SetUp)":         {Failed, "no set-up"},
		"unittest.loader._FailedTest.test_gone": {Failed, "gone_module"},
	} {
		r := got[name]
		if r.Outcome != want.outcome || !regexp.MustCompile(want.says).MatchString(r.Output+r.Reason) {
			t.Errorf("%s: %s %s%s", name, r.Outcome, r.Reason, r.Output)
		}
	}
	if len(got) != 9 {
		t.Errorf("%d results: %v", len(got), got)
	}
	if out.String() != "a line of a child\n" {
		t.Errorf("it prints %q", out.String())
	}
}
