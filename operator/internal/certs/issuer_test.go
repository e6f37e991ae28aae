package certs

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"testing"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// A rig is an issuer and a server over a pretended API server that counts writes.
type rig struct {
	*Issuer
	server *Server
	writes int
	// conflict makes the next write of a Secret lose against another one. trustless: no configuration can be written. wrote, if set, is
	// called after each write.
	conflict, trustless bool
	wrote               func()
}

func newRig(data map[string][]byte) *rig {
	names := Names{Secret: types.NamespacedName{Namespace: "system", Name: "cert"}, WebhookConfiguration: "evenkeel", Service: "hook"}
	r := &rig{Issuer: &Issuer{Names: names, Authority: types.NamespacedName{Namespace: "system", Name: "ca"}, clock: clock.RealClock{}}}
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), apiextensionsv1.AddToScheme(scheme)); err != nil {
		panic(err)
	}
	r.client = fake.NewClientBuilder().WithScheme(scheme).WithObjects(
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "system", Name: "cert"}, Data: data},
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "system", Name: "ca"}},
		&admissionregistrationv1.MutatingWebhookConfiguration{
			ObjectMeta: metav1.ObjectMeta{Name: "evenkeel"},
			Webhooks:   []admissionregistrationv1.MutatingWebhook{{Name: "a.evenkeel.dev"}, {Name: "b.evenkeel.dev"}},
		},
		&admissionregistrationv1.ValidatingWebhookConfiguration{
			ObjectMeta: metav1.ObjectMeta{Name: "evenkeel"},
			Webhooks:   []admissionregistrationv1.ValidatingWebhook{{Name: "c.evenkeel.dev"}},
		},
	).WithInterceptorFuncs(interceptor.Funcs{
		Update: func(ctx context.Context, c client.WithWatch, object client.Object, options ...client.UpdateOption) error {
			r.writes++
			if r.conflict {
				r.conflict = false
				return apierrors.NewConflict(schema.GroupResource{Resource: "secrets"}, object.GetName(), nil)
			}
			err := c.Update(ctx, object, options...)
			if r.wrote != nil {
				r.wrote()
			}
			return err
		},
		Patch: func(ctx context.Context, c client.WithWatch, object client.Object, patch client.Patch, options ...client.PatchOption) error {
			r.writes++
			if r.trustless {
				return apierrors.NewInternalError(errors.New("it is down"))
			}
			err := c.Patch(ctx, object, patch, options...)
			if r.wrote != nil {
				r.wrote()
			}
			return err
		},
	}).Build()
	r.server = &Server{Names: names, client: r.client, clock: r.clock}
	return r
}

// reconcile lets the issuer work, and then the server read.
func (r *rig) reconcile(t *testing.T) reconcile.Result {
	t.Helper()
	result, err := r.Reconcile(t.Context(), reconcile.Request{NamespacedName: r.Secret})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.server.Reconcile(t.Context(), reconcile.Request{NamespacedName: r.Secret}); err != nil {
		t.Fatal(err)
	}
	return result
}

func (r *rig) at(moment time.Time) {
	r.clock = clocktesting.NewFakePassiveClock(moment)
	r.server.clock = r.clock
}

func (r *rig) data(t *testing.T, name types.NamespacedName) map[string][]byte {
	t.Helper()
	secret := &corev1.Secret{}
	if err := r.client.Get(t.Context(), name, secret); err != nil {
		t.Fatal(err)
	}
	return secret.Data
}

// verify checks what is served against the CA of every webhook, as the API server does.
func (r *rig) verify(t *testing.T, at time.Time) {
	t.Helper()
	served, err := r.server.GetCertificate(nil)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(served.Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	config := &admissionregistrationv1.MutatingWebhookConfiguration{}
	if err := r.client.Get(t.Context(), types.NamespacedName{Name: r.WebhookConfiguration}, config); err != nil {
		t.Fatal(err)
	}
	validating := &admissionregistrationv1.ValidatingWebhookConfiguration{}
	if err := r.client.Get(t.Context(), types.NamespacedName{Name: r.WebhookConfiguration}, validating); err != nil {
		t.Fatal(err)
	}
	bundles := map[string][]byte{}
	for _, webhook := range config.Webhooks {
		bundles[webhook.Name] = webhook.ClientConfig.CABundle
	}
	for _, webhook := range validating.Webhooks {
		bundles[webhook.Name] = webhook.ClientConfig.CABundle
	}
	for name, bundle := range bundles {
		roots := x509.NewCertPool()
		if !roots.AppendCertsFromPEM(bundle) {
			t.Errorf("%s has no CA", name)
			continue
		}
		if _, err := leaf.Verify(x509.VerifyOptions{DNSName: "hook.system.svc", Roots: roots, CurrentTime: at}); err != nil {
			t.Errorf("%s would refuse the certificate: %v", name, err)
		}
	}
}

func TestCertificateFromEmptySecret(t *testing.T) {
	r := newRig(nil)
	if err := r.server.Ready(nil); err == nil {
		t.Error("ready without a certificate")
	}
	r.reconcile(t)
	if err := r.server.Ready(nil); err != nil {
		t.Errorf("not ready: %v", err)
	}
	r.verify(t, time.Now())
	if r.writes != 4 {
		t.Errorf("%d writes, want one per object", r.writes)
	}
	r.reconcile(t)
	if r.writes != 4 {
		t.Errorf("%d writes after a second look, want none more", r.writes)
	}
	if _, found := r.data(t, r.Secret)[caKeyKey]; found {
		t.Error("the server can read the CA's key")
	}
}

func TestCertificateRenewalKeepsCA(t *testing.T) {
	r := newRig(nil)
	r.reconcile(t)
	before := r.data(t, r.Secret)
	later := time.Now().Add(serverLifetime - renewBefore/2)
	r.at(later)
	r.reconcile(t)
	after := r.data(t, r.Secret)
	if string(after[corev1.TLSCertKey]) == string(before[corev1.TLSCertKey]) {
		t.Error("the certificate was not renewed")
	}
	if string(after[caKey]) != string(before[caKey]) {
		t.Error("the CA changed with it")
	}
	r.verify(t, later.Add(renewBefore))
}

// TestCertificateOfNewCA has a CA that is replaced. What is served is trusted at any time: a new CA signs nothing before every API
// server has had the time to read it, and the old one is trusted until it expires.
func TestCertificateOfNewCA(t *testing.T) {
	for name, lose := range map[string]func(r *rig, end time.Time) time.Time{
		"it expires soon": func(_ *rig, end time.Time) time.Time { return end.Add(-renewBefore / 2) },
		"its key is lost": func(r *rig, end time.Time) time.Time {
			if err := r.client.Update(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "system", Name: "ca"}}); err != nil {
				t.Fatal(err)
			}
			return end.Add(-caLifetime / 2)
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(nil)
			r.reconcile(t)
			moment := lose(r, time.Now().Add(caLifetime))
			r.at(moment.Add(-serverLifetime / 4))
			if name == "it expires soon" {
				r.at(moment.Add(-renewBefore)) // the server's certificate is renewed by the old CA
			}
			r.reconcile(t)
			r.at(moment)
			before := r.data(t, r.Secret)
			result := r.reconcile(t)
			r.verify(t, moment)
			after := r.data(t, r.Secret)
			if name == "it expires soon" {
				if !bytes.Equal(before[corev1.TLSCertKey], after[corev1.TLSCertKey]) || result.RequeueAfter > trustDelay {
					t.Errorf("the new CA signs at once, or much later: %s", result.RequeueAfter)
				}
				if bytes.Count(after[caKey], []byte("BEGIN")) != 2 {
					t.Errorf("trusted: %s, want both CAs", after[caKey])
				}
			}
			r.at(moment.Add(trustDelay + time.Second))
			r.reconcile(t)
			r.verify(t, moment.Add(renewBefore))
		})
	}
}

func TestCertificateDamageIsRepaired(t *testing.T) {
	for name, damage := range map[string]func(t *testing.T, r *rig, data map[string][]byte){
		"not PEM": func(_ *testing.T, _ *rig, data map[string][]byte) {
			for key := range data {
				data[key] = []byte("x")
			}
		},
		"no server": func(_ *testing.T, _ *rig, data map[string][]byte) { delete(data, corev1.TLSCertKey) },
		"nothing":   func(_ *testing.T, _ *rig, data map[string][]byte) { clear(data) },
		"foreign keys": func(t *testing.T, _ *rig, data map[string][]byte) {
			other := newRig(nil)
			other.reconcile(t)
			data[corev1.TLSPrivateKeyKey] = other.data(t, other.Secret)[corev1.TLSPrivateKeyKey]
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(nil)
			r.reconcile(t)
			secret := &corev1.Secret{}
			if err := r.client.Get(t.Context(), r.Secret, secret); err != nil {
				t.Fatal(err)
			}
			damage(t, r, secret.Data)
			if err := r.client.Update(t.Context(), secret); err != nil {
				t.Fatal(err)
			}
			r.reconcile(t)
			r.verify(t, time.Now())
			if _, found := r.data(t, r.Secret)[caKeyKey]; found {
				t.Error("the server can read the CA's key")
			}
		})
	}
}

func TestCertificateConflict(t *testing.T) {
	r := newRig(nil)
	r.conflict = true
	if result := r.reconcile(t); result.RequeueAfter == 0 {
		t.Error("does not look again")
	}
	if r.server.Ready(nil) == nil {
		t.Error("ready with a certificate that was not written")
	}
	r.reconcile(t)
	r.verify(t, time.Now())
}

func TestCertificateCABundleIsRestored(t *testing.T) {
	r := newRig(nil)
	r.reconcile(t)
	config := &admissionregistrationv1.MutatingWebhookConfiguration{}
	if err := r.client.Get(t.Context(), types.NamespacedName{Name: "evenkeel"}, config); err != nil {
		t.Fatal(err)
	}
	config.Webhooks[1].ClientConfig.CABundle = nil
	if err := r.client.Update(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	r.reconcile(t)
	r.verify(t, time.Now())
}
