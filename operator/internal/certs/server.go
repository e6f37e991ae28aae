// Package certs creates and renews the webhook server's certificate, unless it is supplied.
//
// Certificates are created and verified by cert-controller. An [Issuer] writes them, with permissions for two Secrets and two
// webhook configurations. A [Server] only reads. It serves the certificate from memory, so that a first start does not wait
// a minute or more until the kubelet refreshes a mounted Secret.
package certs

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"sync/atomic"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// Names are those of the objects that issuer and server share.
type Names struct {
	// Secret has the server's certificate. It has to exist: the chart owns it, so that uninstalling deletes it.
	Secret types.NamespacedName
	// WebhookConfiguration is the MutatingWebhookConfiguration, and the ValidatingWebhookConfiguration, whose webhooks all get the CA.
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
	serving atomic.Pointer[tls.Certificate]
	trusted atomic.Bool
}

// SetupWithManager starts the reconciler with the manager.
func (s *Server) SetupWithManager(mgr manager.Manager) error {
	s.client = mgr.GetClient()
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

// Ready is a readiness check: a certificate exists, and the webhook configuration trusts it.
func (s *Server) Ready(*http.Request) error {
	if _, err := s.GetCertificate(nil); err != nil {
		return err
	}
	if !s.trusted.Load() {
		return fmt.Errorf("MutatingWebhookConfiguration %s does not have the CA of the certificate in Secret %s yet", s.WebhookConfiguration, s.Secret)
	}
	return nil
}

// Reconcile serves what the Secret has. A Secret without a certificate leaves the earlier one.
func (s *Server) Reconcile(ctx context.Context, _ reconcile.Request) (reconcile.Result, error) {
	secret := &corev1.Secret{}
	if err := s.client.Get(ctx, s.Secret, secret); err != nil {
		return reconcile.Result{}, fmt.Errorf("read Secret %s, which has to exist (it may be empty): %w", s.Secret, err)
	}
	if len(secret.Data[corev1.TLSCertKey]) == 0 || len(secret.Data[corev1.TLSPrivateKeyKey]) == 0 {
		return reconcile.Result{}, nil // the next one is an event
	}
	certificate, err := tls.X509KeyPair(secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey])
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("certificate in Secret %s: %w", s.Secret, err)
	}
	s.serving.Store(&certificate)
	config := &admissionregistrationv1.MutatingWebhookConfiguration{}
	if err := s.client.Get(ctx, types.NamespacedName{Name: s.WebhookConfiguration}, config); err != nil {
		return reconcile.Result{}, fmt.Errorf("read MutatingWebhookConfiguration %s: %w", s.WebhookConfiguration, err)
	}
	if isTrusted(config, &certificate) {
		s.trusted.Store(true)
	}
	return reconcile.Result{}, nil
}

// isTrusted reports whether every webhook of the configuration has the certificate's CA.
func isTrusted(config *admissionregistrationv1.MutatingWebhookConfiguration, certificate *tls.Certificate) bool {
	leaf, err := x509.ParseCertificate(certificate.Certificate[0])
	if err != nil {
		return false
	}
	for i := range config.Webhooks {
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(config.Webhooks[i].ClientConfig.CABundle)
		// Whether it has expired does not matter here: a server that is not ready would not help.
		if _, err := leaf.Verify(x509.VerifyOptions{Roots: roots, CurrentTime: leaf.NotBefore}); err != nil {
			return false
		}
	}
	return true
}
