package certs

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"testing"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// A rig is a SelfManaged over a pretended API server that counts writes.
type rig struct {
	*SelfManaged
	writes int
	// conflict makes the next write of the Secret lose against another replica.
	conflict bool
}

func newRig(data map[string][]byte) *rig {
	r := &rig{SelfManaged: &SelfManaged{
		Secret:               types.NamespacedName{Namespace: "system", Name: "cert"},
		WebhookConfiguration: "evenkeel",
		Service:              "hook",
		clock:                clock.RealClock{},
	}}
	r.client = fake.NewClientBuilder().WithObjects(
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "system", Name: "cert"}, Data: data},
		&admissionregistrationv1.MutatingWebhookConfiguration{
			ObjectMeta: metav1.ObjectMeta{Name: "evenkeel"},
			Webhooks:   []admissionregistrationv1.MutatingWebhook{{Name: "a.evenkeel.dev"}, {Name: "b.evenkeel.dev"}},
		},
	).WithInterceptorFuncs(interceptor.Funcs{
		Update: func(ctx context.Context, c client.WithWatch, object client.Object, options ...client.UpdateOption) error {
			r.writes++
			if r.conflict {
				r.conflict = false
				return apierrors.NewConflict(schema.GroupResource{Resource: "secrets"}, object.GetName(), nil)
			}
			return c.Update(ctx, object, options...)
		},
		Patch: func(ctx context.Context, c client.WithWatch, object client.Object, patch client.Patch, options ...client.PatchOption) error {
			r.writes++
			return c.Patch(ctx, object, patch, options...)
		},
	}).Build()
	return r
}

func (r *rig) reconcile(t *testing.T) reconcile.Result {
	t.Helper()
	result, err := r.Reconcile(t.Context(), reconcile.Request{NamespacedName: r.Secret})
	if err != nil {
		t.Fatal(err)
	}
	return result
}

func (r *rig) data(t *testing.T) map[string][]byte {
	t.Helper()
	secret := &corev1.Secret{}
	if err := r.client.Get(t.Context(), r.Secret, secret); err != nil {
		t.Fatal(err)
	}
	return secret.Data
}

// verify checks what is served against the CA of every webhook, as the API server does.
func (r *rig) verify(t *testing.T, at time.Time) {
	t.Helper()
	served, err := r.GetCertificate(&tls.ClientHelloInfo{})
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
	for _, webhook := range config.Webhooks {
		roots := x509.NewCertPool()
		if !roots.AppendCertsFromPEM(webhook.ClientConfig.CABundle) {
			t.Errorf("%s has no CA", webhook.Name)
			continue
		}
		if _, err := leaf.Verify(x509.VerifyOptions{DNSName: "hook.system.svc", Roots: roots, CurrentTime: at}); err != nil {
			t.Errorf("%s would refuse the certificate: %v", webhook.Name, err)
		}
	}
}

func TestCertificateFromEmptySecret(t *testing.T) {
	r := newRig(nil)
	if err := r.Ready(nil); err == nil {
		t.Error("ready without a certificate")
	}
	r.reconcile(t)
	if err := r.Ready(nil); err != nil {
		t.Errorf("not ready: %v", err)
	}
	r.verify(t, time.Now())
	if r.writes != 2 {
		t.Errorf("%d writes, want one per object", r.writes)
	}
	r.reconcile(t)
	if r.writes != 2 {
		t.Errorf("%d writes after a second look, want none more", r.writes)
	}
}

func TestCertificateRenewalKeepsCA(t *testing.T) {
	r := newRig(nil)
	r.reconcile(t)
	before := r.data(t)
	later := time.Now().Add(serverLifetime - renewBefore/2)
	r.clock = clocktesting.NewFakePassiveClock(later)
	r.reconcile(t)
	after := r.data(t)
	if string(after[corev1.TLSCertKey]) == string(before[corev1.TLSCertKey]) {
		t.Error("the certificate was not renewed")
	}
	if string(after[caKey]) != string(before[caKey]) {
		t.Error("the CA changed with it: other replicas would be refused")
	}
	r.verify(t, later.Add(renewBefore))
}

func TestCertificateDamageIsRepaired(t *testing.T) {
	for name, data := range map[string]map[string][]byte{
		"not PEM":      {caKey: []byte("x"), caKeyKey: []byte("y"), corev1.TLSCertKey: []byte("z"), corev1.TLSPrivateKeyKey: []byte("w")},
		"no server":    nil,
		"foreign keys": nil,
	} {
		t.Run(name, func(t *testing.T) {
			if data == nil {
				first, other := newRig(nil), newRig(nil)
				first.reconcile(t)
				other.reconcile(t)
				data = first.data(t)
				if name == "no server" {
					delete(data, corev1.TLSCertKey)
				} else {
					data[corev1.TLSPrivateKeyKey] = other.data(t)[corev1.TLSPrivateKeyKey]
				}
			}
			r := newRig(data)
			r.reconcile(t)
			r.verify(t, time.Now())
		})
	}
}

func TestCertificateConflictBetweenReplicas(t *testing.T) {
	r := newRig(nil)
	r.conflict = true
	if result := r.reconcile(t); result.RequeueAfter == 0 {
		t.Error("does not look again")
	}
	if r.Ready(nil) == nil {
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
