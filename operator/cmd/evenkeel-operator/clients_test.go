package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// A signer is a CA.
type signer struct {
	t           *testing.T
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

func newSigner(t *testing.T) signer {
	t.Helper()
	s := signer{t: t}
	s.certificate = &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	made := s.signs("ca", s.certificate)
	s.key = made.PrivateKey.(*ecdsa.PrivateKey)
	var err error
	if s.certificate, err = x509.ParseCertificate(made.Certificate[0]); err != nil {
		t.Fatal(err)
	}
	return s
}

// signs makes a certificate of that name. Without a template it is a client's.
func (s signer) signs(name string, template *x509.Certificate) tls.Certificate {
	s.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		s.t.Fatal(err)
	}
	by := s.key
	if template == nil {
		template = &x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
	} else {
		by = key
	}
	raw, err := x509.CreateCertificate(rand.Reader, template, s.certificate, &key.PublicKey, by)
	if err != nil {
		s.t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{raw}, PrivateKey: key}
}

func (s signer) write(path string) {
	s.t.Helper()
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.certificate.Raw}), 0o600); err != nil {
		s.t.Fatal(err)
	}
}

// Only who presents a certificate of the CA is answered, also after the CA was rotated.
func TestWebhookAnswersItsClientsOnly(t *testing.T) {
	ca, other := newSigner(t), newSigner(t)
	file := filepath.Join(t.TempDir(), "ca.crt")
	ca.write(file)
	c := clients{caFile: file, name: "kube-apiserver"}
	if err := c.validate(); err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(c.only(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })))
	server.TLS = &tls.Config{Certificates: []tls.Certificate{ca.signs("webhook", nil)}}
	c.configure(server.TLS)
	server.StartTLS()
	defer server.Close()
	// status is what a caller with the certificate gets; 0: no connection.
	status := func(certificates ...tls.Certificate) int {
		t.Helper()
		transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, Certificates: certificates}} // who is called is not the question
		defer transport.CloseIdleConnections()
		response, err := (&http.Client{Transport: transport}).Get(server.URL)
		if err != nil {
			return 0
		}
		defer response.Body.Close()
		return response.StatusCode
	}
	if got := status(); got != http.StatusUnauthorized {
		t.Errorf("without a certificate: %d", got)
	}
	if got := status(ca.signs("kube-apiserver", nil)); got != http.StatusOK {
		t.Errorf("the API server: %d", got)
	}
	if got := status(ca.signs("kubelet", nil)); got != http.StatusForbidden {
		t.Errorf("another client of the CA: %d", got)
	}
	if got := status(other.signs("kube-apiserver", nil)); got != 0 && got != http.StatusUnauthorized {
		t.Errorf("of another CA: %d", got)
	}
	other.write(file)
	if got := status(other.signs("kube-apiserver", nil)); got != http.StatusOK {
		t.Errorf("of the next CA: %d", got)
	}
}
