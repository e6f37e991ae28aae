// Package certs creates and renews the webhook server's certificate, unless it is supplied.
//
// Certificates are created and verified by cert-controller. An [Issuer] writes them, with permissions for two Secrets
// and two webhook configurations. A [Server] only reads. It serves the certificate from memory, so that a first start
// does not wait a minute or more until the kubelet refreshes a mounted Secret.
package certs

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// Names are the names of the objects that issuer and server share.
type Names struct {
	// Secret holds the server's certificate. It must exist: the chart owns it, so that uninstalling deletes it.
	Secret types.NamespacedName
	// WebhookConfiguration is the MutatingWebhookConfiguration, and the ValidatingWebhookConfiguration, whose webhooks all
	// get the CA.
	WebhookConfiguration string
	// Service is the Service that the API server calls, in the Secret's namespace.
	Service string
}

func (n *Names) dnsName() string { return fmt.Sprintf("%s.%s.svc", n.Service, n.Secret.Namespace) }

// Cached narrows the manager's cache to these objects, so that the permissions can name them.
func (n *Names) Cached() map[client.Object]cache.ByObject {
	return map[client.Object]cache.ByObject{
		&corev1.Secret{}: {Namespaces: map[string]cache.Config{
			n.Secret.Namespace: {FieldSelector: fields.OneTermEqualSelector("metadata.name", n.Secret.Name)},
		}},
		&admissionregistrationv1.MutatingWebhookConfiguration{}: {
			Field: fields.OneTermEqualSelector("metadata.name", n.WebhookConfiguration),
		},
	}
}

// Server presents the certificate of the Secret.
type Server struct {
	Names

	client  client.Client
	clock   clock.PassiveClock
	serving atomic.Pointer[tls.Certificate]
	trusted atomic.Bool
	// seen is the CA that was asked about last, and since when.
	seen  *x509.Certificate
	since time.Time
}

// SetupWithManager starts the reconciler with the manager.
func (s *Server) SetupWithManager(mgr manager.Manager) error {
	s.client, s.clock = mgr.GetClient(), clock.RealClock{}
	toSecret := func(context.Context, client.Object) []reconcile.Request {
		return []reconcile.Request{{NamespacedName: s.Secret}}
	}
	return builder.ControllerManagedBy(mgr).Named("certificate").
		For(&corev1.Secret{}).
		Watches(&admissionregistrationv1.MutatingWebhookConfiguration{}, handler.EnqueueRequestsFromMapFunc(toSecret)).
		Complete(s)
}

// GetCertificate returns the newest certificate of the Secret, for tls.Config.
func (s *Server) GetCertificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	if certificate := s.serving.Load(); certificate != nil {
		return certificate, nil
	}
	return nil, fmt.Errorf("no certificate in Secret %s yet", s.Secret)
}

// Ready is a readiness check: a certificate exists, and every API server trusts it.
func (s *Server) Ready(*http.Request) error {
	if _, err := s.GetCertificate(nil); err != nil {
		return err
	}
	if !s.trusted.Load() {
		return fmt.Errorf("MutatingWebhookConfiguration %s does not have the CA of the certificate in Secret %s yet, or not for %s", s.WebhookConfiguration, s.Secret, trustDelay)
	}
	return nil
}

// Reconcile serves what the Secret has, once it is trusted. A Secret without a certificate leaves the earlier one.
func (s *Server) Reconcile(ctx context.Context, _ reconcile.Request) (reconcile.Result, error) {
	secret := &corev1.Secret{}
	if err := s.client.Get(ctx, s.Secret, secret); err != nil {
		return reconcile.Result{}, fmt.Errorf("read Secret %s, which has to exist (it may be empty): %w", s.Secret, err)
	}
	if len(secret.Data[corev1.TLSCertKey]) == 0 || len(secret.Data[corev1.TLSPrivateKeyKey]) == 0 {
		return reconcile.Result{}, nil // the next one is an event
	}
	offered, err := tls.X509KeyPair(secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey])
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("certificate in Secret %s: %w", s.Secret, err)
	}
	config := &admissionregistrationv1.MutatingWebhookConfiguration{}
	if err := s.client.Get(ctx, types.NamespacedName{Name: s.WebhookConfiguration}, config); err != nil {
		s.serving.CompareAndSwap(nil, &offered)
		return reconcile.Result{}, fmt.Errorf("read MutatingWebhookConfiguration %s: %w", s.WebhookConfiguration, err)
	}
	return reconcile.Result{RequeueAfter: s.serve(&offered, config)}, nil
}

// serve serves the certificate that the Secret offers. If another CA signed it, the present one is served until every
// API server has read that CA. The result says when to look again; zero: at the next event.
func (s *Server) serve(offered *tls.Certificate, config *admissionregistrationv1.MutatingWebhookConfiguration) (wait time.Duration) {
	now := s.clock.Now()
	if present := s.serving.Load(); present != nil {
		before, after := s.signer(present, config, now), s.signer(offered, config, now)
		switch {
		case before == nil: // nothing is worse
		case after == nil:
			return 0
		case !after.Equal(before):
			if wait := s.settles(after, now); wait > 0 {
				return wait
			}
		}
	}
	s.serving.Store(offered)
	if s.trusted.Load() {
		return 0
	}
	// Whether it has expired does not matter here: a server that is not ready would not help.
	ca := s.signer(offered, config, offered.Leaf.NotBefore)
	if ca == nil {
		return 0
	}
	// While nothing else is trusted, no API server calls anybody yet.
	if wait := s.settles(ca, now); wait > 0 && len(certificatesOf(config.Webhooks[0].ClientConfig.CABundle)) > 1 {
		return wait
	}
	s.trusted.Store(true)
	return 0
}

// settles returns in how much time every API server has read a CA that is trusted. Should the clock of the issuer be
// ahead, the time counts from when this process has seen it.
func (s *Server) settles(ca *x509.Certificate, now time.Time) time.Duration {
	if !ca.Equal(s.seen) {
		s.seen, s.since = ca, now
	}
	return min(settledAt(ca).Sub(now), s.since.Add(trustDelay).Sub(now))
}

// signer returns the CA for which every webhook of the configuration trusts the certificate; nil: one of them does not.
func (s *Server) signer(certificate *tls.Certificate, config *admissionregistrationv1.MutatingWebhookConfiguration, at time.Time) (ca *x509.Certificate) {
	for i := range config.Webhooks {
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(config.Webhooks[i].ClientConfig.CABundle)
		chains, err := certificate.Leaf.Verify(x509.VerifyOptions{DNSName: s.dnsName(), Roots: roots, CurrentTime: at})
		if err != nil {
			return nil
		}
		ca = chains[0][len(chains[0])-1]
	}
	return ca
}
