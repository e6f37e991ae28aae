package workload

import (
	"os"
	"path/filepath"
	"testing"
)

func TestSettingThatAPluginLacksIsAnError(t *testing.T) {
	library := filepath.Join(t.TempDir(), "library.so")
	if err := os.WriteFile(library, []byte("a library that has the setting EVENKEEL_SCHEDULE"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := known(library, []string{"EVENKEEL_SCHEDULE=static", "NCCL_SOCKET_IFNAME=lo"}); err != nil {
		t.Error(err)
	}
	if known(library, []string{"EVENKEEL_FLOWS=1"}) == nil {
		t.Error("no error for a setting that it lacks")
	}
	if known(library+"-not", nil) == nil {
		t.Error("no error without the library")
	}
}
