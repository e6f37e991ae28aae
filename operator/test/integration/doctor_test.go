package integration

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/cli"
	"evenkeel.dev/evenkeel/operator/internal/doctor"
)

// doctorOf runs `kubectl evenkeel doctor` as the administrator.
func doctorOf(t *testing.T, args ...string) (status int, findings []doctor.Finding) {
	t.Helper()
	c := clientcmdapi.NewConfig()
	c.Clusters["test"] = &clientcmdapi.Cluster{Server: "https://" + strings.TrimPrefix(config.Host, "https://"), CertificateAuthorityData: config.CAData}
	c.AuthInfos["test"] = &clientcmdapi.AuthInfo{ClientCertificateData: config.CertData, ClientKeyData: config.KeyData}
	c.Contexts["test"] = &clientcmdapi.Context{Cluster: "test", AuthInfo: "test"}
	c.CurrentContext = "test"
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*c, path); err != nil {
		t.Fatal(err)
	}
	var out, errs bytes.Buffer
	status = cli.Run(t.Context(), append([]string{"doctor", "-o", "json", "--kubeconfig", path}, args...), &out, &errs)
	if err := json.Unmarshal(out.Bytes(), &findings); err != nil {
		t.Fatalf("exit status %d, %v: %s%s", status, err, out.String(), errs.String())
	}
	return status, findings
}

func finds(findings []doctor.Finding, status doctor.Status, check, text string) bool {
	for _, f := range findings {
		if f.Status == status && f.Check == check && strings.Contains(f.Message, text) {
			return true
		}
	}
	return false
}

func TestDoctor(t *testing.T) {
	waitProfile(t, "default", func(p *evenkeel.NetworkProfile) bool { return ready(p) != nil })
	const host, hidden = "registry.example.com", "hidden-from-everybody"
	name := newProfile(t, "with-secrets", evenkeel.NetworkProfileSpec{
		ImagePullSecrets: []string{"pull"}, Environment: []evenkeel.EnvironmentVariable{{Name: "EVENKEEL_JOB_KEY", Value: hidden}},
	}).Name
	ns := newNamespace(t, map[string]string{"pod-security.kubernetes.io/enforce": "baseline"})
	pod := labelledPod(ns)
	pod.Labels[evenkeel.ProfileKey] = name
	createPod(t, pod)
	remove(t, pod)

	status, findings := doctorOf(t)
	for _, want := range []doctor.Finding{
		{Check: "kubernetes", Status: doctor.OK, Message: "v1."},
		{Check: "admission", Status: doctor.OK, Message: "the webhook answers"},
		{Check: "certificate", Status: doctor.OK, Message: "pods.evenkeel.dev"},
		// The API server has no controller that starts Deployments here.
		{Check: "operator", Status: doctor.Problem, Message: "evenkeel-webhook: 0 of 2 replicas"},
		{Check: "profiles", Status: doctor.OK, Message: name},
		{Check: "registries", Status: doctor.Problem, Message: "Secret pull of profile " + name + " does not exist, in 1 namespace: " + ns},
		{Check: "registries", Status: doctor.OK, Message: "profile default pulls from registry.example.com without a Secret"},
		{Check: "security", Status: doctor.OK, Message: "with pod standard baseline"},
		{Check: "kueue", Status: doctor.OK, Message: "not installed"},
		{Check: "glibc", Status: doctor.Unknown, Message: "glibc"},
	} {
		if !finds(findings, want.Status, want.Check, want.Message) {
			t.Errorf("no finding %+v in %+v", want, findings)
		}
	}
	if status != cli.ExitFail {
		t.Errorf("exit status %d with problems, want %d", status, cli.ExitFail)
	}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "pull"}, Type: corev1.SecretTypeDockerConfigJson}
	for entry, want := range map[string]doctor.Status{"elsewhere.example.com": doctor.Problem, "https://" + host + "/v1/": doctor.OK} {
		secret.ResourceVersion = ""
		secret.Data = map[string][]byte{corev1.DockerConfigJsonKey: []byte(`{"auths":{"` + entry + `":{"auth":"` + hidden + `"}}}`)}
		if err := admin.Create(t.Context(), secret); err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(t.TempDir(), "bundle.tar.gz")
		if err := os.WriteFile(file, []byte("an older one that others may read"), 0o644); err != nil {
			t.Fatal(err)
		}
		_, findings := doctorOf(t, "--bundle", file)
		if !finds(findings, want, "registries", "Secret pull of profile "+name+" is for") {
			t.Errorf("%s: %+v", entry, findings)
		}
		checkBundle(t, file, hidden, name)
		if err := admin.Delete(t.Context(), secret, client.GracePeriodSeconds(0)); err != nil {
			t.Fatal(err)
		}
	}
}

// TestDoctorOfStranger: somebody without permissions gets a line for each thing that they may not see, and a bundle of the rest.
func TestDoctorOfStranger(t *testing.T) {
	waitProfile(t, "default", func(p *evenkeel.NetworkProfile) bool { return ready(p) != nil })
	file := filepath.Join(t.TempDir(), "bundle.tar.gz")
	status, findings := doctorOf(t, "--as=stranger", "--bundle", file)
	for _, want := range []doctor.Finding{
		{Check: "kubernetes", Status: doctor.OK, Message: "v1."},
		{Check: "nodes", Status: doctor.Unknown, Message: "you may not look"},
		{Check: "networkprofiles", Status: doctor.Unknown, Message: "you may not look"},
		{Check: "operator", Status: doctor.Unknown, Message: "you may not look"},
		{Check: "admission", Status: doctor.Unknown, Message: "a job could not be tried"},
		{Check: "security", Status: doctor.Unknown, Message: "you may not look"},
		{Check: "kueue", Status: doctor.OK, Message: "not installed"},
	} {
		if !finds(findings, want.Status, want.Check, want.Message) {
			t.Errorf("no finding %+v in %+v", want, findings)
		}
	}
	if status != cli.ExitPass {
		t.Errorf("exit status %d without a problem that was seen", status)
	}
	if info, err := os.Stat(file); err != nil || info.Size() == 0 {
		t.Errorf("no bundle: %v", err)
	}
}

// checkBundle asserts that the bundle has what a maintainer needs, and nowhere what nobody may see.
func checkBundle(t *testing.T, path, hidden, profile string) {
	t.Helper()
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if info, err := file.Stat(); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("others may read the bundle: %v %v", info.Mode(), err)
	}
	zipped, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for archive := tar.NewReader(zipped); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		files[strings.TrimPrefix(header.Name, "evenkeel-bundle/")] = string(text)
		if strings.Contains(string(text), hidden) {
			t.Errorf("%s has the secret", header.Name)
		}
	}
	for name, want := range map[string]string{
		"findings.json": "the webhook answers", "version.json": "gitVersion", "networkprofiles.json": profile, "deployments.json": "evenkeel-controller",
		"mutatingwebhookconfigurations.json": "pods.evenkeel.dev", "nodes.json": "", "errors.txt": "",
	} {
		if text, ok := files[name]; !ok || !strings.Contains(text, want) {
			t.Errorf("%s: %t, lacks %q", name, ok, want)
		}
	}
}
