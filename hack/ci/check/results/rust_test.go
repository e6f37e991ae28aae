package results

import (
	"errors"
	"strings"
	"testing"
)

func TestRustEvents(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		end  error
		want string
	}{
		"events, with a line of a child process": {`
{ "type": "suite", "event": "started", "test_count": 5 }
{ "type": "test", "event": "started", "name": "a::one" }
{ "type": "test", "event": "started", "name": "a::two" }
{ "type": "test", "name": "a::one", "event": "ok", "exec_time": 0.25 }
a child's line
{ "type": "test", "name": "a::two", "event": "failed", "exec_time": 1.5, "stdout": "panicked at src/a.rs:3:\nno\n" }
{ "type": "test", "name": "gpu", "event": "ignored", "message": "needs a GPU" }
{ "type": "test", "name": "child", "event": "ignored", "message": "part of another test" }
{ "type": "test", "name": "verbs", "event": "ignored", "message": "runs in the RDMA lab" }
{ "type": "suite", "event": "failed", "passed": 1, "failed": 1, "ignored": 3, "measured": 0, "filtered_out": 0, "exec_time": 1.6 }
`, errors.New("exit status 101"), `
passed crate a::one 250ms/250ms
failed crate a::two 1.5s/1.5s output="panicked at src/a.rs:3:\nno\n"
skipped crate gpu reason="needs a GPU"
elsewhere crate child reason="part of another test"
elsewhere crate verbs reason="runs in the RDMA lab"
> a child's line
`},
		"an event within the line of a child": {`
{ "type": "suite", "event": "started", "test_count": 2 }
connected{ "type": "test", "event": "started", "name": "one" }
sent { "type": "test", "name": "one", "event": "ok", "exec_time": 1 }{ "type": "test", "name": "two", "event": "ok", "exec_time": 2 } and more
{ "type": "suite", "event": "ok", "passed": 2, "failed": 0, "ignored": 0, "measured": 0, "filtered_out": 0, "exec_time": 3 }
`, nil, `
passed crate one 1s/1s
passed crate two 2s/2s
> connected
> sent 
>  and more
`},
		"an event that another line has cut in two": {`
{ "type": "suite", "event": "started", "test_count": 2 }
{ "type": "test", "name": "one", "event": "ok", "exec_time": 1 }
{ "type": "test", "name": "two", "even
t": "ok" }
{ "type": "suite", "event": "ok", "passed": 2, "failed": 0, "ignored": 0, "measured": 0, "filtered_out": 0, "exec_time": 3 }
`, nil, `
passed crate one 1s/1s
passed crate (a line of a test that passed could not be read: 1) reason="its line could not be read"
> { "type": "test", "name": "two", "even
> t": "ok" }
`},
		"the program is killed": {`
{ "type": "suite", "event": "started", "test_count": 2 }
{ "type": "test", "event": "started", "name": "one" }
{ "type": "test", "event": "started", "name": "two" }
{ "type": "test", "name": "two", "event": "ok", "exec_time": 1 }
double free
`, errors.New("signal: aborted"), `
passed crate two 1s/1s
failed crate one output="double free\nthe program ended before the test did: signal: aborted\n"
> double free
`},
		"the program does not start": {"no such library\n", errors.New("exit status 127"), `
failed crate (program) output="no such library\nexit status 127\n"
> no such library
`},
		"nothing, and no error": {"", nil, `
failed crate (program) output="the program ended without a result\n"
`},
		"a suite without an end": {`
{ "type": "suite", "event": "started", "test_count": 2 }
`, nil, `
failed crate (program) output="the program ended without a result\n"
`},
		"lines for people": {`

running 5 tests
test one ... ok
test two ... FAILED
test src/lib.rs - three (line 7) - compile ... ok <0.250s>
test gpu ... ignored, needs a GPU
test verbs ... ignored, runs in the RDMA lab

failures:

---- two stdout ----
panicked at src/a.rs:3:
no

failures:
    two

test result: FAILED. 2 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.31s

running 0 tests

test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s

`, errors.New("exit status 101"), `
passed crate one
passed crate src/lib.rs - three (line 7) - compile 250ms/250ms
skipped crate gpu reason="needs a GPU"
elsewhere crate verbs reason="runs in the RDMA lab"
failed crate two output="panicked at src/a.rs:3:\nno\n\n"
`},
		"lines for people, with those of a child": {`
running 3 tests
test one ... listening
test was not meant
ok
xtest two ... ok
connected test three ... ignored, part of another test
test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.31s
`, nil, `
passed crate one
elsewhere crate three reason="part of another test"
passed crate (a line of a test that passed could not be read: 1) reason="its line could not be read"
> listening
> test was not meant
> xtest two ... ok
`},
		"lines for people, cut": {`
running 3 tests
test one ... ok
test two ... FAILED
test three ... `, errors.New("signal: killed"), `
passed crate one
failed crate two
failed crate three output="the program ended before the test did: signal: killed\n"
`},
	} {
		_, got := read(strings.TrimPrefix(c.text, "\n"), c.end, func(to Receiver) Parser { return NewRust("crate", to) })
		compare(t, name, got, c.want)
	}
}
