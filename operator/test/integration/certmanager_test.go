package integration

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/operator/test/apiserver"
)

// TestCertManager creates the chart's objects for cert-manager, whose definitions are served here. Its controller does not run: this
// test does what the objects ask it for, a Secret with tls.crt, tls.key and ca.crt, and the webhook serves from that, mounted.
func TestCertManager(t *testing.T) {
	root, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{nil, {"--set", "webhook.certs.issuerRef.kind=ClusterIssuer,webhook.certs.issuerRef.name=ours"}} {
		objects, err := apiserver.Chart(root, systemNamespace, append([]string{"--set", "webhook.certs.source=CertManager"}, args...)...)
		if err != nil {
			t.Fatal(err)
		}
		made := map[string]*unstructured.Unstructured{}
		for _, object := range objects {
			if object.GroupVersionKind().Group == "cert-manager.io" {
				// An unknown field is an error, and a field that the definition lacks is unknown.
				if err := admin.Create(t.Context(), object, client.DryRunAll, client.FieldValidation("Strict")); err != nil {
					t.Errorf("%s %s: %v", object.GetKind(), object.GetName(), err)
				}
			}
			made[object.GetKind()+"/"+object.GetName()] = object
		}
		serving := made["Certificate/evenkeel-webhook"]
		if serving == nil {
			t.Fatalf("no Certificate for the webhook in %d objects", len(made))
		}
		if args != nil {
			continue
		}
		// Every issuer that a Certificate names is there, and signs with what another Certificate makes.
		for _, name := range []string{"evenkeel-webhook", "evenkeel-webhook-ca"} {
			issuer, _, _ := unstructured.NestedString(made["Certificate/"+name].Object, "spec", "issuerRef", "name")
			if made["Issuer/"+issuer] == nil {
				t.Errorf("Certificate %s names Issuer %q, which the chart does not have", name, issuer)
			}
		}
		signs, _, _ := unstructured.NestedString(made["Issuer/evenkeel-webhook-ca"].Object, "spec", "ca", "secretName")
		if ca, _, _ := unstructured.NestedString(made["Certificate/evenkeel-webhook-ca"].Object, "spec", "secretName"); ca != signs {
			t.Errorf("the issuer signs with %q, and the CA is in %q", signs, ca)
		}
		names, _, _ := unstructured.NestedStringSlice(serving.Object, "spec", "dnsNames")
		serveFrom(t, &installation{work: t.TempDir(), binary: install.binary, objects: made}, names)
	}
}

// serveFrom starts the webhook of the chart's objects, and verifies its certificate as the API server does, before and after it is
// renewed.
func serveFrom(t *testing.T, i *installation, names []string) {
	t.Helper()
	if want := "evenkeel-webhook." + systemNamespace + ".svc"; !slices.Contains(names, want) {
		t.Fatalf("the certificate is for %q, and the API server asks for %s", names, want)
	}
	dir := t.TempDir()
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(issue(t, dir, names))
	port, err := freePort()
	if err != nil {
		t.Fatal(err)
	}
	p, err := i.startProgram("evenkeel-webhook", fmt.Sprintf("--port=%d", port), "--cert-dir="+dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.stop(); err != nil {
			t.Error(err)
		}
	})
	verify := func() error {
		dialer := tls.Dialer{Config: &tls.Config{RootCAs: roots, ServerName: names[0], MinVersion: tls.VersionTLS12}}
		connection, err := dialer.DialContext(t.Context(), "tcp", fmt.Sprintf("localhost:%d", port))
		if err != nil {
			return err
		}
		return connection.Close()
	}
	if err := verify(); err != nil {
		t.Errorf("the API server would not trust the webhook: %v", err)
	}
	before := served(t, port)
	renewed := issue(t, dir, names)
	roots = x509.NewCertPool()
	roots.AppendCertsFromPEM(renewed)
	eventually(t, "the renewed certificate is served", func(context.Context) (bool, error) {
		return !bytes.Equal(served(t, port), before), nil
	})
	if err := verify(); err != nil {
		t.Errorf("after the renewal: %v", err)
	}
}

// issue writes a certificate of a new CA as a Secret of cert-manager has it, and returns the CA's.
func issue(t *testing.T, dir string, names []string) []byte {
	t.Helper()
	sign := func(template, parent *x509.Certificate, by *ecdsa.PrivateKey) (*x509.Certificate, *ecdsa.PrivateKey) {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		if parent == nil {
			parent, by = template, key
		}
		template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
		raw, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, by)
		if err != nil {
			t.Fatal(err)
		}
		certificate, err := x509.ParseCertificate(raw)
		if err != nil {
			t.Fatal(err)
		}
		return certificate, key
	}
	ca, caKey := sign(&x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "evenkeel-ca"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}, nil, nil)
	leaf, key := sign(&x509.Certificate{SerialNumber: big.NewInt(2), DNSNames: names, KeyUsage: x509.KeyUsageDigitalSignature}, ca, caKey)
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	trusted := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca.Raw})
	for name, content := range map[string][]byte{
		corev1.TLSCertKey:       pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: leaf.Raw}),
		corev1.TLSPrivateKeyKey: pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private}),
		"ca.crt":                trusted,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return trusted
}
