package metrics

import (
	"crypto/tls"

	"github.com/prometheus/client_golang/prometheus"
)

var certificateDesc = prometheus.NewDesc("evenkeel_webhook_certificate_expiry_timestamp_seconds", "Time at which the certificate expires that the webhook serves; absent as long as it has none.", nil, nil)

// CertificateCollector exports when the webhook's certificate expires. It asks for the certificate as a connection does, so that it
// is right whoever made it and however it was renewed.
type CertificateCollector func(*tls.ClientHelloInfo) (*tls.Certificate, error)

// Describe implements prometheus.Collector.
func (c CertificateCollector) Describe(out chan<- *prometheus.Desc) { out <- certificateDesc }

// Collect implements prometheus.Collector.
func (c CertificateCollector) Collect(out chan<- prometheus.Metric) {
	certificate, err := c(nil)
	if err != nil || certificate == nil || certificate.Leaf == nil {
		return // there is none yet
	}
	gauge(out, certificateDesc, float64(certificate.Leaf.NotAfter.Unix()))
}
