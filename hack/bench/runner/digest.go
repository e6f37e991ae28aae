package runner

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
)

// digestLength is the number of hexadecimal digits that tell one build from another.
const digestLength = 12

// Digest is the beginning of a file's SHA-256, which tells a build from others. It is empty without a path.
func Digest(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	content, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("what is measured: %w", err)
	}
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:])[:digestLength], nil
}
