// Package upgrade upgrades the chart with helm on a real API server, from an earlier chart and back.
package upgrade

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/open-policy-agent/cert-controller/pkg/rotator"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/operator/test/apiserver"
)

const (
	// before is the chart that is upgraded from: that of commit 88b103b, from before the certificates had an account of their own. It
	// is a file, since a checkout need not have the whole history.
	before    = "testdata/evenkeel-before.tgz"
	namespace = "evenkeel-system"
	servers   = "registry.example.com/evenkeel-reduction-server:1"
	pinned    = "registry.example.com/evenkeel-plugin@sha256:0000000000000000000000000000000000000000000000000000000000000000"
)

// A cluster is an API server, and helm for it.
type cluster struct {
	root, work string
	config     *rest.Config
	client     client.Client
	helm       func(args ...string)
}

// newCluster starts an API server that ends with the test.
func newCluster(t *testing.T) *cluster {
	t.Helper()
	root, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	work := t.TempDir()
	config, stop, err := apiserver.Start(work)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
	c, err := client.New(config, client.Options{Scheme: clientgoscheme.Scheme})
	if err != nil {
		t.Fatal(err)
	}
	path := kubeconfig(t, config, work, "admin")
	program, err := apiserver.Helm()
	if err != nil {
		t.Fatal(err)
	}
	helm := func(args ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), program, append(args, "--namespace", namespace, "--kubeconfig", path)...)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("helm %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	return &cluster{root, work, config, c, helm}
}

// kubeconfig writes a file for programs.
func kubeconfig(t *testing.T, config *rest.Config, work, name string) string {
	t.Helper()
	k := clientcmdapi.NewConfig()
	k.Clusters["test"] = &clientcmdapi.Cluster{Server: "https://" + strings.TrimPrefix(config.Host, "https://"), CertificateAuthorityData: config.CAData}
	k.AuthInfos["test"] = &clientcmdapi.AuthInfo{
		ClientCertificateData: config.CertData, ClientKeyData: config.KeyData,
		Impersonate: config.Impersonate.UserName, ImpersonateGroups: config.Impersonate.Groups,
	}
	k.Contexts["test"] = &clientcmdapi.Context{Cluster: "test", AuthInfo: "test"}
	k.CurrentContext = "test"
	path := filepath.Join(work, name+".kubeconfig")
	if err := clientcmd.WriteToFile(*k, path); err != nil {
		t.Fatal(err)
	}
	return path
}

// values are those of the chart, old and new.
var values = []string{"--set", "defaultProfile.spec.plugin.image=" + pinned, "--set", "reduction.image=" + servers}

// earlierCertificate is the Secret of the earlier version: its webhook makes CA, key and certificate.
func earlierCertificate(t *testing.T) map[string][]byte {
	t.Helper()
	maker := &rotator.CertRotator{
		CAName: "evenkeel-ca", CAOrganization: "evenkeel.dev", DNSName: "evenkeel-webhook." + namespace + ".svc", ExtKeyUsages: &[]x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	begin, end := time.Now().Add(-time.Hour), time.Now().AddDate(1, 0, 0)
	ca, err := maker.CreateCACert(begin, end)
	if err != nil {
		t.Fatal(err)
	}
	certificate, key, err := maker.CreateCertPEM(ca, begin, end)
	if err != nil {
		t.Fatal(err)
	}
	return map[string][]byte{"ca.crt": ca.CertPEM, "ca.key": ca.KeyPEM, "tls.crt": certificate, "tls.key": key}
}

// issue runs this version's issuer, as its chart does, until the webhook has a certificate, and returns that.
func (c *cluster) issue(t *testing.T) []byte {
	t.Helper()
	stop := c.issuer(t)
	var certificate []byte
	eventually(t, "the webhook has a certificate", func(ctx context.Context) (bool, error) {
		secret := &corev1.Secret{}
		err := c.client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: "evenkeel-webhook-tls"}, secret)
		certificate = secret.Data["tls.crt"]
		return len(certificate) > 0, err
	})
	stop()
	return certificate
}

// issuer runs this version's issuer, with the arguments of its Deployment, until stop.
func (c *cluster) issuer(t *testing.T) (stop func()) {
	t.Helper()
	deployment := &appsv1.Deployment{}
	if err := c.client.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "evenkeel-certificates"}, deployment); err != nil {
		t.Fatal(err)
	}
	args := deployment.Spec.Template.Spec.Containers[0].Args
	return c.program(t, args[0], args[1:]...)
}

// TestChartUpgradeAndRollback has a held job, a running one, and a certificate that the API server trusts. All of them stay: neither
// version makes a CA while webhooks of the other one are there.
func TestChartUpgradeAndRollback(t *testing.T) {
	cluster := newCluster(t)
	c, helm, root := cluster.client, cluster.helm, cluster.root
	helm(append([]string{"install", "evenkeel", before, "--create-namespace"}, values...)...)

	job := func(name string, suspended bool, labels map[string]string) {
		t.Helper()
		pod := corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, Containers: []corev1.Container{{Name: "c", Image: "registry.example.com/train:1"}}}
		object := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Labels: labels}, Spec: batchv1.JobSpec{Suspend: &suspended, Template: corev1.PodTemplateSpec{Spec: pod}}}
		if err := c.Create(t.Context(), object); err != nil {
			t.Fatal(err)
		}
	}
	job("held", true, map[string]string{"evenkeel.dev/gated": "true"})
	job("running", false, nil)
	get := func(key client.ObjectKey, object client.Object) {
		t.Helper()
		if err := c.Get(t.Context(), key, object); err != nil {
			t.Fatal(err)
		}
	}
	secret, webhooks := &corev1.Secret{}, &admissionregistrationv1.MutatingWebhookConfiguration{}
	name := client.ObjectKey{Namespace: namespace, Name: "evenkeel-webhook-cert"}
	get(name, secret)
	get(client.ObjectKey{Name: "evenkeel"}, webhooks)
	made := earlierCertificate(t)
	secret.Data = made
	for i := range webhooks.Webhooks {
		webhooks.Webhooks[i].ClientConfig.CABundle = made["ca.crt"]
	}
	for _, object := range []client.Object{secret, webhooks} {
		if err := c.Update(t.Context(), object); err != nil {
			t.Fatal(err)
		}
	}
	var earlier []string
	for _, w := range webhooks.Webhooks {
		earlier = append(earlier, w.Name)
	}
	stays := func(step string) {
		t.Helper()
		for name, suspended := range map[string]bool{"held": true, "running": false} {
			object := &batchv1.Job{}
			get(client.ObjectKey{Namespace: "default", Name: name}, object)
			if *object.Spec.Suspend != suspended || object.DeletionTimestamp != nil || (object.Labels["evenkeel.dev/gated"] == "true") != suspended {
				t.Errorf("%s: job %s is %+v", step, name, object.ObjectMeta)
			}
		}
		secret, webhooks = &corev1.Secret{}, &admissionregistrationv1.MutatingWebhookConfiguration{}
		get(name, secret)
		for key, value := range made {
			if !bytes.Equal(secret.Data[key], value) {
				t.Errorf("%s: the Secret has another %s: %s", step, key, secret.Data[key])
			}
		}
		get(client.ObjectKey{Name: "evenkeel"}, webhooks)
		kept := 0
		for _, w := range webhooks.Webhooks {
			if !slices.Contains(earlier, w.Name) {
				continue
			}
			kept++
			if !bytes.Equal(w.ClientConfig.CABundle, made["ca.crt"]) {
				t.Errorf("%s: %s trusts %q", step, w.Name, w.ClientConfig.CABundle)
			}
		}
		if kept == 0 {
			t.Errorf("%s: no webhook is left of %q", step, earlier)
		}
	}
	upgrade := func(step string) {
		t.Helper()
		helm(append([]string{"upgrade", "evenkeel", filepath.Join(root, "charts", "evenkeel")}, values...)...)
		stays(step)
		certificate := cluster.issue(t)
		stays(step + ", with this version's issuer")
		block, _ := pem.Decode(certificate)
		leaf, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			t.Fatal(err)
		}
		for _, w := range webhooks.Webhooks {
			roots := x509.NewCertPool()
			roots.AppendCertsFromPEM(w.ClientConfig.CABundle)
			if _, err := leaf.Verify(x509.VerifyOptions{DNSName: "evenkeel-webhook." + namespace + ".svc", Roots: roots}); err != nil {
				t.Errorf("%s: the API server would refuse to call %s: %v", step, w.Name, err)
			}
		}
	}
	upgrade("upgraded")
	helm("rollback", "evenkeel", "1")
	stays("rolled back")
	upgrade("upgraded again")

	// The CA in the CRDs is not in the chart, and is not left alone in them when Helm takes out the conversion.
	helm(append([]string{"upgrade", "evenkeel", filepath.Join(root, "charts", "evenkeel"), "--set", "crds.v1beta1=true"}, values...)...)
	definition := &unstructured.Unstructured{}
	definition.SetAPIVersion("apiextensions.k8s.io/v1")
	definition.SetKind("CustomResourceDefinition")
	conversion := func(fields ...string) (value string) {
		t.Helper()
		get(client.ObjectKey{Name: "networkprofiles.evenkeel.dev"}, definition)
		value, _, err := unstructured.NestedString(definition.Object, append([]string{"spec", "conversion"}, fields...)...)
		if err != nil {
			t.Fatal(err)
		}
		return value
	}
	stop := cluster.issuer(t)
	eventually(t, "the CRDs have the CA", func(context.Context) (bool, error) {
		return conversion("webhook", "clientConfig", "caBundle") != "", nil
	})
	stop()
	stays("with v1beta1")
	helm("rollback", "evenkeel", "1")
	stays("rolled back from v1beta1")
	get(client.ObjectKey{Name: "networkprofiles.evenkeel.dev"}, definition)
	if versions, _, _ := unstructured.NestedSlice(definition.Object, "spec", "versions"); len(versions) != 1 {
		t.Errorf("after the rollback there are %d versions", len(versions))
	}
}
