package flightrecord

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const now = int64(1_800_000_000_000_000_000)

// world has the ranks 0 to size-1 in one group.
func world(size int) []*Record {
	ranks := make([]int, size)
	for i := range ranks {
		ranks[i] = i
	}
	records := make([]*Record, size)
	for i := range records {
		records[i] = &Record{Version: Version, Rank: i, TimeNS: now, Groups: []Group{{ID: "a", Name: "default_pg", Rank: i, Ranks: ranks}}}
	}
	return records
}

// did adds a call that has completed, and in one that the rank has been in for so long.
func (r *Record) did(operation string, number int64) *Call {
	r.Calls = append(r.Calls, Call{Group: "a", Kind: collective, Number: number, Operation: operation, Type: "float32", InputBytes: 24, OutputBytes: 24,
		State: completed, CreatedNS: now - int64(time.Hour), StartedNS: now - int64(time.Hour), EndedNS: now - int64(time.Minute)})
	return &r.Calls[len(r.Calls)-1]
}

func (r *Record) in(operation string, number int64, since time.Duration) *Call {
	c := r.did(operation, number)
	c.State, c.CreatedNS, c.StartedNS, c.EndedNS = started, now-int64(since), now-int64(since), 0
	return c
}

// allIn has all ranks in the call for half a minute, but for the others.
func allIn(records []*Record, operation string, number int64, others ...int) {
	for _, r := range records {
		if !slices.Contains(others, r.Rank) {
			r.in(operation, number, 30*time.Second)
		}
	}
}

func one() *int { n := 1; return &n }

func TestExplain(t *testing.T) {
	for name, test := range map[string]struct {
		size    int
		change  func([]*Record) []*Record
		want    []string
		missing []int
	}{
		"all calls have completed": {size: 3, change: func(r []*Record) []*Record {
			for _, r := range r {
				r.did("all_reduce", 4)
			}
			return r
		}},
		"a call in progress does not hang": {size: 3, change: func(r []*Record) []*Record {
			r[0].in("all_reduce", 5, time.Second)
			r[1].did("all_reduce", 9)
			r[2].did("all_reduce", 4)
			return r
		}},
		"no records": {},
		"a rank never called it": {size: 8, change: func(r []*Record) []*Record {
			allIn(r, "all_reduce", 813, 5)
			r[5].did("all_gather", 812)
			return r
		}, want: []string{"group default_pg: rank 5 never called all_reduce #813, in which the other 7 ranks wait for 30s; the last call of rank 5 was all_gather #812"}},
		"a rank is in an earlier call": {size: 8, change: func(r []*Record) []*Record {
			allIn(r, "all_reduce", 813, 5)
			r[5].in("all_gather", 812, time.Minute)
			return r
		}, want: []string{"group default_pg: rank 5 is at all_gather #812, the other 7 ranks at all_reduce #813: rank 5 never called it"}},
		"a rank never called what has ended on others": {size: 3, change: func(r []*Record) []*Record {
			r[0].did("broadcast", 5)
			r[1].did("broadcast", 5)
			allIn(r, "all_reduce", 6, 2)
			r[2].did("all_reduce", 4)
			return r
		}, want: []string{"group default_pg: rank 2 never called broadcast #5, and ranks 0-1 are at all_reduce #6; the last call of rank 2 was all_reduce #4"}},
		"a rank is in a call of another group": {size: 4, change: func(r []*Record) []*Record {
			allIn(r, "all_reduce", 7, 3)
			r[3].did("all_reduce", 6)
			for i, rank := range []int{1, 3} {
				r[rank].Groups = append(r[rank].Groups, Group{ID: "b", Name: "pair", Rank: i, Ranks: []int{1, 3}})
			}
			r[3].in("barrier", 2, 30*time.Second).Group = "b"
			r[1].did("barrier", 1).Group = "b"
			return r
		}, want: []string{
			"group default_pg: rank 3 never called all_reduce #7, in which the other 3 ranks wait for 30s; rank 3 is in barrier #2 of group pair",
			"group pair: rank 1 never called barrier #2, in which rank 3 waits for 30s; rank 1 is in all_reduce #7 of group default_pg",
		}},
		"the call that no other one explains is first": {size: 4, change: func(r []*Record) []*Record {
			for _, rank := range []int{0, 1, 3} {
				r[rank].Groups[0].Rank, r[rank].Groups[0].Ranks = min(rank, 2), []int{0, 1, 3}
			}
			r[3].Groups = append(r[3].Groups, Group{ID: "b", Name: "pair", Rank: 1, Ranks: []int{2, 3}})
			r[2].Groups = []Group{{ID: "b", Name: "pair", Ranks: []int{2, 3}}}
			allIn(r, "all_reduce", 7, 2, 3)
			r[3].did("all_reduce", 6)
			r[3].in("barrier", 2, 30*time.Second).Group = "b"
			r[2].did("barrier", 1).Group = "b"
			// The newest record is of a rank that shares a group with all others.
			r[3].TimeNS++
			return r
		}, want: []string{
			"group pair: rank 2 never called barrier #2, in which rank 3 waits for 30s; the last call of rank 2 was barrier #1",
			"group default_pg: rank 3 never called all_reduce #7, in which ranks 0-1 wait for 30s; rank 3 is in barrier #2 of group pair",
		}},
		"ranks that are ahead in different calls": {size: 4, change: func(r []*Record) []*Record {
			r[0].in("all_gather", 4, time.Minute)
			r[1].in("all_reduce", 6, time.Minute)
			r[2].in("broadcast", 5, time.Minute)
			r[3].did("broadcast", 5)
			return r
		}, want: []string{"group default_pg: rank 0 is at all_gather #4, rank 2 at broadcast #5: rank 0 never called it"}},
		"ranks call different operations": {size: 8, change: func(r []*Record) []*Record {
			allIn(r, "all_reduce", 812, 5)
			r[5].in("all_gather", 812, time.Minute)
			return r
		}, want: []string{"group default_pg: the ranks disagree about call #812: rank 5 calls all_gather, the other 7 ranks call all_reduce"}},
		"ranks pass different types": {size: 2, change: func(r []*Record) []*Record {
			allIn(r, "all_reduce", 3)
			r[1].Calls[0].Type = "float64"
			return r
		}, want: []string{"group default_pg: the ranks disagree about all_reduce #3: rank 0 passes float32, rank 1 passes float64"}},
		"ranks pass different sizes": {size: 4, change: func(r []*Record) []*Record {
			allIn(r, "all_reduce", 3)
			r[2].Calls[0].InputBytes, r[2].Calls[0].OutputBytes = 28, 28
			return r
		}, want: []string{"group default_pg: the ranks disagree about all_reduce #3: rank 2 passes 28 bytes, the other 3 ranks pass 24 bytes"}},
		"a call that waits its turn has no size yet": {size: 2, change: func(r []*Record) []*Record {
			allIn(r, "all_reduce", 3)
			c := &r[1].Calls[0]
			c.State, c.StartedNS, c.InputBytes, c.OutputBytes = scheduled, 0, 0, 0
			return r
		}, want: []string{"group default_pg: all 2 ranks are in all_reduce #3 for 30s, and agree about it: data that one of them waits for does not come"}},
		"a call that failed before its turn has no size": {size: 2, change: func(r []*Record) []*Record {
			allIn(r, "all_reduce", 3)
			c := &r[1].Calls[0]
			c.State, c.StartedNS, c.EndedNS, c.InputBytes, c.OutputBytes, c.Failure = failed, 0, now, 0, 0, "all_reduce: timeout"
			return r
		}, want: []string{"group default_pg: all 2 ranks are in all_reduce #3 for 30s, and agree about it: data that one of them waits for does not come; rank 1 failed first: all_reduce: timeout"}},
		"parts of a gather may differ": {size: 2, change: func(r []*Record) []*Record {
			allIn(r, "all_gather_v", 3)
			r[1].Calls[0].InputBytes = 4
			return r
		}, want: []string{"group default_pg: all 2 ranks are in all_gather_v #3 for 30s, and agree about it: data that one of them waits for does not come"}},
		"a disagreement and a rank that calls nothing": {size: 4, change: func(r []*Record) []*Record {
			allIn(r, "all_reduce", 4, 2, 3)
			r[2].in("broadcast", 4, time.Minute)
			r[3].did("all_reduce", 3)
			return r
		}, want: []string{"group default_pg: the ranks disagree about call #4: rank 2 calls broadcast, ranks 0-1 call all_reduce; rank 3 never called it"}},
		"all are in it": {size: 4, change: func(r []*Record) []*Record {
			allIn(r, "all_reduce", 3)
			r[0].Groups[0].WaitsFor, r[1].Groups[0].WaitsFor = []int{3}, []int{2, 3}
			return r
		}, want: []string{"group default_pg: all 4 ranks are in all_reduce #3 for 30s, and agree about it: data that one of them waits for does not come; data is awaited from ranks 2-3"}},
		"a rank has no record": {size: 4, change: func(r []*Record) []*Record {
			allIn(r, "all_reduce", 3)
			return slices.Delete(r, 1, 2)
		}, want: []string{"group default_pg: ranks 0, 2-3 are in all_reduce #3 for 30s, and rank 1 has no record of it"}, missing: []int{1}},
		"a call failed": {size: 3, change: func(r []*Record) []*Record {
			for rank, end := range map[int]int64{0: 5, 1: 4} {
				c := r[rank].in("all_reduce", 3, time.Second)
				c.State, c.EndedNS, c.Failure = failed, now-end, "all_reduce: rank 2 (gpu-7, process 4711) is lost"
			}
			r[2].did("all_reduce", 2)
			return r
		}, want: []string{"group default_pg: rank 2 never called all_reduce #3, in which ranks 0-1 wait for 1s; the last call of rank 2 was all_reduce #2; rank 0 failed first: all_reduce: rank 2 (gpu-7, process 4711) is lost"}},
		"a failure before calls that completed": {size: 2, change: func(r []*Record) []*Record {
			r[0].in("all_reduce", 3, time.Minute).State = failed
			r[0].did("all_reduce", 4)
			r[1].did("all_reduce", 4)
			return r
		}},
		"calls that wait their turn": {size: 3, change: func(r []*Record) []*Record {
			allIn(r, "all_reduce", 4, 2)
			for number := int64(5); number < 8; number++ {
				r[0].in("all_reduce", number, time.Minute).State = scheduled
			}
			r[2].did("all_reduce", 3)
			return r
		}, want: []string{"group default_pg: rank 2 never called all_reduce #4, in which ranks 0-1 wait for 30s; the last call of rank 2 was all_reduce #3"}},
		"a tag has an order of its own": {size: 2, change: func(r []*Record) []*Record {
			r[0].did("all_reduce", 9)
			r[1].did("all_reduce", 9)
			r[0].in("barrier", 1, time.Minute).Tag = 3
			r[1].did("barrier", 0).Tag = 3
			return r
		}, want: []string{"group default_pg, tag 3: rank 1 never called barrier #1, in which rank 0 waits for 1m0s; the last call of rank 1 was barrier #0"}},
		"a message was not sent": {size: 2, change: func(r []*Record) []*Record {
			c := r[0].in("recv", 4, time.Minute)
			c.Kind, c.Peer = receive, one()
			r[1].did("all_reduce", 2)
			return r
		}, want: []string{"group default_pg: rank 0 waits in receive of message #4 from rank 1 to rank 0, which rank 1 has not sent"}},
		"a message was sent and has not come": {size: 2, change: func(r []*Record) []*Record {
			c := r[0].in("recv", 4, time.Minute)
			c.Kind, c.Peer = receive, one()
			to := 0
			c = r[1].did("send", 4)
			c.Kind, c.Peer = send, &to
			return r
		}, want: []string{"group default_pg: rank 0 waits in receive of message #4 from rank 1 to rank 0; rank 1 has called it"}},
		"a message from a rank without a record": {size: 2, change: func(r []*Record) []*Record {
			c := r[0].in("recv", 4, time.Minute)
			c.Kind, c.Peer = receive, one()
			return r[:1]
		}, want: []string{"group default_pg: rank 0 waits in receive of message #4 from rank 1 to rank 0; rank 1 has no record"}, missing: []int{1}},
		"a failure that follows from another": {size: 3, change: func(r []*Record) []*Record {
			for rank := range 2 {
				c := r[rank].in("all_reduce", 3, 30*time.Second)
				c.State, c.EndedNS, c.Failure = failed, now, "all_reduce: timeout"
			}
			r[2].did("all_reduce", 2)
			after := world(3)[2]
			after.TimeNS += int64(10 * time.Second)
			c := after.in("all_reduce", 3, 0)
			c.State, c.EndedNS, c.Failure = failed, after.TimeNS, "all_reduce: rank 0 is lost"
			return append(r, after)
		}, want: []string{"group default_pg: rank 2 never called all_reduce #3, in which ranks 0-1 wait for 30s; the last call of rank 2 was all_reduce #2; rank 0 failed first: all_reduce: timeout"}},
		"a record of a process that was replaced": {size: 3, change: func(r []*Record) []*Record {
			allIn(r, "all_reduce", 3)
			old := world(4)[3]
			old.Groups[0].ID, old.TimeNS = "before", now-int64(time.Hour)
			older := *r[0]
			older.TimeNS, older.Calls = now-int64(2*time.Minute), nil
			return append(r, old, &older)
		}, want: []string{"group default_pg: all 3 ranks are in all_reduce #3 for 30s, and agree about it: data that one of them waits for does not come"}},
	} {
		t.Run(name, func(t *testing.T) {
			records := world(test.size)
			if test.change != nil {
				records = test.change(records)
			}
			// As they come from the ranks.
			for i, r := range records {
				var err error
				if records[i], err = Parse(encode(t, r)); err != nil {
					t.Fatal(err)
				}
			}
			lines, missing := Explain(records)
			if !slices.Equal(lines, test.want) || !slices.Equal(missing, test.missing) {
				t.Errorf("says\n%s\nwant\n%s\nmissing %v, want %v", strings.Join(lines, "\n"), strings.Join(test.want, "\n"), missing, test.missing)
			}
		})
	}
}

func TestExplainBoundsWhatItSays(t *testing.T) {
	records := world(2)
	for tag := uint32(1); tag <= 50; tag++ {
		records[0].in("all_reduce", 1, time.Minute).Tag = tag
		records[1].did("all_reduce", 0).Tag = tag
	}
	lines, _ := Explain(records)
	if len(lines) != maxFindings+1 || lines[maxFindings] != "and 42 more calls hang" {
		t.Errorf("%d lines, the last of which is %q", len(lines), lines[len(lines)-1])
	}
}

func encode(t testing.TB, r *Record) []byte {
	t.Helper()
	data, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestParseRefuses(t *testing.T) {
	valid := func(change func(*Record)) []byte {
		r := world(2)[1]
		r.in("all_reduce", 3, time.Minute)
		change(r)
		return encode(t, r)
	}
	whole := valid(func(*Record) {})
	if _, err := Parse(whole); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		data []byte
		want string
	}{
		"nothing":                 {nil, "no JSON of a flight record"},
		"a part":                  {whole[:len(whole)/2], "no JSON of a flight record"},
		"another JSON":            {[]byte(`[1, 2]`), "no JSON of a flight record"},
		"two of them":             {append(slices.Clone(whole), whole...), "more follows"},
		"pickle":                  {[]byte("\x80\x04\x95\x00"), "no JSON of a flight record"},
		"another version":         {valid(func(r *Record) { r.Version = 2 }), "version is 2: this program reads 1"},
		"too long":                {make([]byte, MaxRecord+1), "the most is 4194304"},
		"a negative rank":         {valid(func(r *Record) { r.Rank = -1 }), "rank is -1"},
		"a time before 1970":      {valid(func(r *Record) { r.TimeNS = -1 }), "time_ns is -1"},
		"a rank of another":       {valid(func(r *Record) { r.Groups[0].Rank = 0 }), "group 0: rank 0 of 2 is not rank 1 of the job"},
		"a rank outside":          {valid(func(r *Record) { r.Groups[0].Rank = 7 }), "group 0: rank 7 of 2"},
		"a member twice":          {valid(func(r *Record) { r.Groups[0].Ranks = []int{1, 1}; r.Groups[0].Rank = 0 }), "group 0: rank 1 of the job: each once"},
		"a member of no job":      {valid(func(r *Record) { r.Groups[0].Ranks = []int{MaxRanks, 1} }), "group 0: rank 131072 of the job"},
		"a group twice":           {valid(func(r *Record) { r.Groups = append(r.Groups, r.Groups[0]) }), "group 1: the id of another one"},
		"waits for no member":     {valid(func(r *Record) { r.Groups[0].WaitsFor = []int{2} }), "group 0: it waits for rank 2 of 2"},
		"a call of no group":      {valid(func(r *Record) { r.Calls[0].Group = "x" }), "call 0: its group is not listed"},
		"an unknown kind":         {valid(func(r *Record) { r.Calls[0].Kind = "\x1b[2J" }), `call 0: kind is "[2J"`},
		"an unknown state":        {valid(func(r *Record) { r.Calls[0].State = "" }), `call 0: state is ""`},
		"a negative number":       {valid(func(r *Record) { r.Calls[0].Number = -1 }), "call 0: a number is below 0"},
		"a peer outside":          {valid(func(r *Record) { n := 2; r.Calls[0].Peer = &n }), "call 0: peer is 2 of 2 ranks"},
		"a message to nobody":     {valid(func(r *Record) { r.Calls[0].Kind = send }), "call 0: it is sent to no rank"},
		"too many calls":          {valid(func(r *Record) { r.Calls = make([]Call, maxCalls+1) }), "16385 calls: at most"},
		"a number that is a text": {[]byte(`{"version": "1"}`), "no JSON of a flight record"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Parse(test.data)
			if err == nil || !strings.Contains(err.Error(), test.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("error %v, want %q in one line", err, test.want)
			}
		})
	}
}

// TestParseReadsWhatThePackageWrites: the Python package's tests compare what it writes with this file.
func TestParseReadsWhatThePackageWrites(t *testing.T) {
	data, err := os.ReadFile(filepath.Join("testdata", "record.json"))
	if err != nil {
		t.Fatal(err)
	}
	r, err := Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	lines, missing := Explain([]*Record{r})
	want := []string{"group default_pg: rank 2 waits in receive of message #1 from rank 4 to rank 2, which failed: recv: rank 4 is lost; rank 4 has no record"}
	if !slices.Equal(lines, want) || !slices.Equal(missing, []int{4}) {
		t.Errorf("says\n%s\nmissing %v", strings.Join(lines, "\n"), missing)
	}
	// What is read under another name would be read as nothing.
	var written, read map[string]any
	if err := errors.Join(json.Unmarshal(data, &written), json.Unmarshal(encode(t, r), &read)); err != nil {
		t.Fatal(err)
	}
	delete(written, "process") // for people who read the file
	if diff := cmp.Diff(written, read); diff != "" {
		t.Error(diff)
	}
}

func TestParseMakesTextsPrintable(t *testing.T) {
	r := world(1)[0]
	r.Groups[0].Name = "a\x1b[31m\nb"
	r.in(strings.Repeat("x", 1000), 1, time.Minute).Failure = "lost\r\nrank 3: all is well\u202e"
	parsed, err := Parse(encode(t, r))
	if err != nil {
		t.Fatal(err)
	}
	if got := parsed.Groups[0].Name; got != "a [31m b" {
		t.Errorf("name %q", got)
	}
	if got := parsed.Calls[0]; len(got.Operation) != maxName || got.Failure != "lost rank 3: all is well" {
		t.Errorf("operation of %d bytes, failure %q", len(got.Operation), got.Failure)
	}
}

// FuzzExplain: whatever the ranks send, what is said of it is a bounded number of lines without control characters.
func FuzzExplain(f *testing.F) {
	records := world(3)
	allIn(records, "all_reduce", 3, 2)
	records[2].did("all_gather", 2)
	records[0].in("recv", 4, time.Minute).Kind = receive
	for _, r := range records {
		f.Add(encode(f, r), encode(f, records[0]))
	}
	f.Fuzz(func(t *testing.T, a, b []byte) {
		var records []*Record
		for _, data := range [][]byte{a, b} {
			if r, err := Parse(data); err == nil {
				records = append(records, r)
			}
		}
		lines, _ := Explain(records)
		if len(lines) > maxFindings+1 {
			t.Errorf("%d lines", len(lines))
		}
		for _, line := range lines {
			if clean(line, len(line)+3) != line {
				t.Errorf("%q is not one printable line", line)
			}
		}
	})
}
