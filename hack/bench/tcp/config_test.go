package main

import (
	"io"
	"os"
	"path/filepath"
	"testing"

	"evenkeel.dev/evenkeel/hack/bench/internal/options"
)

func TestInvalidFlagsAreRejected(t *testing.T) {
	library := filepath.Join(t.TempDir(), "library.so")
	if err := os.WriteFile(library, []byte("a library that has the setting "+staticSetting), 0o644); err != nil {
		t.Fatal(err)
	}
	flags := func(library, driver string, plugins ...string) config {
		return config{Options: options.Options{Library: library, Driver: driver}, plugins: plugins}
	}
	b, err := newBench(flags(library, "true", "other="+library), io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if len(b.others) != 2 || len(b.notes) != 0 {
		t.Errorf("other contenders than the plugin: %d, notes %q; want its static mode and the other plugin", len(b.others), b.notes)
	}
	for _, plugin := range []string{"", "x", "x=", "=y", "x=" + library + "-not"} {
		if _, err := newBench(flags(library, "true", plugin), io.Discard); err == nil {
			t.Errorf("--plugin %q was accepted", plugin)
		}
	}
	for _, o := range []config{flags(library, "/no/driver"), flags(library+"-not", "true")} {
		if _, err := newBench(o, io.Discard); err == nil {
			t.Errorf("%+v was accepted", o)
		}
	}
	for _, o := range []options.Options{{Rounds: -1}, {Only: "("}} {
		if err := run(t.Context(), io.Discard, config{Options: o}); err == nil {
			t.Errorf("%+v was accepted", o)
		}
	}
}
