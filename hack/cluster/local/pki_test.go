package local

import (
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

func parseCertificate(t *testing.T, text []byte) *x509.Certificate {
	t.Helper()
	block, _ := pem.Decode(text)
	if block == nil {
		t.Fatalf("no PEM in %q", text)
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

func TestCertificateUses(t *testing.T) {
	ca, err := newAuthority("test")
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(ca.certificate)
	server, err := ca.server("api", "localhost", "127.0.0.1", ControlPlaneIP)
	if err != nil {
		t.Fatal(err)
	}
	cert := parseCertificate(t, server.cert)
	for _, host := range []string{"localhost", "127.0.0.1", ControlPlaneIP} {
		if _, err := cert.Verify(x509.VerifyOptions{Roots: roots, DNSName: host, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}); err != nil {
			t.Errorf("%s: %v", host, err)
		}
	}
	if _, err := cert.Verify(x509.VerifyOptions{Roots: roots, DNSName: "elsewhere"}); err == nil {
		t.Error("the server's certificate is good for another name")
	}
	client, err := ca.client("system:node:n1", "system:nodes")
	if err != nil {
		t.Fatal(err)
	}
	cert = parseCertificate(t, client.cert)
	if cert.Subject.CommonName != "system:node:n1" || !slices.Equal(cert.Subject.Organization, []string{"system:nodes"}) {
		t.Errorf("subject is %v", cert.Subject)
	}
	if _, err := cert.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}); err == nil {
		t.Error("a client's certificate is good for a server")
	}
	other, err := newAuthority("test")
	if err != nil {
		t.Fatal(err)
	}
	roots = x509.NewCertPool()
	roots.AddCert(other.certificate)
	if _, err := cert.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err == nil {
		t.Error("another cluster trusts the certificate")
	}
}

func TestTokenKeysMatch(t *testing.T) {
	private, public, err := newTokenKey()
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(private)
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	block, _ = pem.Decode(public)
	published, err := x509.ParsePKIXPublicKey(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	if !key.(*ecdsa.PrivateKey).PublicKey.Equal(published) {
		t.Error("the public key is another key's")
	}
}

func TestKubeconfigFields(t *testing.T) {
	text := kubeconfig("x", "https://127.0.0.1:1234", []byte("CA"), keyPair{cert: []byte("CERT"), key: []byte("KEY")})
	var parsed struct {
		Clusters []struct {
			Cluster struct {
				Server string
				CA     string `json:"certificate-authority-data"`
			}
		}
		Users []struct {
			User struct {
				Cert string `json:"client-certificate-data"`
				Key  string `json:"client-key-data"`
			}
		}
		CurrentContext string `json:"current-context"`
	}
	if err := yaml.Unmarshal(text, &parsed); err != nil {
		t.Fatal(err)
	}
	b64 := base64.StdEncoding.EncodeToString
	if len(parsed.Clusters) != 1 || len(parsed.Users) != 1 ||
		parsed.Clusters[0].Cluster.Server != "https://127.0.0.1:1234" || parsed.Clusters[0].Cluster.CA != b64([]byte("CA")) ||
		parsed.Users[0].User.Cert != b64([]byte("CERT")) || parsed.Users[0].User.Key != b64([]byte("KEY")) ||
		parsed.CurrentContext != "evk-x" {
		t.Errorf("kubeconfig is %+v", parsed)
	}
}

// The API client with the cluster's certificates.
func TestAPIClientUsesMutualTLS(t *testing.T) {
	ca, err := newAuthority("test")
	if err != nil {
		t.Fatal(err)
	}
	serving, err := ca.server("api", "127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(serving.cert, serving.key)
	if err != nil {
		t.Fatal(err)
	}
	clients := x509.NewCertPool()
	clients.AddCert(ca.certificate)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if user := r.TLS.PeerCertificates[0].Subject.CommonName; r.URL.Path != "/readyz" || user != "admin" {
			http.Error(w, "no: "+user, http.StatusForbidden)
		}
	}))
	server.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, ClientCAs: clients, ClientAuth: tls.RequireAndVerifyClientCert}
	server.StartTLS()
	defer server.Close()
	folder := t.TempDir()
	for _, name := range []string{"admin", "guest"} {
		client, err := ca.client(name)
		if err != nil {
			t.Fatal(err)
		}
		writeFiles(t, folder, map[string][]byte{"ca.crt": ca.pem, name + ".crt": client.cert, name + ".key": client.key})
	}
	admin, err := newAPI(server.URL, folder, "admin", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := admin.ready(t.Context()); err != nil {
		t.Error(err)
	}
	guest, err := newAPI(server.URL, folder, "guest", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := guest.ready(t.Context()); err == nil || !strings.Contains(err.Error(), "no: guest") {
		t.Errorf("a rejected request gave %v", err)
	}
	other, err := newAuthority("test")
	if err != nil {
		t.Fatal(err)
	}
	writeFiles(t, folder, map[string][]byte{"ca.crt": other.pem})
	unauthenticated, err := newAPI(server.URL, folder, "admin", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := unauthenticated.ready(t.Context()); err == nil {
		t.Error("a server of another authority was trusted")
	}
}

func writeFiles(t *testing.T, folder string, files map[string][]byte) {
	t.Helper()
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(folder, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}
