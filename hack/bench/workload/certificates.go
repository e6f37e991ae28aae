package workload

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"time"
)

// certificates are PEM files: the certificate that all ranks show, its key, and the authority's certificate.
type certificates struct{ certificate, key, authority string }

// makeCertificates makes an authority, and a certificate that it has signed, for a day.
func makeCertificates(folder string) (certificates, error) {
	c := certificates{filepath.Join(folder, "rank.pem"), filepath.Join(folder, "rank.key"), filepath.Join(folder, "authority.pem")}
	template := func(serial int64, name string) *x509.Certificate {
		return &x509.Certificate{
			SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: name},
			NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
			BasicConstraintsValid: true,
		}
	}
	authority, rank := template(1, "authority"), template(2, "rank")
	authority.IsCA, authority.KeyUsage = true, x509.KeyUsageCertSign
	rank.DNSNames, rank.KeyUsage = []string{"rank"}, x509.KeyUsageDigitalSignature
	rank.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	signer, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return c, fmt.Errorf("make certificates: %w", err)
	}
	own, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return c, fmt.Errorf("make certificates: %w", err)
	}
	key, err := x509.MarshalPKCS8PrivateKey(own)
	if err != nil {
		return c, fmt.Errorf("make certificates: %w", err)
	}
	root, err := x509.CreateCertificate(rand.Reader, authority, authority, signer.Public(), signer)
	if err != nil {
		return c, fmt.Errorf("make certificates: %w", err)
	}
	leaf, err := x509.CreateCertificate(rand.Reader, rank, authority, own.Public(), signer)
	if err != nil {
		return c, fmt.Errorf("make certificates: %w", err)
	}
	for path, block := range map[string]*pem.Block{
		c.authority:   {Type: "CERTIFICATE", Bytes: root},
		c.certificate: {Type: "CERTIFICATE", Bytes: leaf},
		c.key:         {Type: "PRIVATE KEY", Bytes: key},
	} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			return c, fmt.Errorf("make certificates: %w", err)
		}
	}
	return c, nil
}
