package metrics

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

func TestMetricsOfCertificate(t *testing.T) {
	end := time.Date(2027, 1, 2, 3, 4, 5, 0, time.UTC)
	for name, test := range map[string]struct {
		certificate *tls.Certificate
		err         error
		served      bool
	}{
		"one":              {&tls.Certificate{Leaf: &x509.Certificate{NotAfter: end}}, nil, true},
		"none yet":         {nil, errors.New("no certificate yet"), false},
		"none, no problem": {nil, nil, false},
	} {
		registry := prometheus.NewRegistry()
		registry.MustRegister(CertificateCollector(func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return test.certificate, test.err }))
		families, err := registry.Gather()
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if served := len(families) == 1; served != test.served || served && families[0].GetMetric()[0].GetGauge().GetValue() != float64(end.Unix()) {
			t.Errorf("%s: %v", name, families)
		}
	}
}
