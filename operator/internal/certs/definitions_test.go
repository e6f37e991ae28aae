package certs

import (
	"bytes"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// definition is one whose objects are converted by a Service of the namespace; empty: they are not.
func definition(name, namespace string) *apiextensionsv1.CustomResourceDefinition {
	d := &apiextensionsv1.CustomResourceDefinition{ObjectMeta: metav1.ObjectMeta{Name: name}}
	d.Spec.Conversion = &apiextensionsv1.CustomResourceConversion{Strategy: apiextensionsv1.NoneConverter}
	if namespace != "" {
		service := &apiextensionsv1.ServiceReference{Namespace: namespace, Name: "hook"}
		d.Spec.Conversion = &apiextensionsv1.CustomResourceConversion{
			Strategy: apiextensionsv1.WebhookConverter,
			Webhook: &apiextensionsv1.WebhookConversion{
				ClientConfig: &apiextensionsv1.WebhookClientConfig{Service: service}, ConversionReviewVersions: []string{"v1"},
			},
		}
	}
	return d
}

// TestDefinitionsTrustWhatWebhooksTrust: the API server calls the same server to convert objects, so it trusts the same
// CAs, also while one is replaced. Definitions that do not name the Service stay as they are, and none has to exist.
func TestDefinitionsTrustWhatWebhooksTrust(t *testing.T) {
	r := newRig(nil)
	r.Definitions = []string{"ours", "missing", "none", "foreign"}
	for _, d := range []*apiextensionsv1.CustomResourceDefinition{
		definition("ours", "system"), definition("none", ""), definition("foreign", "elsewhere"),
	} {
		if err := r.client.Create(t.Context(), d); err != nil {
			t.Fatal(err)
		}
	}
	read := func(name string) *apiextensionsv1.CustomResourceDefinition {
		t.Helper()
		d := &apiextensionsv1.CustomResourceDefinition{}
		if err := r.client.Get(t.Context(), types.NamespacedName{Name: name}, d); err != nil {
			t.Fatal(err)
		}
		return d
	}
	check := func(step string, cas int) {
		t.Helper()
		config := (&cluster{rig: r}).config(t)
		got := read("ours").Spec.Conversion.Webhook.ClientConfig.CABundle
		if !bytes.Equal(got, config.Webhooks[0].ClientConfig.CABundle) || bytes.Count(got, []byte("BEGIN")) != cas {
			t.Errorf("%s: trusted are %q, want %d CAs, as in the configuration", step, got, cas)
		}
		if config := read("foreign").Spec.Conversion.Webhook.ClientConfig; config.CABundle != nil {
			t.Errorf("%s: wrote into the definition of another Service", step)
		}
	}
	r.reconcile(t)
	check("at first", 1)
	writes := r.writes
	r.reconcile(t)
	if r.writes != writes {
		t.Errorf("%d writes although nothing has changed", r.writes-writes)
	}

	lost := read("ours")
	lost.Spec.Conversion.Webhook.ClientConfig.CABundle = nil
	if err := r.client.Update(t.Context(), lost); err != nil {
		t.Fatal(err)
	}
	r.reconcile(t)
	check("after it was removed", 1)

	// Another CA, as the key of the first one is lost. The certificate of the first one is served until the API server
	// trusts both.
	served := r.data(t, r.Secret)[corev1.TLSCertKey]
	authority := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "system", Name: "ca"}}
	if err := r.client.Update(t.Context(), authority); err != nil {
		t.Fatal(err)
	}
	r.at(time.Now().Add(time.Minute))
	r.reconcile(t)
	check("with a new CA", 2)
	if !bytes.Equal(served, r.data(t, r.Secret)[corev1.TLSCertKey]) {
		t.Error("the new CA signs before the API server has read it")
	}
}
