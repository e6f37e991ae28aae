package text

import "testing"

func TestClip(t *testing.T) {
	for s, want := range map[string]string{"": "", "12345": "12345", "123456": "12...", "1äöü": "1..."} {
		if got := Clip(s, 5); got != want {
			t.Errorf("%q: %q, want %q", s, got, want)
		}
	}
}

func TestList(t *testing.T) {
	names := []string{"gpu-1", "gpu-2", "gpu-3"}
	for limit, want := range map[int]string{100: "gpu-1, gpu-2, gpu-3", 25: "gpu-1, gpu-2 and 1 more", 20: "gpu-1 and 2 more", 4: "g..."} {
		if got := List(names, limit); got != want || len(got) > limit {
			t.Errorf("%d: %q, want %q", limit, got, want)
		}
	}
	if got := List(nil, 10); got != "" {
		t.Errorf("no names: %q", got)
	}
}
