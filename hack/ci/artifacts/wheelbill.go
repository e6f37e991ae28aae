package artifacts

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
)

// wheelBill is the bill of materials that maturin writes into a wheel (PEP 770).
var wheelBill = regexp.MustCompile(`^[^/]+\.dist-info/sboms/[^/]+\.json$`)

// withoutCheckout takes the checkout's folder out of the bill of materials of a wheel. Two
// machines then build the same bytes.
func withoutCheckout(wheel, root string) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("bill of materials in %s: %w", wheel, err)
		}
	}()
	archive, err := zip.OpenReader(wheel)
	if err != nil {
		return err
	}
	defer archive.Close()
	contents := map[string][]byte{}
	record := ""
	for _, f := range archive.File {
		in, err := f.Open()
		if err != nil {
			return err
		}
		content, err := io.ReadAll(in)
		if err := errors.Join(err, in.Close()); err != nil {
			return err
		}
		contents[f.Name] = content
		if strings.HasSuffix(f.Name, ".dist-info/RECORD") {
			record = f.Name
		}
	}
	lines := strings.SplitAfter(string(contents[record]), "\n")
	for name, content := range contents {
		if !wheelBill.MatchString(name) {
			continue
		}
		content = bytes.ReplaceAll(content, []byte("file://"+root+"/"), []byte("file:///evenkeel/"))
		contents[name] = content
		for i, line := range lines {
			if strings.HasPrefix(line, name+",") {
				sum := sha256.Sum256(content)
				lines[i] = fmt.Sprintf("%s,sha256=%s,%d\n", name, base64.RawURLEncoding.EncodeToString(sum[:]), len(content))
			}
		}
	}
	contents[record] = []byte(strings.Join(lines, ""))
	var out bytes.Buffer
	writer := zip.NewWriter(&out)
	for _, f := range archive.File {
		if f.Name != record && !wheelBill.MatchString(f.Name) {
			if err := writer.Copy(f); err != nil {
				return err
			}
			continue
		}
		file, err := writer.CreateHeader(&zip.FileHeader{Name: f.Name, Method: f.Method, Modified: f.Modified, ExternalAttrs: f.ExternalAttrs, CreatorVersion: f.CreatorVersion})
		if err != nil {
			return err
		}
		if _, err := file.Write(contents[f.Name]); err != nil {
			return err
		}
	}
	if err := writer.Close(); err != nil {
		return err
	}
	return os.WriteFile(wheel, out.Bytes(), 0o644)
}
