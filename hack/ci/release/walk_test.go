//go:build release

package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"flag"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"evenkeel.dev/evenkeel/hack/cluster/local"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

var (
	platforms = flag.String("platforms", "linux/amd64,linux/arm64", "platforms of the release")
	desktops  = flag.String("desktops", strings.Join(newRelease().desktops, ","), "platforms of kubectl's plugin")
	ncclTests = flag.String("nccl-tests", withoutTests, "folder with the source of nccl-tests; the page's commands do not need their image")
)

// The release of the checkout is built, signed and published to the registry of a local cluster. Then a new user follows
// docs/install.md with it: the commands of the page's blocks in "sh" are run as they are, in the order in which they stand there.
func TestReleaseIsInstalledAsThePageSays(t *testing.T) {
	ctx := t.Context()
	r := checkout(t)
	r.platforms, r.desktops = strings.Split(*platforms, ","), strings.Split(*desktops, ",")
	r.ncclTests = *ncclTests
	r.registry, r.dirty, r.progress = local.Registry+"/evenkeel", true, os.Stderr
	if err := r.open(ctx); err != nil {
		t.Fatal(err)
	}
	// Not where a release for users is.
	r.folder = filepath.Join(r.root, "dist", "release-of-the-test")
	if err := r.build(ctx); err != nil {
		t.Fatal(err)
	}
	home := t.TempDir()
	t.Setenv("XDG_CONFIG_HOME", filepath.Join(home, ".config")) // the signing key
	by, err := signing{}.signer(ctx, r.progress)
	if err != nil {
		t.Fatal(err)
	}
	if err := by.sign(ctx, filepath.Join(r.folder, sumsFile)); err != nil {
		t.Fatal(err)
	}

	const name = "release"
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := local.Down(ctx, name); err != nil {
			t.Error(err)
		}
	})
	cluster, err := local.Up(ctx, local.Config{Name: name, Nodes: 2, Progress: os.Stderr})
	if err != nil {
		t.Fatal(err)
	}
	box, err := toolbox.New(os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	bin := filepath.Join(home, ".local", "bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, tool := range []string{"kubectl", "helm", "cosign"} {
		path, err := box.Path(ctx, tool)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(path, filepath.Join(bin, tool)); err != nil {
			t.Fatal(err)
		}
	}
	proxy, certificate := withTLS(t, cluster)
	t.Setenv("HTTPS_PROXY", proxy)
	t.Setenv("SSL_CERT_FILE", certificate)
	p := publication{helm: filepath.Join(bin, "helm"), signer: by, progress: os.Stderr}
	if err := p.publish(ctx, r.folder); err != nil {
		t.Fatal(err)
	}
	for _, i := range r.built {
		if err := pageVerifies(ctx, by.cosign, r.folder, r.registry+"/"+i.name+"@"+i.digest); err != nil {
			t.Errorf("%s: %v", i.name, err)
		}
	}

	installsByKrew(t, box, r)

	page, err := os.ReadFile(filepath.Join(r.root, "docs", "install.md"))
	if err != nil {
		t.Fatal(err)
	}
	script := walk(t, string(page), map[string]string{"VERSION": r.version, "REGISTRY": r.registry})
	cmd := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-x", "-c", script)
	cmd.Dir = r.folder // where the user's downloads are
	cmd.Env = append(os.Environ(), "HOME="+home, "PATH="+bin+":"+os.Getenv("PATH"), "KUBECONFIG="+cluster.Kubeconfig())
	var out bytes.Buffer
	both := io.MultiWriter(&out, os.Stderr)
	cmd.Stdout, cmd.Stderr = both, both
	if err := cmd.Run(); err != nil {
		t.Fatalf("the commands of the page: %v", err)
	}
	for _, want := range []string{"Verified OK", "# Network: Evenkeel carried", "Pass", `release "evenkeel" uninstalled`} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in the output", want)
		}
	}
}

// installsByKrew has krew install kubectl's plugin from the release's manifest and archive, and runs it.
func installsByKrew(t *testing.T, box *toolbox.Toolbox, r *release) {
	t.Helper()
	krew, err := box.Path(t.Context(), "krew")
	if err != nil {
		t.Fatal(err)
	}
	home := t.TempDir()
	archive := fmt.Sprintf("%s_%s_linux_%s.tar.gz", pluginProgram, r.version, runtime.GOARCH)
	cmd := exec.CommandContext(t.Context(), krew, "install", "--manifest="+filepath.Join(r.folder, "evenkeel.yaml"), "--archive="+filepath.Join(r.folder, archive))
	cmd.Env = append(os.Environ(), "KREW_ROOT="+home, "KREW_NO_UPGRADE_CHECK=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("krew install: %v\n%s", err, out)
	}
	if out, err := exec.CommandContext(t.Context(), filepath.Join(home, "bin", pluginProgram), "--help").CombinedOutput(); err != nil || !strings.Contains(string(out), "doctor") {
		t.Errorf("the plugin that krew installed: %v\n%s", err, out)
	}
}

// walk is the text of a page's blocks in "sh". Variables that the page exports have the values of the test, and all of those are set.
func walk(t *testing.T, page string, values map[string]string) string {
	t.Helper()
	var script strings.Builder
	for _, block := range regexp.MustCompile("(?ms)^```sh\n(.*?)^```$").FindAllStringSubmatch(page, -1) {
		script.WriteString(block[1])
	}
	text := script.String()
	for name, value := range values {
		export := regexp.MustCompile(`(?m)^export ` + name + `=\S+`)
		if len(export.FindAllString(text, -1)) != 1 {
			t.Fatalf("the page does not export %s once:\n%s", name, text)
		}
		text = export.ReplaceAllString(text, "export "+name+"="+value)
	}
	return text
}

// withTLS is a proxy behind which the cluster's registry has TLS, as the page takes for granted: the proxy's address, and a file with
// the certificate to trust.
func withTLS(t *testing.T, cluster *local.Cluster) (proxy, certificate string) {
	t.Helper()
	dial, end, err := cluster.DialRegistry()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(end)
	pair, pemText := selfSigned(t, local.ControlPlaneIP)
	certificate = filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(certificate, pemText, 0o600); err != nil {
		t.Fatal(err)
	}
	forward := &httputil.ReverseProxy{
		Transport: &http.Transport{DialContext: dial},
		// The registry sends clients on to the address and the scheme that they have used.
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(&url.URL{Scheme: "http", Host: local.Registry})
			r.Out.Host = local.Registry
			r.Out.Header.Set("X-Forwarded-Proto", "https")
		},
	}
	tunnels := make(chan net.Conn)
	tunnel := &tunnelListener{tunnels, make(chan struct{})}
	registry := &http.Server{Handler: forward, ReadHeaderTimeout: time.Minute}
	go registry.Serve(tls.NewListener(tunnel, &tls.Config{Certificates: []tls.Certificate{pair}})) //nolint:errcheck // ends with the test
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	connect := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		if request.Method != http.MethodConnect || request.Host != local.Registry {
			http.Error(w, "only the registry is reached here, not "+request.Host, http.StatusForbidden)
			return
		}
		conn, buffered, err := w.(http.Hijacker).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		if _, err := fmt.Fprint(conn, "HTTP/1.1 200 Connection established\r\n\r\n"); err != nil {
			conn.Close()
			return
		}
		select {
		case tunnels <- &bufferedConn{conn, buffered.Reader}:
		case <-tunnel.done:
			conn.Close()
		}
	})}
	go connect.Serve(listener) //nolint:errcheck // ends with the test
	t.Cleanup(func() {
		connect.Close()
		registry.Close()
	})
	return "http://" + listener.Addr().String(), certificate
}

// A tunnelListener accepts connections that arrived through a proxy.
type tunnelListener struct {
	conns chan net.Conn
	done  chan struct{}
}

func (l *tunnelListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *tunnelListener) Close() error {
	close(l.done)
	return nil
}

func (l *tunnelListener) Addr() net.Addr { return &net.TCPAddr{} }

// A bufferedConn is a connection of which a reader has read ahead.
type bufferedConn struct {
	net.Conn
	reader *bufio.Reader
}

func (c *bufferedConn) Read(p []byte) (int, error) { return c.reader.Read(p) }

// selfSigned makes a certificate for an IP address, which clients may trust as it is.
func selfSigned(t *testing.T, address string) (tls.Certificate, []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IPAddresses: []net.IP{net.ParseIP(address)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}
