package certs

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
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
	// renewBefore leaves a quarter of a year in which a failing renewal can be noticed. During it a replaced CA is trusted too.
	renewBefore   = 90 * 24 * time.Hour
	checkInterval = 12 * time.Hour
	// skew is by how much the clocks of other machines may be behind.
	skew = time.Hour
	// trustDelay is how long a new CA is trusted before it signs anything: every API server has to have read it.
	trustDelay = 30 * time.Second

	// caKey has what clients trust, beside the standard tls.crt and tls.key. caKeyKey is the CA's private key, in its own Secret.
	caKey    = "ca.crt"
	caKeyKey = "ca.key"

	fieldOwner = client.FieldOwner("evenkeel-certs")
)

// Issuer makes a CA and a server certificate, renews them, and writes the CA into the webhook configurations. It is the only one who
// may change those: whoever can, can have every object of the cluster sent to him.
type Issuer struct {
	Names
	// Authority is the Secret that has the CA's private key. It has to exist, and may be empty.
	Authority types.NamespacedName

	client client.Client
	clock  clock.PassiveClock
}

// SetupWithManager starts the reconciler with the manager.
func (s *Issuer) SetupWithManager(mgr manager.Manager) error {
	s.client, s.clock = mgr.GetClient(), clock.RealClock{}
	always := func(context.Context, client.Object) []reconcile.Request {
		return []reconcile.Request{{NamespacedName: s.Secret}}
	}
	return builder.ControllerManagedBy(mgr).Named("certs").
		Watches(&corev1.Secret{}, handler.EnqueueRequestsFromMapFunc(always)).
		Watches(&admissionregistrationv1.MutatingWebhookConfiguration{}, handler.EnqueueRequestsFromMapFunc(always)).
		Watches(&admissionregistrationv1.ValidatingWebhookConfiguration{}, handler.EnqueueRequestsFromMapFunc(always)).
		Complete(s)
}

// Cached narrows the manager's cache to the issuer's objects, so that the permissions can name them.
func (s *Issuer) Cached() map[client.Object]cache.ByObject {
	all := s.Names.Cached()
	all[&admissionregistrationv1.ValidatingWebhookConfiguration{}] = cache.ByObject{Field: fields.OneTermEqualSelector("metadata.name", s.WebhookConfiguration)}
	return all
}

// Reconcile updates the two Secrets and the webhook configuration, in an order in which what is served is trusted at any time.
func (s *Issuer) Reconcile(ctx context.Context, _ reconcile.Request) (reconcile.Result, error) {
	wait, err := s.issue(ctx)
	if apierrors.IsConflict(err) {
		return reconcile.Result{RequeueAfter: time.Second}, nil // somebody was first, or the cache is behind
	}
	return reconcile.Result{RequeueAfter: wait}, err
}

func (s *Issuer) issue(ctx context.Context) (wait time.Duration, err error) {
	authority, server := &corev1.Secret{}, &corev1.Secret{}
	for name, secret := range map[types.NamespacedName]*corev1.Secret{s.Authority: authority, s.Secret: server} {
		if err := s.client.Get(ctx, name, secret); err != nil {
			return 0, fmt.Errorf("read Secret %s, which has to exist (it may be empty): %w", name, err)
		}
		if secret.Data == nil {
			secret.Data = map[string][]byte{}
		}
	}
	maker := &rotator.CertRotator{
		CAName: caName, CAOrganization: "evenkeel.dev", DNSName: s.dnsName(),
		ExtKeyUsages: &[]x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	now := s.clock.Now()
	soon, begin := now.Add(renewBefore), now.Add(-skew)
	if ok, err := rotator.ValidCert(authority.Data[caKey], authority.Data[caKey], authority.Data[caKeyKey], caName, nil, soon); err != nil || !ok {
		ca, err := maker.CreateCACert(begin, now.Add(caLifetime))
		if err != nil {
			return 0, fmt.Errorf("make a CA: %w", err)
		}
		authority.Data[caKey], authority.Data[caKeyKey] = ca.CertPEM, ca.KeyPEM
		if err := s.write(ctx, authority); err != nil {
			return 0, err
		}
	}
	ca, err := keyPair(authority.Data)
	if err != nil {
		return 0, fmt.Errorf("the CA in Secret %s: %w", s.Authority, err)
	}
	// The CA before this one is trusted until it expires, so that it does not matter who reads what first.
	trusted := bundle(ca, server.Data[caKey], now)
	if err := s.trust(ctx, trusted); err != nil {
		return 0, err
	}
	ok, err := rotator.ValidCert(ca.CertPEM, server.Data[corev1.TLSCertKey], server.Data[corev1.TLSPrivateKeyKey], s.dnsName(), maker.ExtKeyUsages, soon)
	wait = checkInterval
	if err != nil || !ok {
		if early := ca.Cert.NotBefore.Add(skew + trustDelay).Sub(now); early > 0 && s.isValid(server.Data, trusted, now) {
			wait = early
		} else if server.Data[corev1.TLSCertKey], server.Data[corev1.TLSPrivateKeyKey], err = maker.CreateCertPEM(ca, begin, now.Add(serverLifetime)); err != nil {
			return 0, fmt.Errorf("make a certificate: %w", err)
		} else {
			server.Data[caKey] = nil // to be written
		}
	}
	if _, old := server.Data[caKeyKey]; old || !bytes.Equal(server.Data[caKey], trusted) {
		delete(server.Data, caKeyKey) // of a version that kept the CA's key with the server's
		server.Data[caKey] = trusted
		return wait, s.write(ctx, server)
	}
	return wait, nil
}

// isValid reports whether clients that trust the roots accept the certificate now.
func (s *Issuer) isValid(data map[string][]byte, trusted []byte, now time.Time) bool {
	pair, err := tls.X509KeyPair(data[corev1.TLSCertKey], data[corev1.TLSPrivateKeyKey])
	if err != nil {
		return false
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(trusted)
	_, err = pair.Leaf.Verify(x509.VerifyOptions{DNSName: s.dnsName(), Roots: roots, CurrentTime: now})
	return err == nil
}

func (s *Issuer) write(ctx context.Context, secret *corev1.Secret) error {
	if err := s.client.Update(ctx, secret, fieldOwner); err != nil {
		return fmt.Errorf("write Secret %s/%s: %w", secret.Namespace, secret.Name, err)
	}
	log.FromContext(ctx).Info("wrote a new certificate", "secret", client.ObjectKeyFromObject(secret))
	return nil
}

// bundle returns the CA, and the newest of those that were trusted before and have not expired.
func bundle(ca *rotator.KeyPairArtifacts, before []byte, now time.Time) []byte {
	all := bytes.Clone(ca.CertPEM)
	for block, rest := pem.Decode(before); block != nil; block, rest = pem.Decode(rest) {
		other, err := x509.ParseCertificate(block.Bytes)
		if err == nil && !other.Equal(ca.Cert) && now.Before(other.NotAfter) {
			return append(all, pem.EncodeToMemory(block)...)
		}
	}
	return all
}

// keyPair reads the CA back from the Secret's data.
func keyPair(data map[string][]byte) (*rotator.KeyPairArtifacts, error) {
	certificate, _ := pem.Decode(data[caKey])
	key, _ := pem.Decode(data[caKeyKey])
	if certificate == nil || key == nil {
		return nil, errors.New("it is not PEM")
	}
	ca := &rotator.KeyPairArtifacts{CertPEM: data[caKey], KeyPEM: data[caKeyKey]}
	var err error
	if ca.Cert, err = x509.ParseCertificate(certificate.Bytes); err != nil {
		return nil, err
	}
	ca.Key, err = x509.ParsePKCS1PrivateKey(key.Bytes)
	return ca, err
}

// trust writes what is to be trusted into every webhook of both configurations, if it differs. Only the mutating one has to exist.
func (s *Issuer) trust(ctx context.Context, roots []byte) error {
	mutating := &admissionregistrationv1.MutatingWebhookConfiguration{}
	if err := s.client.Get(ctx, types.NamespacedName{Name: s.WebhookConfiguration}, mutating); err != nil {
		return fmt.Errorf("read MutatingWebhookConfiguration %s, which has to exist: %w", s.WebhookConfiguration, err)
	}
	before, bundles := mutating.DeepCopy(), []*[]byte{}
	for i := range mutating.Webhooks {
		bundles = append(bundles, &mutating.Webhooks[i].ClientConfig.CABundle)
	}
	if err := s.put(ctx, mutating, before, bundles, roots); err != nil {
		return fmt.Errorf("put the CA into MutatingWebhookConfiguration %s: %w", s.WebhookConfiguration, err)
	}
	validating := &admissionregistrationv1.ValidatingWebhookConfiguration{}
	if err := s.client.Get(ctx, types.NamespacedName{Name: s.WebhookConfiguration}, validating); apierrors.IsNotFound(err) {
		return nil
	} else if err != nil {
		return fmt.Errorf("read ValidatingWebhookConfiguration %s: %w", s.WebhookConfiguration, err)
	}
	earlier := validating.DeepCopy()
	bundles = nil
	for i := range validating.Webhooks {
		bundles = append(bundles, &validating.Webhooks[i].ClientConfig.CABundle)
	}
	if err := s.put(ctx, validating, earlier, bundles, roots); err != nil {
		return fmt.Errorf("put the CA into ValidatingWebhookConfiguration %s: %w", s.WebhookConfiguration, err)
	}
	return nil
}

// put writes the roots into the bundles of a configuration, unless all have them.
func (s *Issuer) put(ctx context.Context, config, before client.Object, bundles []*[]byte, roots []byte) error {
	changed := false
	for _, bundle := range bundles {
		if !bytes.Equal(*bundle, roots) {
			*bundle, changed = roots, true
		}
	}
	if !changed {
		return nil
	}
	// The lock prevents one with an older Secret from overwriting the CA of a faster one.
	return s.client.Patch(ctx, config, client.StrategicMergeFrom(before, client.MergeFromWithOptimisticLock{}), fieldOwner)
}
