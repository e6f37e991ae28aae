package toolbox

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"
)

const (
	// glooVersion is the newest of Gloo's sources in Debian, that of testing. Debian builds it without TLS. When testing
	// has a later one, this one leaves Debian's mirrors: then take that.
	glooVersion = "0.0~git20250912.d97133a"
	glooArchive = "pool/main/g/gloo/gloo_" + glooVersion + ".orig.tar.xz"
	glooSHA256  = "43d930375720059ac67b1619c7d020d5d2cee79757caf4e75a1bfedb8eeb2b42"
	glooTimeout = 30 * time.Minute
)

// GlooWithTLS returns a folder with Gloo's headers (include) and its static library (lib/libgloo.a), whose transport
// over TLS uses this machine's OpenSSL. It is in the cache; the first time it is built from Debian's sources.
func GlooWithTLS(ctx context.Context, progress io.Writer) (dir, version string, err error) {
	needed := []Program{{"cmake", "cmake"}, {"make", "make"}, {"g++", "g++"}, {"/usr/include/openssl/ssl.h", "libssl-dev"}}
	if err := EnsurePrograms(ctx, progress, needed); err != nil {
		return "", "", err
	}
	dir, err = cached(ctx, progress, "gloo-tls-"+glooVersion, func(work, dir string) error {
		fmt.Fprintf(progress, "building Gloo %s with TLS (a few minutes the first time)\n", glooVersion)
		ctx, cancel := context.WithTimeout(ctx, glooTimeout)
		defer cancel()
		source := filepath.Join(work, "source")
		if err := os.Mkdir(source, 0o755); err != nil {
			return err
		}
		if err := unpackSource(ctx, glooArchive, glooSHA256, work, source); err != nil {
			return err
		}
		if err := anyOpenSSL(filepath.Join(source, "gloo", "CMakeLists.txt")); err != nil {
			return err
		}
		build := filepath.Join(work, "build")
		for _, args := range [][]string{
			{"-S", source, "-B", build, "-DUSE_TCP_OPENSSL_LINK=ON", "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_INSTALL_PREFIX=" + dir},
			{"--build", build, "--target", "gloo", "--parallel", strconv.Itoa(runtime.NumCPU())},
			{"--install", build},
		} {
			if _, err := programOutput(ctx, work, "cmake", args...); err != nil {
				return fmt.Errorf("build Gloo %s: %w", glooVersion, err)
			}
		}
		return nil
	})
	return dir, glooVersion, err
}

// anyOpenSSL lets Gloo's build take every version of OpenSSL. It asks for 1.1, which is at its end, and needs no more
// than 3 has too.
func anyOpenSSL(path string) error {
	const demand, instead = "find_package(OpenSSL 1.1 REQUIRED EXACT)", "find_package(OpenSSL REQUIRED)"
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if !strings.Contains(string(text), demand) {
		return fmt.Errorf("%s has no %q", path, demand)
	}
	return os.WriteFile(path, []byte(strings.Replace(string(text), demand, instead, 1)), 0o644)
}
