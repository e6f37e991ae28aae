package toolbox

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestGlooTakesAnyOpenSSL(t *testing.T) {
	path := filepath.Join(t.TempDir(), "CMakeLists.txt")
	if err := os.WriteFile(path, []byte("if(TLS)\n  find_package(OpenSSL 1.1 REQUIRED EXACT)\nendif()\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := anyOpenSSL(path); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != "if(TLS)\n  find_package(OpenSSL REQUIRED)\nendif()\n" {
		t.Errorf("%q, %v", text, err)
	}
	if err := anyOpenSSL(path); err == nil || !strings.Contains(err.Error(), "OpenSSL 1.1") {
		t.Errorf("sources without the demand: %v", err)
	}
}
