// Package jobkey builds the Secret with a job's key. The job's processes prove the key to each other and derive their
// encryption keys from it.
package jobkey

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"regexp"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/inject"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

const (
	use      = "key"
	keyBytes = 32
)

// made are the names that Name returns. The chart's policy for Secrets (keyguard.yaml) contains the same pattern.
var made = regexp.MustCompile(`^[a-z][-a-z0-9]*-` + use + `-[0-9a-f]{8}$`)

// Name returns the name of the Secret that is made for a job that is being created.
func Name(job string, creation types.UID) string { return workload.ObjectName(job, use, creation) }

// IsName reports whether Name may have returned the name. Anybody who may change a job can write another one on it.
func IsName(name string) bool { return made.MatchString(name) }

// New returns a fresh key: 64 hexadecimal digits.
func New() ([]byte, error) {
	random := make([]byte, keyBytes)
	if _, err := rand.Read(random); err != nil {
		return nil, fmt.Errorf("random numbers: %w", err)
	}
	return []byte(hex.EncodeToString(random)), nil
}

// Data are the entries of a Secret with the key.
func Data(key []byte) map[string][]byte { return map[string][]byte{inject.KeyName: key} }

// Secret returns the Secret of a job. It is deleted with the job, and nobody can change it.
func Secret(job *unstructured.Unstructured, name string, key []byte) *corev1.Secret {
	yes, no := true, false
	return &corev1.Secret{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: job.GetNamespace(), Name: name, Labels: map[string]string{evenkeel.JobKeyKey: name},
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: job.GetAPIVersion(), Kind: job.GetKind(), Name: job.GetName(), UID: job.GetUID(),
				Controller: &no, BlockOwnerDeletion: &no, // the job's controller is another one
			}},
		},
		Type: corev1.SecretTypeOpaque, Immutable: &yes, Data: Data(key),
	}
}
