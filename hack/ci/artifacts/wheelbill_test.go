package artifacts

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
)

func TestWheelDoesNotNameTheCheckout(t *testing.T) {
	const bill, record, library = "a-1.dist-info/sboms/a.cyclonedx.json", "a-1.dist-info/RECORD", "a/a.so"
	var built [2][]byte
	for i, root := range []string{"/home/one/evenkeel", "/srv/two"} {
		wheel := filepath.Join(t.TempDir(), "a-1.whl")
		text := fmt.Sprintf(`{"bom-ref":"path+file://%s/plugin/a#a@1"}`, root)
		writeZip(t, wheel, [][2]string{{library, "code"}, {bill, text}, {record, library + ",sha256=x,4\n" + bill + ",sha256=old,1\n" + record + ",,\n"}})
		if err := withoutCheckout(wheel, root); err != nil {
			t.Fatal(err)
		}
		var err error
		if built[i], err = os.ReadFile(wheel); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(built[0], built[1]) {
		t.Error("wheels of two checkouts differ")
	}
	files := readZip(t, built[0])
	const want = `{"bom-ref":"path+file:///evenkeel/plugin/a#a@1"}`
	if files[bill] != want {
		t.Errorf("the bill is %s, want %s", files[bill], want)
	}
	sum := sha256.Sum256([]byte(want))
	if want := library + ",sha256=x,4\n" + fmt.Sprintf("%s,sha256=%s,%d\n", bill, base64.RawURLEncoding.EncodeToString(sum[:]), len(want)) + record + ",,\n"; files[record] != want {
		t.Errorf("RECORD is\n%swant\n%s", files[record], want)
	}
	if files[library] != "code" {
		t.Errorf("%s has %q", library, files[library])
	}
}

func writeZip(t *testing.T, path string, files [][2]string) {
	t.Helper()
	var out bytes.Buffer
	writer := zip.NewWriter(&out)
	for _, f := range files {
		w, err := writer.Create(f[0])
		if err == nil {
			_, err = io.WriteString(w, f[1])
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := writer.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, out.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
}

func readZip(t *testing.T, content []byte) map[string]string {
	t.Helper()
	reader, err := zip.NewReader(bytes.NewReader(content), int64(len(content)))
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for _, f := range reader.File {
		in, err := f.Open()
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(in)
		if err != nil {
			t.Fatal(err)
		}
		in.Close()
		files[f.Name] = string(text)
	}
	return files
}
