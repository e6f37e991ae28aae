package toolbox

import (
	"bytes"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestDownloadRefusesOtherBytes(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/file" {
			http.NotFound(w, r)
			return
		}
		_, _ = w.Write([]byte("hello\n"))
	}))
	defer server.Close()
	const digest = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"
	path := filepath.Join(t.TempDir(), "file")
	if err := download(t.Context(), server.URL+"/file", digest, path); err != nil {
		t.Error(err)
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != "hello\n" {
		t.Errorf("the file has %q, error %v", text, err)
	}
	for url, want := range map[string]string{"/file": "SHA-256", "/missing": "404"} {
		if err := download(t.Context(), server.URL+url, strings.Repeat("0", 64), path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want one about %s", url, err, want)
		}
	}
}

func TestCachedFolderIsComplete(t *testing.T) {
	cache := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", cache)
	filled := 0
	fill := func(err error) (string, error) {
		return cached(t.Context(), &bytes.Buffer{}, "thing-1", func(work, dir string) error {
			filled++
			return errors.Join(os.WriteFile(filepath.Join(work, "rest"), nil, 0o644), os.WriteFile(filepath.Join(dir, "file"), nil, 0o644), err)
		})
	}
	full := errors.New("the disk is full")
	if _, err := fill(full); !errors.Is(err, full) {
		t.Errorf("error %v, not the cause", err)
	}
	for range 2 {
		if dir, err := fill(nil); err != nil || !exists(filepath.Join(dir, "file")) {
			t.Errorf("%s, %v", dir, err)
		}
	}
	if filled != 2 {
		t.Errorf("filled %d times, not once after the failure", filled)
	}
	entries, err := os.ReadDir(filepath.Join(cache, "evenkeel", "tools"))
	if err != nil || len(entries) != 2 {
		t.Errorf("%v, %v: not the folder and its lock alone", entries, err)
	}
}
