// Package upgrade upgrades the chart with helm on a real API server, from an earlier chart and back.
package upgrade

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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

// TestChartUpgradeAndRollback has a held job, a running one, and a certificate that the API server trusts. All of them stay.
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
	secret := &corev1.Secret{}
	name := client.ObjectKey{Namespace: namespace, Name: "evenkeel-webhook-cert"}
	get(name, secret)
	secret.Data = map[string][]byte{"tls.crt": []byte("a"), "tls.key": []byte("b"), "ca.crt": []byte("c"), "ca.key": []byte("d")}
	if err := c.Update(t.Context(), secret); err != nil {
		t.Fatal(err)
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
		get(name, secret)
		if string(secret.Data["tls.crt"]) != "a" {
			t.Errorf("%s: the certificate is gone: %v", step, secret.Data)
		}
	}
	helm(append([]string{"upgrade", "evenkeel", filepath.Join(root, "charts", "evenkeel")}, values...)...)
	stays("upgraded")
	helm("rollback", "evenkeel", "1")
	stays("rolled back")
	helm(append([]string{"upgrade", "evenkeel", filepath.Join(root, "charts", "evenkeel")}, values...)...)
	stays("upgraded again")
}
