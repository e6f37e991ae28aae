// Package certs creates and renews the webhook server's certificate, unless it is supplied.
//
// Certificates are created and verified by cert-controller. The reconciler here needs permissions for one Secret and one
// MutatingWebhookConfiguration only. It serves the certificate from memory, so that a first start does not wait a minute or more
// until the kubelet refreshes a mounted Secret.
package certs

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/open-policy-agent/cert-controller/pkg/rotator"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

const (
	caName         = "evenkeel-ca"
	caLifetime     = 10 * 365 * 24 * time.Hour
	serverLifetime = 365 * 24 * time.Hour
	// renewBefore leaves a quarter of a year in which a failing renewal can be noticed.
	renewBefore   = 90 * 24 * time.Hour
	checkInterval = 12 * time.Hour

	// caKey and caKeyKey sit in the Secret beside the standard tls.crt and tls.key.
	caKey    = "ca.crt"
	caKeyKey = "ca.key"

	fieldOwner = client.FieldOwner("evenkeel-certs")
)

// SelfManaged creates a CA and a server certificate, renews them, and writes the CA into the webhook configuration. Every replica
// runs it: the first one to write the Secret wins, and the others use its certificate.
type SelfManaged struct {
	// Secret has the certificates. It has to exist: the chart owns it, so that uninstalling deletes it.
	Secret types.NamespacedName
	// WebhookConfiguration is the MutatingWebhookConfiguration whose webhooks all get the CA.
	WebhookConfiguration string
	// Service is the Service that the API server calls, in the Secret's namespace.
	Service string

	client  client.Client
	clock   clock.PassiveClock
	serving atomic.Pointer[tls.Certificate]
	trusted atomic.Bool
}

// Cached narrows the manager's cache to the two objects, so that the permissions can name them.
func (s *SelfManaged) Cached() map[client.Object]cache.ByObject {
	return map[client.Object]cache.ByObject{
		&corev1.Secret{}: {Namespaces: map[string]cache.Config{
			s.Secret.Namespace: {FieldSelector: fields.OneTermEqualSelector("metadata.name", s.Secret.Name)},
		}},
		&admissionregistrationv1.MutatingWebhookConfiguration{}: {
			Field: fields.OneTermEqualSelector("metadata.name", s.WebhookConfiguration),
		},
	}
}

// SetupWithManager starts the reconciler with the manager.
func (s *SelfManaged) SetupWithManager(mgr manager.Manager) error {
	s.client, s.clock = mgr.GetClient(), clock.RealClock{}
	toSecret := func(context.Context, client.Object) []reconcile.Request {
		return []reconcile.Request{{NamespacedName: s.Secret}}
	}
	return builder.ControllerManagedBy(mgr).Named("certs").
		For(&corev1.Secret{}).
		Watches(&admissionregistrationv1.MutatingWebhookConfiguration{}, handler.EnqueueRequestsFromMapFunc(toSecret)).
		Complete(s)
}

// GetCertificate returns the newest certificate of the Secret, for tls.Config.
func (s *SelfManaged) GetCertificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	if certificate := s.serving.Load(); certificate != nil {
		return certificate, nil
	}
	return nil, fmt.Errorf("no certificate in Secret %s yet", s.Secret)
}

// Ready is a readiness check: a certificate exists, and the webhook configuration has its CA.
func (s *SelfManaged) Ready(*http.Request) error {
	if _, err := s.GetCertificate(nil); err != nil {
		return err
	}
	if !s.trusted.Load() {
		return fmt.Errorf("MutatingWebhookConfiguration %s does not have the CA yet", s.WebhookConfiguration)
	}
	return nil
}

// Reconcile updates the Secret, the webhook configuration and the served certificate.
func (s *SelfManaged) Reconcile(ctx context.Context, _ reconcile.Request) (reconcile.Result, error) {
	secret := &corev1.Secret{}
	if err := s.client.Get(ctx, s.Secret, secret); err != nil {
		return reconcile.Result{}, fmt.Errorf("read Secret %s, which has to exist (it may be empty): %w", s.Secret, err)
	}
	renewed, err := s.renew(secret)
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("make certificates: %w", err)
	}
	if renewed {
		if err := s.client.Update(ctx, secret, fieldOwner); apierrors.IsConflict(err) {
			// Another replica was first; its Secret arrives as an event.
			return reconcile.Result{RequeueAfter: time.Second}, nil
		} else if err != nil {
			return reconcile.Result{}, fmt.Errorf("write Secret %s: %w", s.Secret, err)
		}
		log.FromContext(ctx).Info("wrote a new certificate", "secret", s.Secret)
	}
	certificate, err := tls.X509KeyPair(secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey])
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("certificate in Secret %s: %w", s.Secret, err)
	}
	s.serving.Store(&certificate)
	if err := s.trust(ctx, secret.Data[caKey]); apierrors.IsConflict(err) {
		return reconcile.Result{RequeueAfter: time.Second}, nil // the cache is behind; retry
	} else if err != nil {
		return reconcile.Result{}, err
	}
	s.trusted.Store(true)
	return reconcile.Result{RequeueAfter: checkInterval}, nil
}

// renew replaces certificates that are missing, damaged or about to expire, and reports whether it did. The CA is replaced only if
// necessary, since a new server certificate of the same CA is trusted at once.
func (s *SelfManaged) renew(secret *corev1.Secret) (bool, error) {
	name := fmt.Sprintf("%s.%s.svc", s.Service, s.Secret.Namespace)
	maker := &rotator.CertRotator{
		CAName: caName, CAOrganization: "evenkeel.dev", DNSName: name,
		ExtKeyUsages: &[]x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	if secret.Data == nil {
		secret.Data = map[string][]byte{}
	}
	data, soon := secret.Data, s.clock.Now().Add(renewBefore)
	begin := s.clock.Now().Add(-time.Hour) // clocks of other machines may be behind

	newCA := false
	if ok, err := rotator.ValidCert(data[caKey], data[caKey], data[caKeyKey], caName, nil, soon); err != nil || !ok {
		ca, err := maker.CreateCACert(begin, s.clock.Now().Add(caLifetime))
		if err != nil {
			return false, err
		}
		data[caKey], data[caKeyKey], newCA = ca.CertPEM, ca.KeyPEM, true
	}
	if !newCA {
		if ok, err := rotator.ValidCert(data[caKey], data[corev1.TLSCertKey], data[corev1.TLSPrivateKeyKey], name, maker.ExtKeyUsages, soon); err == nil && ok {
			return false, nil
		}
	}
	ca, err := authority(data)
	if err != nil {
		return false, err
	}
	data[corev1.TLSCertKey], data[corev1.TLSPrivateKeyKey], err = maker.CreateCertPEM(ca, begin, s.clock.Now().Add(serverLifetime))
	return err == nil, err
}

// authority reads the CA back from the Secret's data.
func authority(data map[string][]byte) (*rotator.KeyPairArtifacts, error) {
	certificate, _ := pem.Decode(data[caKey])
	key, _ := pem.Decode(data[caKeyKey])
	if certificate == nil || key == nil {
		return nil, errors.New("the CA is not PEM")
	}
	ca := &rotator.KeyPairArtifacts{CertPEM: data[caKey], KeyPEM: data[caKeyKey]}
	var err error
	if ca.Cert, err = x509.ParseCertificate(certificate.Bytes); err != nil {
		return nil, err
	}
	ca.Key, err = x509.ParsePKCS1PrivateKey(key.Bytes)
	return ca, err
}

// trust writes the CA into every webhook of the configuration, if it differs.
func (s *SelfManaged) trust(ctx context.Context, ca []byte) error {
	config := &admissionregistrationv1.MutatingWebhookConfiguration{}
	if err := s.client.Get(ctx, types.NamespacedName{Name: s.WebhookConfiguration}, config); err != nil {
		return fmt.Errorf("read MutatingWebhookConfiguration %s, which has to exist: %w", s.WebhookConfiguration, err)
	}
	before, changed := config.DeepCopy(), false
	for i := range config.Webhooks {
		if string(config.Webhooks[i].ClientConfig.CABundle) != string(ca) {
			config.Webhooks[i].ClientConfig.CABundle, changed = ca, true
		}
	}
	if !changed {
		return nil
	}
	// The lock prevents a replica with an older Secret from overwriting the CA of a faster one.
	patch := client.StrategicMergeFrom(before, client.MergeFromWithOptimisticLock{})
	if err := s.client.Patch(ctx, config, patch, fieldOwner); err != nil {
		return fmt.Errorf("put the CA into MutatingWebhookConfiguration %s: %w", s.WebhookConfiguration, err)
	}
	return nil
}
