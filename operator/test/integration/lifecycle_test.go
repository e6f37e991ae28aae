package integration

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// stopWebhook stops the webhook; it runs again when the test ends.
func stopWebhook(t *testing.T) {
	t.Helper()
	if err := install.webhook.stop(); err != nil {
		t.Error(err)
	}
	t.Cleanup(func() {
		var err error
		if install.webhook, err = install.startWebhook(); err != nil {
			t.Fatal(err)
		}
	})
}

func TestWebhookOutageRefusesLabelledPodsOnly(t *testing.T) {
	ns := newNamespace(t, nil)
	t.Run("down", func(t *testing.T) {
		stopWebhook(t)
		refused(t, admin.Create(t.Context(), labelledPod(ns)), "pods.evenkeel.dev")
		job, _ := newJob("PyTorchJob", ns, "default")
		refused(t, admin.Create(t.Context(), job), "workloads.evenkeel.dev")
		createPod(t, plainPod(ns))
		for _, kind := range []string{"PyTorchJob", "Job"} {
			job, _ := newJob(kind, ns, "")
			if err := admin.Create(t.Context(), job); err != nil {
				t.Errorf("a %s without the annotation: %v", kind, err)
			}
		}
	})
	if pod := createPod(t, labelledPod(ns)); pod.Annotations[evenkeel.InjectedKey] == "" {
		t.Error("the webhook is back, and the pod was not injected")
	}
}

// TestWebhookOutageLeavesExistingJobsAlone does what people and controllers do with a job that exists, while no webhook answers.
func TestWebhookOutageLeavesExistingJobsAlone(t *testing.T) {
	ns, name, profile := &corev1.Namespace{}, newNamespace(t, nil), newProfile(t, "outlasted", evenkeel.NetworkProfileSpec{})
	var jobs []*unstructured.Unstructured
	for _, kind := range []string{"PyTorchJob", "Job"} {
		job, _ := newJob(kind, name, profile.Name)
		createJob(t, job)
		jobs = append(jobs, job)
	}
	stopWebhook(t)
	for _, job := range jobs {
		patch := func(what, text string) {
			t.Helper()
			if err := admin.Patch(t.Context(), job, client.RawPatch(types.MergePatchType, []byte(text))); err != nil {
				t.Errorf("%s of a %s: %v", what, job.GetKind(), err)
			}
		}
		patch("a label", `{"metadata": {"labels": {"mine": "yes"}}}`)
		patch("the annotation", `{"metadata": {"annotations": {"evenkeel.dev/profile": "another"}}}`)
		if err := admin.Delete(t.Context(), job, client.PropagationPolicy(metav1.DeletePropagationForeground)); err != nil {
			t.Errorf("delete a %s: %v", job.GetKind(), err)
		}
		// The garbage collector does this when the job's pods are gone.
		patch("the finalizers", `{"metadata": {"finalizers": null}}`)
		if err := admin.Get(t.Context(), client.ObjectKeyFromObject(job), job); !apierrors.IsNotFound(err) {
			t.Errorf("the %s is still there: %v", job.GetKind(), err)
		}
	}
	ns.Name = name
	if err := admin.Delete(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	// The controller of namespaces does this when they are empty.
	if err := admin.Get(t.Context(), client.ObjectKeyFromObject(ns), ns); err != nil {
		t.Fatal(err)
	}
	ns.Spec.Finalizers = nil
	if err := admin.SubResource("finalize").Update(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	if err := admin.Get(t.Context(), client.ObjectKeyFromObject(ns), ns); !apierrors.IsNotFound(err) {
		t.Errorf("the namespace is still there: %v", err)
	}
}

// served is the certificate that the webhook presents.
func served(t *testing.T, port int) []byte {
	t.Helper()
	dialer := tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true}} // the API server verifies it, in every other test
	connection, err := dialer.DialContext(t.Context(), "tcp", fmt.Sprintf("localhost:%d", port))
	if err != nil {
		t.Fatal(err)
	}
	defer connection.Close()
	return connection.(*tls.Conn).ConnectionState().PeerCertificates[0].Raw
}

func secret(t *testing.T) *corev1.Secret {
	t.Helper()
	s := &corev1.Secret{}
	if err := admin.Get(t.Context(), client.ObjectKey{Namespace: systemNamespace, Name: "evenkeel-webhook-tls"}, s); err != nil {
		t.Fatal(err)
	}
	return s
}

func TestCertificateRenewal(t *testing.T) {
	ns, before := newNamespace(t, nil), served(t, install.port)
	s := secret(t)
	delete(s.Data, corev1.TLSCertKey)
	delete(s.Data, corev1.TLSPrivateKeyKey)
	if err := admin.Update(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a new certificate is served", func(ctx context.Context) (bool, error) {
		if err := dryRun(ctx, labelledPod(ns)); err != nil {
			return false, fmt.Errorf("meanwhile a pod was refused: %w", err)
		}
		return !bytes.Equal(served(t, install.port), before), nil
	})
	if err := dryRun(t.Context(), labelledPod(ns)); err != nil {
		t.Errorf("with the new certificate: %v", err)
	}
}

// With CA and certificate lost, the webhook serves what it has, which stays trusted until every API server trusts the new CA.
func TestCertificateLost(t *testing.T) {
	ns, lost := newNamespace(t, nil), secret(t)
	authority := &corev1.Secret{}
	if err := admin.Get(t.Context(), client.ObjectKey{Namespace: systemNamespace, Name: "evenkeel-webhook-cert"}, authority); err != nil {
		t.Fatal(err)
	}
	ca := authority.Data["ca.crt"]
	authority.Data, lost.Data = nil, nil
	for _, s := range []*corev1.Secret{authority, lost} {
		if err := admin.Update(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "a new CA is trusted, and has signed", func(ctx context.Context) (bool, error) {
		if err := dryRun(ctx, labelledPod(ns)); err != nil {
			return false, fmt.Errorf("meanwhile a pod was refused: %w", err)
		}
		webhooks := &admissionregistrationv1.MutatingWebhookConfiguration{}
		if err := admin.Get(ctx, client.ObjectKey{Name: "evenkeel"}, webhooks); err != nil {
			return false, err
		}
		for _, w := range webhooks.Webhooks {
			if !bytes.Contains(w.ClientConfig.CABundle, ca) {
				return false, errors.New("the CA of what is served is no longer trusted")
			}
			if bytes.HasPrefix(w.ClientConfig.CABundle, ca) {
				return false, nil
			}
		}
		return len(secret(t).Data[corev1.TLSCertKey]) > 0, nil
	})
}

// A certificate that has expired, as one of a cluster that was off for a year, is replaced. A webhook that has a good one goes on with
// that.
func TestCertificateExpired(t *testing.T) {
	ns, s := newNamespace(t, nil), secret(t)
	authority := &corev1.Secret{}
	if err := admin.Get(t.Context(), client.ObjectKey{Namespace: systemNamespace, Name: "evenkeel-webhook-cert"}, authority); err != nil {
		t.Fatal(err)
	}
	expired, err := expiredCopy(map[string][]byte{corev1.TLSCertKey: s.Data[corev1.TLSCertKey], "ca.crt": authority.Data["ca.crt"], "ca.key": authority.Data["ca.key"]})
	if err != nil {
		t.Fatal(err)
	}
	s.Data[corev1.TLSCertKey] = expired
	if err := admin.Update(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is replaced", func(ctx context.Context) (bool, error) {
		if err := dryRun(ctx, labelledPod(ns)); err != nil {
			return false, fmt.Errorf("meanwhile a pod was refused: %w", err)
		}
		block, _ := pem.Decode(secret(t).Data[corev1.TLSCertKey])
		if block == nil {
			return false, errors.New("the certificate is gone")
		}
		now, err := x509.ParseCertificate(block.Bytes)
		return err == nil && now.NotAfter.After(time.Now()), err
	})
	if now, err := x509.ParseCertificate(served(t, install.port)); err != nil || !now.NotAfter.After(time.Now()) {
		t.Errorf("the webhook serves one that expired at %s, %v", now.NotAfter, err)
	}
}

// expiredCopy returns the certificate of the Secret as it would be if it had expired yesterday.
func expiredCopy(data map[string][]byte) ([]byte, error) {
	decode := func(key string) []byte {
		if block, _ := pem.Decode(data[key]); block != nil {
			return block.Bytes
		}
		return nil
	}
	certificate, err := x509.ParseCertificate(decode(corev1.TLSCertKey))
	if err != nil {
		return nil, err
	}
	ca, err := x509.ParseCertificate(decode("ca.crt"))
	if err != nil {
		return nil, err
	}
	signer, err := tls.X509KeyPair(data["ca.crt"], data["ca.key"])
	if err != nil {
		return nil, err
	}
	certificate.NotBefore, certificate.NotAfter = time.Now().AddDate(-1, 0, 0), time.Now().AddDate(0, 0, -1)
	raw, err := x509.CreateCertificate(rand.Reader, certificate, ca, certificate.PublicKey, signer.PrivateKey)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: raw}), err
}

func TestCertificateSuppliedIsReloaded(t *testing.T) {
	dir := t.TempDir()
	write := func() {
		s := secret(t)
		for _, key := range []string{corev1.TLSCertKey, corev1.TLSPrivateKeyKey} {
			if err := os.WriteFile(filepath.Join(dir, key), s.Data[key], 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	write()
	port, err := freePort()
	if err != nil {
		t.Fatal(err)
	}
	kubeconfig, err := install.kubeconfig("evenkeel-webhook")
	if err != nil {
		t.Fatal(err)
	}
	p, err := launch(install.binary, kubeconfig, []string{"webhook", "--cert-source=Supplied", "--cert-dir=" + dir, fmt.Sprintf("--port=%d", port)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.stop(); err != nil {
			t.Error(err)
		}
	})
	before := served(t, port)

	s := secret(t)
	delete(s.Data, corev1.TLSCertKey)
	if err := admin.Update(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the Secret has another certificate", func(context.Context) (bool, error) {
		return len(secret(t).Data[corev1.TLSCertKey]) > 0, nil
	})
	write()
	eventually(t, "it is served", func(context.Context) (bool, error) {
		return !bytes.Equal(served(t, port), before), nil
	})
	series, err := p.scrape()
	if err != nil || len(series["evenkeel_webhook_certificate_expiry_timestamp_seconds"]) != 1 {
		t.Errorf("when it expires: %v, %v", series["evenkeel_webhook_certificate_expiry_timestamp_seconds"], err)
	}
}

// newNode makes a node that goes with the test.
func newNode(t *testing.T, name, kubelet, containerRuntime string, labels map[string]string) {
	t.Helper()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}
	if err := admin.Create(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	remove(t, node)
	node.Status.NodeInfo = corev1.NodeSystemInfo{KubeletVersion: kubelet, ContainerRuntimeVersion: containerRuntime}
	if err := admin.Status().Update(t.Context(), node); err != nil {
		t.Fatal(err)
	}
}

func TestProfileStatusFollowsTheNodes(t *testing.T) {
	pool := map[string]string{"pool": "status"}
	profile := newProfile(t, "status", evenkeel.NetworkProfileSpec{NodeSelector: &metav1.LabelSelector{MatchLabels: pool}})
	status := func(nodes int32, delivery evenkeel.Delivery, reason string) func(*evenkeel.NetworkProfile) bool {
		return func(p *evenkeel.NetworkProfile) bool {
			c := ready(p)
			return c != nil && c.Status == metav1.ConditionTrue && c.Reason == reason && p.Status.Delivery == delivery && p.Status.MatchedNodes != nil && *p.Status.MatchedNodes == nodes
		}
	}
	waitProfile(t, profile.Name, status(0, evenkeel.DeliveryInitContainer, "NoNodes"))
	newNode(t, "modern", "v1.36.3", "containerd://2.1.4", pool)
	newNode(t, "elsewhere", "v1.30.0", "containerd://1.7.0", nil)
	p := waitProfile(t, profile.Name, status(1, evenkeel.DeliveryImageVolume, "Resolved"))
	if p.Status.Plugin.Image != image || p.Status.Plugin.Digest != "sha256:"+zeros {
		t.Errorf("plugin %+v", p.Status.Plugin)
	}
	newNode(t, "old", "v1.30.0", "containerd://1.7.0", pool)
	waitProfile(t, profile.Name, status(2, evenkeel.DeliveryInitContainer, "Resolved"))

	ns := newNamespace(t, nil)
	job, templates := newJob("PyTorchJob", ns, profile.Name)
	createJob(t, job)
	if pod := createPod(t, podOf(t, job, templates[0])); len(pod.Spec.InitContainers) != 1 {
		t.Errorf("an old node matches, and yet the pod has no init container: %+v", pod.Spec)
	}
}

func TestProfileValidation(t *testing.T) {
	spec := func(change func(*evenkeel.NetworkProfileSpec)) evenkeel.NetworkProfileSpec {
		s := evenkeel.NetworkProfileSpec{Plugin: evenkeel.PluginSpec{Image: image}}
		change(&s)
		return s
	}
	zero := int32(0)
	for want, bad := range map[string]evenkeel.NetworkProfileSpec{
		"pin the image by digest":           spec(func(s *evenkeel.NetworkProfileSpec) { s.Plugin.Image = "registry.example.com/plugin:latest" }),
		"image is required unless delivery": spec(func(s *evenkeel.NetworkProfileSpec) { s.Plugin.Image = ""; s.Plugin.Delivery = evenkeel.DeliveryAuto }),
		"path is absolute":                  spec(func(s *evenkeel.NetworkProfileSpec) { s.Plugin.Path = "/plugin/../etc" }),
		"spec.plugin.delivery":              spec(func(s *evenkeel.NetworkProfileSpec) { s.Plugin.Delivery = "Pigeon" }),
		"spec.transport.tcp.flowsPerPeer":   spec(func(s *evenkeel.NetworkProfileSpec) { s.Transport.TCP.FlowsPerPeer = &zero }),
		"spec.transport.mode":               spec(func(s *evenkeel.NetworkProfileSpec) { s.Transport.Mode = "Carrier" }),
		"spec.transport.rdma.resourceName":  spec(func(s *evenkeel.NetworkProfileSpec) { s.Transport.RDMA.ResourceName = "hca" }),
		"is an extended resource":           spec(func(s *evenkeel.NetworkProfileSpec) { s.Transport.RDMA.ResourceName = "kubernetes.io/hca" }),
		"spec.transport.rdma.count":         spec(func(s *evenkeel.NetworkProfileSpec) { s.Transport.RDMA.Count = &zero }),
		"NCCL_NET_PLUGIN is set by Evenkeel": spec(func(s *evenkeel.NetworkProfileSpec) {
			s.Environment = []evenkeel.EnvironmentVariable{{Name: "NCCL_NET_PLUGIN", Value: "x"}}
		}),
		"plugin.strict sets NCCL_NET": spec(func(s *evenkeel.NetworkProfileSpec) {
			yes := true
			s.Plugin.Strict = &yes
			s.Environment = []evenkeel.EnvironmentVariable{{Name: "NCCL_NET", Value: "IB"}}
		}),
	} {
		refused(t, dryRun(t.Context(), &evenkeel.NetworkProfile{ObjectMeta: metav1.ObjectMeta{Name: "bad"}, Spec: bad}), want)
	}
}

func TestSampleProfile(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "config", "samples", "networkprofile.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	p := &evenkeel.NetworkProfile{}
	if err := yaml.UnmarshalStrict(text, p); err != nil {
		t.Fatal(err)
	}
	if err := admin.Create(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	remove(t, p)
	waitProfile(t, p.Name, func(p *evenkeel.NetworkProfile) bool {
		c := ready(p)
		return c != nil && c.Status == metav1.ConditionTrue
	})
}

func TestDefaultProfileAppliedByLeader(t *testing.T) {
	flows := func(p *evenkeel.NetworkProfile) int32 {
		if p.Spec.Transport.TCP.FlowsPerPeer == nil {
			return 0
		}
		return *p.Spec.Transport.TCP.FlowsPerPeer
	}
	p := waitProfile(t, "default", func(p *evenkeel.NetworkProfile) bool { return ready(p) != nil })
	chart := flows(p)
	// A user changes one field that the chart sets, and two that it does not.
	patch := fmt.Sprintf(`{"metadata": {"labels": {"mine": "kept"}}, "spec": {"environment": [{"name": "NCCL_DEBUG", "value": "INFO"}], "transport": {"tcp": {"flowsPerPeer": %d}}}}`, chart+1)
	if err := admin.Patch(t.Context(), p, client.RawPatch("application/merge-patch+json", []byte(patch))); err != nil {
		t.Fatal(err)
	}

	first := install.controller
	holder := func() string {
		lease := &coordinationv1.Lease{}
		if err := admin.Get(t.Context(), client.ObjectKey{Namespace: systemNamespace, Name: "evenkeel-controller"}, lease); err != nil {
			t.Fatal(err)
		}
		if lease.Spec.HolderIdentity == nil {
			return ""
		}
		return *lease.Spec.HolderIdentity
	}
	leader := holder()
	second, err := install.startController()
	if err != nil {
		t.Fatal(err)
	}
	install.controller = second
	eventually(t, "the second controller has seen that another leads", func(context.Context) (bool, error) {
		return strings.Contains(second.output.String(), "ttempting to acquire leader lease"), nil
	})
	if now := holder(); leader == "" || now != leader {
		t.Errorf("%q led, now %q leads", leader, now)
	}
	if err := admin.Get(t.Context(), client.ObjectKey{Name: "default"}, p); err != nil {
		t.Fatal(err)
	}
	if flows(p) != chart+1 || strings.Contains(second.output.String(), "applied the default profile") {
		t.Errorf("a controller that does not lead applied the default profile: %d flows", flows(p))
	}

	stopped := time.Now()
	if err := first.stop(); err != nil {
		t.Fatal(err)
	}
	p = waitProfile(t, "default", func(p *evenkeel.NetworkProfile) bool { return flows(p) == chart })
	t.Logf("the second controller took over after %s", time.Since(stopped).Round(time.Millisecond))
	if p.Labels["mine"] != "kept" || len(p.Spec.Environment) != 1 {
		t.Errorf("the user's own fields are gone: %v %+v", p.Labels, p.Spec)
	}
}

// A profile that the API server refuses is said on the profile, and does not end the controller: that would close all gates.
func TestDefaultProfileRefusedIsCondition(t *testing.T) {
	applied := func(status metav1.ConditionStatus, part string) func(*evenkeel.NetworkProfile) bool {
		return func(p *evenkeel.NetworkProfile) bool {
			c := meta.FindStatusCondition(p.Status.Conditions, evenkeel.ConditionDefaultApplied)
			// What somebody changed since is another generation.
			return c != nil && c.Status == status && strings.Contains(c.Message, part) && c.ObservedGeneration == p.Generation
		}
	}
	before := waitProfile(t, "default", applied(metav1.ConditionTrue, ""))
	file := filepath.Join(t.TempDir(), "profile.yaml")
	for _, test := range []struct{ spec, part string }{
		{`{plugin: {image: "registry.example.com/plugin:latest"}}`, "pin the image by digest"},
		{`{plugin: {delivry: Auto}}`, "delivry"},
	} {
		if err := os.WriteFile(file, []byte("{apiVersion: evenkeel.dev/v1alpha1, kind: NetworkProfile, metadata: {name: default}, spec: "+test.spec+"}"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := install.controller.stop(); err != nil {
			t.Fatal(err)
		}
		var err error
		if install.controller, err = install.startProgram("evenkeel-controller", "--default-profile="+file, delayScale); err != nil {
			t.Fatal(err)
		}
		p := waitProfile(t, "default", applied(metav1.ConditionFalse, test.part))
		if !equality.Semantic.DeepEqual(p.Spec.Plugin, before.Spec.Plugin) || !install.controller.ready() {
			t.Errorf("%s: spec %+v, conditions %+v", test.spec, p.Spec, p.Status.Conditions)
		}
		waitProfile(t, "default", func(p *evenkeel.NetworkProfile) bool { return ready(p) != nil })
	}
	if err := install.controller.stop(); err != nil {
		t.Fatal(err)
	}
	var err error
	if install.controller, err = install.startController(); err != nil {
		t.Fatal(err)
	}
	waitProfile(t, "default", applied(metav1.ConditionTrue, ""))
}

func TestPermissionsAreNarrow(t *testing.T) {
	for _, test := range []struct {
		account, verb, group, resource, namespace, name string
		want                                            bool
	}{
		{"evenkeel-webhook", "get", "", "secrets", systemNamespace, "evenkeel-webhook-tls", true},
		{"evenkeel-webhook", "update", "", "secrets", systemNamespace, "evenkeel-webhook-tls", false},
		{"evenkeel-webhook", "get", "", "secrets", systemNamespace, "evenkeel-webhook-cert", false},
		{"evenkeel-webhook", "patch", "admissionregistration.k8s.io", "mutatingwebhookconfigurations", "", "evenkeel", false},
		{"evenkeel-controller", "patch", "admissionregistration.k8s.io", "mutatingwebhookconfigurations", "", "evenkeel", false},
		{"evenkeel-controller", "get", "", "secrets", systemNamespace, "evenkeel-webhook-tls", false},
		{"evenkeel-certificates", "patch", "admissionregistration.k8s.io", "mutatingwebhookconfigurations", "", "evenkeel", true},
		{"evenkeel-certificates", "patch", "admissionregistration.k8s.io", "mutatingwebhookconfigurations", "", "another", false},
		{"evenkeel-certificates", "update", "", "secrets", systemNamespace, "evenkeel-webhook-tls", true},
		{"evenkeel-certificates", "update", "", "secrets", systemNamespace, "evenkeel-webhook-cert", true},
		{"evenkeel-certificates", "get", "", "secrets", systemNamespace, "another", false},
		{"evenkeel-certificates", "list", "", "pods", "default", "", false},
		{"evenkeel-certificates", "patch", "apiextensions.k8s.io", "customresourcedefinitions", "", "networkchecks.evenkeel.dev", true},
		{"evenkeel-certificates", "patch", "apiextensions.k8s.io", "customresourcedefinitions", "", "another", false},
		{"evenkeel-certificates", "update", "apiextensions.k8s.io", "customresourcedefinitions", "", "networkchecks.evenkeel.dev", false},
		{"evenkeel-webhook", "patch", "apiextensions.k8s.io", "customresourcedefinitions", "", "networkchecks.evenkeel.dev", false},
		{"evenkeel-webhook", "get", "", "secrets", systemNamespace, "another", false},
		{"evenkeel-webhook", "list", "", "secrets", systemNamespace, "", false},
		{"evenkeel-webhook", "get", "", "secrets", "default", "evenkeel-webhook-tls", false},
		{"evenkeel-webhook", "patch", "admissionregistration.k8s.io", "mutatingwebhookconfigurations", "", "another", false},
		{"evenkeel-webhook", "patch", "admissionregistration.k8s.io", "validatingwebhookconfigurations", "", "evenkeel", false},
		{"evenkeel-certificates", "patch", "admissionregistration.k8s.io", "validatingwebhookconfigurations", "", "evenkeel", true},
		{"evenkeel-certificates", "patch", "admissionregistration.k8s.io", "validatingwebhookconfigurations", "", "another", false},
		{"evenkeel-webhook", "create", "", "pods", "default", "", false},
		{"evenkeel-webhook", "list", "", "limitranges", "default", "", true},
		{"evenkeel-webhook", "update", "", "limitranges", "default", "team", false},
		{"evenkeel-webhook", "get", "", "configmaps", "default", "mine", false},
		// Of which reasons, an admission policy says.
		{"evenkeel-webhook", "create", "", "events", "default", "", true},
		{"evenkeel-webhook", "list", "", "events", "default", "", false},
		{"evenkeel-webhook", "patch", "evenkeel.dev", "networkprofiles", "", "default", false},
		{"evenkeel-controller", "patch", "evenkeel.dev", "networkprofiles", "", "default", true},
		{"evenkeel-controller", "patch", "evenkeel.dev", "networkprofiles", "", "another", false},
		{"evenkeel-controller", "delete", "evenkeel.dev", "networkprofiles", "", "default", false},
		{"evenkeel-controller", "get", "", "secrets", systemNamespace, "evenkeel-webhook-cert", false},
		// Whether its own namespace is being deleted.
		{"evenkeel-controller", "get", "", "namespaces", systemNamespace, systemNamespace, true},
		{"evenkeel-controller", "get", "", "namespaces", "default", "default", true},
		// Of the keys of jobs, it may make new ones.
		{"evenkeel-controller", "create", "", "secrets", "default", "", true},
		{"evenkeel-controller", "get", "", "secrets", "default", "train-reduce-0", false},
		{"evenkeel-controller", "list", "", "secrets", "default", "", false},
		{"evenkeel-controller", "update", "", "secrets", "default", "train-key-01234567", false},
		{"evenkeel-controller", "delete", "", "secrets", "default", "train-key-01234567", false},
		{"evenkeel-controller", "delete", "apps", "statefulsets", "default", "", false},
		// Which of a node's fields, an admission policy says.
		{"evenkeel-controller", "patch", "", "nodes", "", "modern", true},
		{"evenkeel-controller", "update", "", "nodes", "", "modern", false},
		{"evenkeel-controller", "delete", "", "nodes", "", "modern", false},
		{"evenkeel-webhook", "patch", "", "nodes", "", "modern", false},
		{"evenkeel-controller", "create", "", "pods", "default", "", false},
		// Of what is gated, another one.
		{"evenkeel-controller", "patch", "", "pods", "default", "mine", true},
		{"evenkeel-controller", "patch", "batch", "jobs", "default", "mine", true},
		{"evenkeel-controller", "delete", "batch", "jobs", "default", "mine", false},
		{"evenkeel-controller", "patch", "kubeflow.org", "pytorchjobs", "default", "mine", true},
		{"evenkeel-controller", "update", "kubeflow.org", "pytorchjobs", "default", "mine", false},
		{"evenkeel-controller", "patch", "kueue.x-k8s.io", "workloads", "default", "mine", false},
		{"evenkeel-webhook", "patch", "batch", "jobs", "default", "mine", false},
		{"evenkeel-controller", "create", "batch", "jobs", systemNamespace, "", true},
		{"evenkeel-controller", "create", "batch", "jobs", "default", "", false},
		{"evenkeel-controller", "get", "", "configmaps", "default", "mine", false},
		{"evenkeel-controller", "get", "", "pods/log", "default", "mine", false},
		{"evenkeel-controller", "delete", "evenkeel.dev", "networkchecks", "default", "", false},
		{"evenkeel-controller", "update", "coordination.k8s.io", "leases", "kube-system", "evenkeel-controller", false},
	} {
		review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
			User:   fmt.Sprintf("system:serviceaccount:%s:%s", systemNamespace, test.account),
			Groups: []string{"system:serviceaccounts", "system:serviceaccounts:" + systemNamespace, "system:authenticated"},
			ResourceAttributes: &authorizationv1.ResourceAttributes{
				Verb: test.verb, Group: test.group, Resource: test.resource, Namespace: test.namespace, Name: test.name,
			},
		}}
		if err := admin.Create(t.Context(), review); err != nil {
			t.Fatal(err)
		}
		if review.Status.Allowed != test.want {
			t.Errorf("%s may %s %s %s/%s: %t, want %t", test.account, test.verb, test.resource, test.namespace, test.name, review.Status.Allowed, test.want)
		}
	}
}

func TestChartObjectsAreLabelled(t *testing.T) {
	for key, object := range install.objects {
		if label, _, _ := unstructured.NestedString(object.Object, "metadata", "labels", "app.kubernetes.io/instance"); label != "evenkeel" {
			t.Errorf("%s: instance %q", key, label)
		}
	}
}
