package certs

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/open-policy-agent/cert-controller/pkg/rotator"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

const (
	caName         = "evenkeel-ca"
	caLifetime     = 10 * 365 * 24 * time.Hour
	serverLifetime = 365 * 24 * time.Hour
	// renewBefore leaves a quarter of a year in which a failing renewal can be noticed. During it a replaced CA is trusted
	// too.
	renewBefore   = 90 * 24 * time.Hour
	checkInterval = 12 * time.Hour
	// skew is by how much the clocks of other machines may be behind.
	skew = time.Hour
	// trustDelay is how long a new CA is trusted before what it signs is served: every API server has to have read it.
	trustDelay = 30 * time.Second
	// maxEarlierCAs bounds the configurations, should the CA be lost again and again.
	maxEarlierCAs = 3

	// caKey is the Secret's entry with the CAs that clients trust, next to tls.crt and tls.key. caKeyKey is the entry with
	// the CA's private key, in a Secret of its own.
	caKey    = "ca.crt"
	caKeyKey = "ca.key"

	fieldOwner = client.FieldOwner("evenkeel-certs")
)

// Issuer makes a CA and a server certificate, renews them, and writes the CA into the webhook configurations and the
// definitions. It is the only one who may change those: whoever can, can have every object of the cluster sent to him.
type Issuer struct {
	Names
	// Authority is the Secret with the CA's private key. It must exist, and may be empty. It is the one in which versions
	// that had a single Secret kept all: an upgrade and a rollback to one of them change neither the CA nor what is
	// trusted.
	Authority types.NamespacedName
	// Definitions are the names of the CustomResourceDefinitions that get the CA too, where the Service converts their
	// objects. None of them has to exist.
	Definitions []string

	client client.Client
	clock  clock.PassiveClock
	// trustedAt is when this process last wrote the CA into a configuration that did not have it.
	trustedAt time.Time
}

// SetupWithManager starts the reconciler with the manager.
func (s *Issuer) SetupWithManager(mgr manager.Manager) error {
	s.client, s.clock = mgr.GetClient(), clock.RealClock{}
	always := func(context.Context, client.Object) []reconcile.Request {
		return []reconcile.Request{{NamespacedName: s.Secret}}
	}
	b := builder.ControllerManagedBy(mgr).Named("certs").
		Watches(&corev1.Secret{}, handler.EnqueueRequestsFromMapFunc(always)).
		Watches(&admissionregistrationv1.MutatingWebhookConfiguration{}, handler.EnqueueRequestsFromMapFunc(always)).
		Watches(&admissionregistrationv1.ValidatingWebhookConfiguration{}, handler.EnqueueRequestsFromMapFunc(always))
	for _, name := range s.Definitions {
		// A watch of its own for each, as the permissions name them.
		one, err := cache.New(mgr.GetConfig(), cache.Options{
			HTTPClient: mgr.GetHTTPClient(), Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper(),
			ByObject: map[client.Object]cache.ByObject{
				&apiextensionsv1.CustomResourceDefinition{}: {Field: fields.OneTermEqualSelector("metadata.name", name)},
			},
		})
		if err != nil {
			return fmt.Errorf("watch CustomResourceDefinition %s: %w", name, err)
		}
		if err := mgr.Add(one); err != nil {
			return fmt.Errorf("watch CustomResourceDefinition %s: %w", name, err)
		}
		b = b.WatchesRawSource(source.Kind[client.Object](
			one, &apiextensionsv1.CustomResourceDefinition{}, handler.EnqueueRequestsFromMapFunc(always)))
	}
	return b.Complete(s)
}

// Cached narrows the manager's cache to the issuer's objects, so that the permissions can name them.
func (s *Issuer) Cached() map[client.Object]cache.ByObject {
	all := s.Names.Cached()
	all[&admissionregistrationv1.ValidatingWebhookConfiguration{}] = cache.ByObject{Field: fields.OneTermEqualSelector("metadata.name", s.WebhookConfiguration)}
	return all
}

// Reconcile updates the two Secrets and the webhook configuration, in an order in which what is served is trusted at
// any time.
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
		made, err := maker.CreateCACert(begin, now.Add(caLifetime))
		if err != nil {
			return 0, fmt.Errorf("make a CA: %w", err)
		}
		authority.Data[caKey], authority.Data[caKeyKey] = made.CertPEM, made.KeyPEM
		if err := s.write(ctx, authority); err != nil {
			return 0, err
		}
	}
	ca, err := keyPair(authority.Data)
	if err != nil {
		return 0, fmt.Errorf("the CA in Secret %s: %w", s.Authority, err)
	}
	trusted, err := s.trust(ctx, ca, server.Data[caKey], now)
	if err != nil {
		return 0, err
	}
	ok, err := rotator.ValidCert(ca.CertPEM, server.Data[corev1.TLSCertKey], server.Data[corev1.TLSPrivateKeyKey], s.dnsName(), maker.ExtKeyUsages, soon)
	wait = checkInterval
	if err != nil || !ok {
		// Nobody needs a new certificate at once while the present one is good.
		if early := max(settledAt(ca.Cert).Sub(now), s.trustedAt.Add(trustDelay).Sub(now)); early > 0 && s.isValid(server.Data, trusted, now) {
			wait = early
		} else if server.Data[corev1.TLSCertKey], server.Data[corev1.TLSPrivateKeyKey], err = maker.CreateCertPEM(ca, begin, now.Add(serverLifetime)); err != nil {
			return 0, fmt.Errorf("make a certificate: %w", err)
		} else {
			server.Data[caKey] = nil // to be written
		}
	}
	if !bytes.Equal(server.Data[caKey], trusted) {
		server.Data[caKey] = trusted
		return wait, s.write(ctx, server)
	}
	return wait, nil
}

// settledAt is when every API server has read the CA, if it has been trusted since it was made.
func settledAt(ca *x509.Certificate) time.Time { return ca.NotBefore.Add(skew + trustDelay) }

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

// bundle returns the CA, and the newest of the earlier CAs that have not expired. A server may still use a certificate
// that an earlier CA signed.
func bundle(ca *rotator.KeyPairArtifacts, before []*x509.Certificate, now time.Time) []byte {
	var earlier []*x509.Certificate
	for _, other := range before {
		if !other.Equal(ca.Cert) && now.Before(other.NotAfter) && !slices.ContainsFunc(earlier, other.Equal) {
			earlier = append(earlier, other)
		}
	}
	slices.SortFunc(earlier, func(a, b *x509.Certificate) int {
		return cmp.Or(b.NotBefore.Compare(a.NotBefore), bytes.Compare(a.Raw, b.Raw))
	})
	all := bytes.Clone(ca.CertPEM)
	for _, other := range earlier[:min(len(earlier), maxEarlierCAs)] {
		all = append(all, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: other.Raw})...)
	}
	return all
}

// certificatesOf returns the certificates of a bundle, without what is none.
func certificatesOf(bundle []byte) []*x509.Certificate {
	var all []*x509.Certificate
	for block, rest := pem.Decode(bundle); block != nil; block, rest = pem.Decode(rest) {
		if certificate, err := x509.ParseCertificate(block.Bytes); err == nil {
			all = append(all, certificate)
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

// trust writes the CAs to trust into all that has to trust them, if they differ, and returns them: the CA, and the ones
// that these objects or the Secret had before. So it does not matter who reads what first, nor which of them was lost.
func (s *Issuer) trust(ctx context.Context, ca *rotator.KeyPairArtifacts, secret []byte, now time.Time) ([]byte, error) {
	callers, err := s.callers(ctx)
	if err != nil {
		return nil, err
	}
	before, isTrusted := certificatesOf(secret), true
	for _, c := range callers {
		for _, had := range c.bundles {
			has := certificatesOf(*had)
			before, isTrusted = append(before, has...), isTrusted && slices.ContainsFunc(has, ca.Cert.Equal)
		}
	}
	roots := bundle(ca, before, now)
	for _, c := range callers {
		if err := s.put(ctx, c, roots); err != nil {
			return nil, fmt.Errorf("put the CA into %s: %w", c.about, err)
		}
	}
	if !isTrusted {
		s.trustedAt = now
	}
	return roots, nil
}

// A caller is an object by which the API server calls the Service.
type caller struct {
	about string
	// bundles are the object's own fields with the CAs that the API server trusts.
	bundles []*[]byte
	// write writes the object, unless somebody else has written it since it was read: one with an older Secret must not
	// overwrite the CA of a faster one.
	write func(context.Context) error
}

// callers are the webhook configurations, of which only the mutating one has to exist, and the definitions whose objects
// the Service converts.
func (s *Issuer) callers(ctx context.Context) ([]caller, error) {
	mutating, validating := &admissionregistrationv1.MutatingWebhookConfiguration{}, &admissionregistrationv1.ValidatingWebhookConfiguration{}
	name := types.NamespacedName{Name: s.WebhookConfiguration}
	if err := s.client.Get(ctx, name, mutating); err != nil {
		return nil, fmt.Errorf("read MutatingWebhookConfiguration %s, which has to exist: %w", s.WebhookConfiguration, err)
	}
	if err := s.client.Get(ctx, name, validating); client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("read ValidatingWebhookConfiguration %s: %w", s.WebhookConfiguration, err)
	}
	mutates := caller{about: "MutatingWebhookConfiguration " + s.WebhookConfiguration, write: s.patch(mutating)}
	for i := range mutating.Webhooks {
		mutates.bundles = append(mutates.bundles, &mutating.Webhooks[i].ClientConfig.CABundle)
	}
	validates := caller{about: "ValidatingWebhookConfiguration " + s.WebhookConfiguration, write: s.patch(validating)}
	for i := range validating.Webhooks {
		validates.bundles = append(validates.bundles, &validating.Webhooks[i].ClientConfig.CABundle)
	}
	callers := []caller{mutates, validates}
	for _, name := range s.Definitions {
		definition := &apiextensionsv1.CustomResourceDefinition{}
		if err := s.client.Get(ctx, types.NamespacedName{Name: name}, definition); client.IgnoreNotFound(err) != nil {
			return nil, fmt.Errorf("read CustomResourceDefinition %s: %w", name, err)
		}
		if config := s.converts(definition); config != nil {
			callers = append(callers, caller{
				"CustomResourceDefinition " + name, []*[]byte{&config.CABundle},
				func(ctx context.Context) error { return s.applyConversion(ctx, definition) },
			})
		}
	}
	return callers, nil
}

// converts is how the API server calls the Service to convert the definition's objects; nil if it does not.
func (s *Issuer) converts(definition *apiextensionsv1.CustomResourceDefinition) *apiextensionsv1.WebhookClientConfig {
	conversion := definition.Spec.Conversion
	if conversion == nil || conversion.Webhook == nil || conversion.Webhook.ClientConfig == nil {
		return nil
	}
	config := conversion.Webhook.ClientConfig
	if config.Service == nil || config.Service.Name != s.Service || config.Service.Namespace != s.Secret.Namespace {
		return nil
	}
	return config
}

// put writes the roots into the bundles of a caller, unless all have them.
func (s *Issuer) put(ctx context.Context, c caller, roots []byte) error {
	changed := false
	for _, bundle := range c.bundles {
		if !bytes.Equal(*bundle, roots) {
			*bundle, changed = roots, true
		}
	}
	if !changed {
		return nil
	}
	return c.write(ctx)
}

// patch writes what differs from the object as it is now.
func (s *Issuer) patch(object client.Object) func(context.Context) error {
	before := object.DeepCopyObject().(client.Object)
	return func(ctx context.Context) error {
		return s.client.Patch(ctx, object, client.StrategicMergeFrom(before, client.MergeFromWithOptimisticLock{}), fieldOwner)
	}
}

// applyConversion writes how the definition's objects are converted, and becomes an owner of all of it. Otherwise, who
// installed the definition by server-side apply could not go back to one without a conversion: the CA would be left
// alone, which is not valid.
func (s *Issuer) applyConversion(ctx context.Context, definition *apiextensionsv1.CustomResourceDefinition) error {
	conversion, err := runtime.DefaultUnstructuredConverter.ToUnstructured(definition.Spec.Conversion)
	if err != nil {
		return err
	}
	object := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"conversion": conversion}}}
	object.SetGroupVersionKind(apiextensionsv1.SchemeGroupVersion.WithKind("CustomResourceDefinition"))
	object.SetName(definition.Name)
	object.SetResourceVersion(definition.ResourceVersion)
	return s.client.Apply(ctx, client.ApplyConfigurationFromUnstructured(object), fieldOwner, client.ForceOwnership)
}
