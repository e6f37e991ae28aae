package apiserver

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// IdentityName is the common name of the certificate that API servers present to webhooks, and IdentityFile, in the work folder, has it:
// it signs itself.
const IdentityName, IdentityFile = "kube-apiserver", "webhook-client.crt"

// identity gives the API server a certificate for webhooks, and returns the file for its flag --admission-control-config-file
// (https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers/#authenticate-apiservers).
func identity(work string) (string, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return "", err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: IdentityName}, NotAfter: time.Now().Add(24 * time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	certificate, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return "", err
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return "", err
	}
	certificateFile, keyFile := filepath.Join(work, IdentityFile), filepath.Join(work, "webhook-client.key")
	for path, block := range map[string]*pem.Block{certificateFile: {Type: "CERTIFICATE", Bytes: certificate}, keyFile: {Type: "PRIVATE KEY", Bytes: private}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			return "", err
		}
	}
	all := clientcmdapi.NewConfig()
	all.AuthInfos["*"] = &clientcmdapi.AuthInfo{ClientCertificate: certificateFile, ClientKey: keyFile}
	kubeconfig := filepath.Join(work, "webhook-client.kubeconfig")
	if err := clientcmd.WriteToFile(*all, kubeconfig); err != nil {
		return "", err
	}
	text := "apiVersion: apiserver.config.k8s.io/v1\nkind: AdmissionConfiguration\nplugins:\n"
	for _, plugin := range []string{"MutatingAdmissionWebhook", "ValidatingAdmissionWebhook"} {
		text += fmt.Sprintf("- name: %s\n  configuration: {apiVersion: apiserver.config.k8s.io/v1, kind: WebhookAdmissionConfiguration, kubeConfigFile: %q}\n", plugin, kubeconfig)
	}
	path := filepath.Join(work, "admission.yaml")
	return path, os.WriteFile(path, []byte(text), 0o600)
}
