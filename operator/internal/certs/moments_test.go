package certs

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"testing"
	"time"

	"github.com/open-policy-agent/cert-controller/pkg/rotator"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// A pod serves the webhook.
type pod interface {
	// look lets it see what has been written.
	look(t *testing.T)
	// served is nil while the pod is not ready: nobody calls it.
	served() *x509.Certificate
}

// thisVersion is a pod of this version.
type thisVersion struct{ *Server }

func (p thisVersion) look(t *testing.T) {
	// A Secret that is gone leaves the certificate as it is.
	if _, err := p.Reconcile(t.Context(), reconcile.Request{}); client.IgnoreNotFound(err) != nil {
		t.Error(err)
	}
}

func (p thisVersion) served() *x509.Certificate {
	if p.Ready(nil) != nil {
		return nil
	}
	return p.serving.Load().Leaf
}

// earlierVersion is a pod of a version whose webhook made its certificate itself. It serves what it writes, and then trusts that CA
// alone.
type earlierVersion struct {
	*cluster
	// denied: the chart of this version lets it write nothing.
	denied  bool
	serving *tls.Certificate
	ready   bool
}

func (p *earlierVersion) served() *x509.Certificate {
	if !p.ready {
		return nil
	}
	return p.serving.Leaf
}

func (p *earlierVersion) look(t *testing.T) {
	secret := &corev1.Secret{}
	if err := p.client.Get(t.Context(), p.Authority, secret); err != nil {
		t.Fatal(err)
	}
	if secret.Data == nil {
		secret.Data = map[string][]byte{}
	}
	maker := &rotator.CertRotator{CAName: caName, CAOrganization: "evenkeel.dev", DNSName: p.dnsName(), ExtKeyUsages: &[]x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	data, now := secret.Data, p.now.Now()
	soon, begin := now.Add(renewBefore), now.Add(-skew)
	newCA := false
	if ok, err := rotator.ValidCert(data[caKey], data[caKey], data[caKeyKey], caName, nil, soon); err != nil || !ok {
		ca, err := maker.CreateCACert(begin, now.Add(caLifetime))
		if err != nil {
			t.Fatal(err)
		}
		data[caKey], data[caKeyKey], newCA = ca.CertPEM, ca.KeyPEM, true
	}
	if ok, err := rotator.ValidCert(data[caKey], data[corev1.TLSCertKey], data[corev1.TLSPrivateKeyKey], p.dnsName(), maker.ExtKeyUsages, soon); newCA || err != nil || !ok {
		if p.denied {
			return
		}
		ca, err := keyPair(data)
		if err != nil {
			t.Fatal(err)
		}
		if data[corev1.TLSCertKey], data[corev1.TLSPrivateKeyKey], err = maker.CreateCertPEM(ca, begin, now.Add(serverLifetime)); err != nil {
			t.Fatal(err)
		}
		if err := p.client.Update(t.Context(), secret); err != nil {
			t.Fatal(err)
		}
	}
	certificate, err := tls.X509KeyPair(data[corev1.TLSCertKey], data[corev1.TLSPrivateKeyKey])
	if err != nil {
		t.Fatal(err)
	}
	p.serving = &certificate
	config := p.config(t)
	before, changed := config.DeepCopy(), false
	for i := range config.Webhooks {
		if !bytes.Equal(config.Webhooks[i].ClientConfig.CABundle, data[caKey]) {
			config.Webhooks[i].ClientConfig.CABundle, changed = data[caKey], true
		}
	}
	if changed && !p.denied {
		if err := p.client.Patch(t.Context(), config, client.StrategicMergeFrom(before)); err != nil {
			t.Fatal(err)
		}
	}
	p.ready = true
}

// A cluster has pods of one or two versions, and API servers that may be behind.
type cluster struct {
	*rig
	t       *testing.T
	now     *clocktesting.FakePassiveClock
	issuers []*Issuer
	pods    []pod
	// used has what API servers may still trust, by when it was replaced; the last is current.
	used []usedBundle
	// checks is how many served certificates were verified.
	checks int
}

type usedBundle struct {
	roots []byte
	until time.Time
}

func newCluster(t *testing.T) *cluster {
	c := &cluster{rig: newRig(nil), t: t, now: clocktesting.NewFakePassiveClock(time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC))}
	c.clock = c.now
	c.wrote = c.check
	return c
}

func (c *cluster) config(t *testing.T) *admissionregistrationv1.MutatingWebhookConfiguration {
	t.Helper()
	config := &admissionregistrationv1.MutatingWebhookConfiguration{}
	if err := c.client.Get(t.Context(), types.NamespacedName{Name: c.WebhookConfiguration}, config); err != nil {
		t.Fatal(err)
	}
	return config
}

// check verifies what every pod serves as each API server does, which may have read what is current or what was a while ago.
func (c *cluster) check() {
	c.t.Helper()
	now := c.now.Now()
	roots := c.bundle()
	if last := len(c.used) - 1; last < 0 || !bytes.Equal(c.used[last].roots, roots) {
		if last >= 0 {
			c.used[last].until = now
		}
		if len(roots) > 0 { // the first CA is for nobody else
			c.used = append(c.used, usedBundle{roots: roots})
		}
	}
	for i, p := range c.pods {
		leaf := p.served()
		if leaf == nil {
			continue
		}
		for j, used := range c.used {
			if j < len(c.used)-1 && !now.Before(used.until.Add(trustDelay)) {
				continue
			}
			pool := x509.NewCertPool()
			pool.AppendCertsFromPEM(used.roots)
			c.checks++
			if _, err := leaf.Verify(x509.VerifyOptions{DNSName: c.dnsName(), Roots: pool, CurrentTime: now}); err != nil {
				c.t.Fatalf("pod %d, a %T, is refused by an API server with bundle %d of %d: %v", i, p, j, len(c.used), err)
			}
		}
	}
}

// settle lets everybody look until nobody writes any more, and verifies what is served after each look and each write.
func (c *cluster) settle() {
	c.t.Helper()
	for range 20 {
		before := c.writes
		for _, issuer := range c.issuers {
			if _, err := issuer.Reconcile(c.t.Context(), reconcile.Request{}); err != nil {
				c.t.Fatal(err)
			}
			c.check()
		}
		for _, p := range c.pods {
			p.look(c.t)
			c.check()
		}
		if c.writes == before {
			return
		}
	}
	c.t.Fatal("somebody writes again and again")
}

// passes lets twice the time pass that a new CA needs, in which everybody looks.
func (c *cluster) passes() {
	c.t.Helper()
	for range 12 {
		c.now.SetTime(c.now.Now().Add(trustDelay / 6))
		c.settle()
	}
}

func (c *cluster) newIssuer() *Issuer {
	return &Issuer{Names: c.Names, Authority: c.Authority, client: c.client, clock: c.now}
}

func (c *cluster) newPod() pod {
	return thisVersion{&Server{Names: c.Names, client: c.client, clock: c.now}}
}

// earlier adds two pods of an earlier version, as its chart lets them write.
func (c *cluster) earlier() (pods []pod) {
	pods = []pod{&earlierVersion{cluster: c}, &earlierVersion{cluster: c}}
	c.pods = append(c.pods, pods...)
	return pods
}

// this adds two pods and the issuer of this version, whose chart lets pods of earlier versions write nothing.
func (c *cluster) this() (pods []pod) {
	for _, p := range c.pods {
		if p, is := p.(*earlierVersion); is {
			p.denied = true
		}
	}
	c.issuers = append(c.issuers, c.newIssuer())
	pods = []pod{c.newPod(), c.newPod()}
	c.pods = append(c.pods, pods...)
	return pods
}

// only has the pods of the list be there alone, which have to be ready: the others have gone.
func (c *cluster) only(pods []pod) {
	c.t.Helper()
	for _, p := range pods {
		if p.served() == nil {
			c.t.Fatalf("%T is not ready", p)
		}
	}
	c.pods = pods
}

func (c *cluster) remove(name types.NamespacedName) {
	c.t.Helper()
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name}}
	if err := c.client.Delete(c.t.Context(), secret); err != nil {
		c.t.Fatal(err)
	}
}

// create makes an empty Secret, if there is none.
func (c *cluster) create(name types.NamespacedName) {
	c.t.Helper()
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name}}
	if err := c.client.Create(c.t.Context(), secret); err != nil && !apierrors.IsAlreadyExists(err) {
		c.t.Fatal(err)
	}
}

// empty replaces a Secret by an empty one.
func (c *cluster) empty(name types.NamespacedName) {
	c.t.Helper()
	c.remove(name)
	c.create(name)
}

func (c *cluster) bundle() []byte { return c.config(c.t).Webhooks[0].ClientConfig.CABundle }

// Whatever happens to versions and Secrets, each API server trusts what each ready webhook serves at each moment: before and after each
// write, whether or not they have seen it.
func TestCertificateIsTrustedAtEachMoment(t *testing.T) {
	upgrade := func(c *cluster) {
		c.create(c.Secret)
		pods := c.this()
		c.settle()
		c.passes()
		c.only(pods)
	}
	rollback := func(c *cluster) {
		c.earlier()
		// The issuer of this version ends while pods of both versions look.
		c.settle()
		c.issuers = nil
		c.remove(c.Secret) // it is not the earlier chart's
		c.settle()
		c.passes()
		c.only(c.pods[len(c.pods)-2:])
	}
	install := func(c *cluster) {
		pods := c.this()
		c.settle()
		c.only(pods)
		c.passes()
	}
	for name, happens := range map[string]func(c *cluster){
		"an installation": install,
		"an upgrade, a rollback and an upgrade": func(c *cluster) {
			c.earlier()
			c.settle()
			before := c.bundle()
			upgrade(c)
			rollback(c)
			upgrade(c)
			if !bytes.Equal(c.bundle(), before) {
				c.t.Errorf("the CA changed:\n%s\nwant\n%s", c.bundle(), before)
			}
		},
		"a rollback of what this version installed": func(c *cluster) {
			install(c)
			before := c.bundle()
			rollback(c)
			if !bytes.Equal(c.bundle(), before) {
				c.t.Errorf("the CA changed:\n%s\nwant\n%s", c.bundle(), before)
			}
		},
		"an upgrade from a version that had the CA's key elsewhere": func(c *cluster) {
			install(c)
			c.issuers = nil
			secret := &corev1.Secret{}
			if err := c.client.Get(c.t.Context(), c.Authority, secret); err != nil {
				c.t.Fatal(err)
			}
			delete(secret.Data, caKeyKey)
			if err := c.client.Update(c.t.Context(), secret); err != nil {
				c.t.Fatal(err)
			}
			c.empty(c.Secret)
			upgrade(c)
		},
		"another issuer beside it": func(c *cluster) {
			install(c)
			c.issuers = append(c.issuers, c.newIssuer())
			c.empty(c.Authority)
			c.settle()
			c.passes()
		},
		"the server's Secret is emptied": func(c *cluster) {
			install(c)
			c.empty(c.Secret)
			c.settle()
			c.passes()
		},
		"the CA's Secret is emptied": func(c *cluster) {
			install(c)
			c.empty(c.Authority)
			c.settle()
			c.passes()
		},
		"both Secrets are emptied": func(c *cluster) {
			install(c)
			c.empty(c.Authority)
			c.empty(c.Secret)
			c.settle()
			c.passes()
		},
		"both Secrets are emptied, and a pod starts": func(c *cluster) {
			install(c)
			c.empty(c.Authority)
			c.empty(c.Secret)
			c.settle()
			c.pods = append(c.pods, c.newPod())
			c.passes()
			c.only(c.pods[2:])
		},
		"both Secrets are emptied again and again": func(c *cluster) {
			install(c)
			for range 2 * maxEarlierCAs {
				c.empty(c.Authority)
				c.empty(c.Secret)
				c.settle()
				c.passes()
			}
			if has := len(certificatesOf(c.bundle())); has != 1+maxEarlierCAs {
				c.t.Errorf("%d CAs are trusted, want %d", has, 1+maxEarlierCAs)
			}
		},
		"the certificate is renewed": func(c *cluster) {
			install(c)
			c.now.SetTime(c.now.Now().Add(serverLifetime - renewBefore/2))
			c.settle()
			c.passes()
		},
		"the CA is renewed": func(c *cluster) {
			install(c)
			c.pods = nil // for ten years nobody calls
			c.now.SetTime(c.now.Now().Add(caLifetime - 2*renewBefore))
			c.settle()
			c.pods = []pod{c.newPod(), c.newPod()}
			for range 3 {
				c.settle()
				c.passes()
				c.now.SetTime(c.now.Now().Add(renewBefore - 24*time.Hour))
			}
			if c.settle(); len(c.used) != 3 {
				c.t.Errorf("%d bundles were used, want the first CA alone, both, and the second alone", len(c.used))
			}
		},
		"an issuer ends between a new CA and its trust": func(c *cluster) {
			install(c)
			c.empty(c.Authority)
			c.trustless = true
			if _, err := c.issuers[0].Reconcile(c.t.Context(), reconcile.Request{}); err == nil {
				c.t.Error("the issuer has written what it cannot")
			}
			c.trustless = false
			c.now.SetTime(c.now.Now().Add(2 * trustDelay))
			c.issuers = []*Issuer{c.newIssuer()}
			c.settle()
			c.passes()
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t)
			happens(c)
			if c.checks == 0 {
				t.Error("nothing was verified")
			}
			// It ends well: what is served is the Secret's.
			for i, p := range c.pods {
				if _, is := p.(thisVersion); is && !certificatesOf(c.data(t, c.Secret)[corev1.TLSCertKey])[0].Equal(p.served()) {
					t.Errorf("pod %d does not serve the newest certificate", i)
				}
			}
		})
	}
}
