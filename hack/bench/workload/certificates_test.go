package workload

import (
	"crypto/tls"
	"crypto/x509"
	"net"
	"os"
	"testing"
)

// Both sides show the certificate, and both check it.
func TestCertificatesAuthenticateBothSides(t *testing.T) {
	c, err := makeCertificates(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	own, err := tls.LoadX509KeyPair(c.certificate, c.key)
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(c.authority)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(text) {
		t.Fatalf("no certificate of an authority: %s", text)
	}
	config := &tls.Config{
		Certificates: []tls.Certificate{own}, RootCAs: roots, ClientCAs: roots, ServerName: "rank",
		ClientAuth: tls.RequireAndVerifyClientCert, MinVersion: tls.VersionTLS13,
	}
	one, other := net.Pipe()
	defer one.Close()
	defer other.Close()
	served := make(chan error, 1)
	go func() {
		server := tls.Server(other, config)
		err := server.HandshakeContext(t.Context())
		if err == nil {
			_, err = server.Write([]byte{1})
		}
		served <- err
	}()
	// What is read comes after the server has accepted the certificate.
	if _, err := tls.Client(one, config).Read(make([]byte, 1)); err != nil {
		t.Errorf("client: %v", err)
		one.Close()
	}
	if err := <-served; err != nil {
		t.Errorf("server: %v", err)
	}
}
