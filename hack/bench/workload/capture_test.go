package workload

import (
	"bytes"
	"crypto/rand"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestCaptureTellsElementsFromRecords(t *testing.T) {
	header := make([]byte, 40)
	header[9] = unix.IPPROTO_TCP
	random := make([]byte, 60_000)
	if _, err := rand.Read(random); err != nil {
		t.Fatal(err)
	}
	ones := bytes.Repeat([]byte{0, 0, 0x80, 0x3f}, 65)
	datagram := make([]byte, 400)
	datagram[9] = unix.IPPROTO_UDP
	for _, test := range []struct {
		name   string
		packet []byte
		want   captured
	}{
		{"equal elements", slices.Concat(header, ones), captured{Clear: 1}},
		{"equal elements at odd places, behind others", slices.Concat(header, random[:7:7], ones, []byte{1}), captured{Clear: 1}},
		{"fewer", slices.Concat(header, ones[:200]), captured{}},
		{"UDP", datagram, captured{}},
		{"nothing", nil, captured{}},
	} {
		var got captured
		got.add(test.packet)
		if got.Clear != test.want.Clear {
			t.Errorf("%s: %+v, want %+v", test.name, got, test.want)
		}
	}
	var got captured
	got.add(slices.Concat(header, recordHeader, []byte{0x40, 0x11}, random))
	if got.Clear != 0 || got.Records != 1 {
		t.Errorf("a record: %+v", got)
	}
}

func TestCaptureShowsWhatIsInClear(t *testing.T) {
	for _, test := range []struct {
		seen     captured
		encrypts bool
		want     string // part of the error; none if it passes
	}{
		{captured{Records: 3}, true, ""},
		{captured{Records: 3, Clear: 1}, true, "1 packets"},
		{captured{}, true, "no record"},
		{captured{Clear: 1}, false, ""},
		{captured{Records: 1}, false, "seen no element"},
	} {
		err := test.seen.check(test.encrypts)
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%+v, encrypts: %t: %v, want %q", test.seen, test.encrypts, err, test.want)
		}
	}
}
