package main

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"os"
)

// clients are who may call the webhook. An API server presents a certificate if its AdmissionConfiguration has one for webhooks. The
// zero value admits everybody.
type clients struct {
	// caFile has the CAs that sign their certificates (PEM). It is read for each connection, since CAs are rotated.
	caFile string
	// name is the common name of the certificate; empty: any.
	name string
}

func (c clients) validate() error {
	if c.caFile == "" {
		if c.name != "" {
			return fmt.Errorf("--client-name=%s goes with --client-ca", c.name)
		}
		return nil
	}
	_, err := c.authorities()
	return err
}

func (c clients) authorities() (*x509.CertPool, error) {
	text, err := os.ReadFile(c.caFile)
	if err != nil {
		return nil, fmt.Errorf("--client-ca: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("--client-ca=%s: no certificate in it; want PEM", c.caFile)
	}
	return pool, nil
}

// configure has connections present a certificate. One without is refused by [clients.only], as the readiness check has none.
func (c clients) configure(config *tls.Config) {
	if c.caFile == "" {
		return
	}
	config.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		pool, err := c.authorities()
		if err != nil {
			return nil, err
		}
		own := config.Clone()
		own.GetConfigForClient, own.ClientAuth, own.ClientCAs = nil, tls.VerifyClientCertIfGiven, pool
		return own, nil
	}
}

// only passes the requests of those who may call.
func (c clients) only(next http.Handler) http.Handler {
	if c.caFile == "" {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.TLS == nil || len(r.TLS.VerifiedChains) == 0 {
			http.Error(w, "a client certificate is required, signed by the CA of --client-ca", http.StatusUnauthorized)
			return
		}
		if is := r.TLS.VerifiedChains[0][0].Subject.CommonName; c.name != "" && is != c.name {
			http.Error(w, fmt.Sprintf("the client certificate is of %q, and that of %q is required", is, c.name), http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}
