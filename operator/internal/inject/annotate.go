package inject

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"strings"

	corev1 "k8s.io/api/core/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// annotate writes on the pod what was injected, and what was left alone.
func annotate(in *injection) error {
	var skipped []string
	for _, t := range in.targets {
		skipped = append(skipped, t.skipped...)
	}
	skipped = append(skipped, in.skippedOfPod...)
	pod := in.pod
	if pod.Annotations == nil {
		pod.Annotations = map[string]string{}
	}
	pod.Annotations[evenkeel.InjectedKey] = hash(in.resolved)
	if len(skipped) > 0 {
		pod.Annotations[evenkeel.SkippedKey] = strings.Join(skipped, "; ")
	} else {
		delete(pod.Annotations, evenkeel.SkippedKey) // of another pod, from which it was copied
	}
	return nil
}

// isInjected reports whether the pod carries exactly what AddPlugin would add. The annotation alone proves nothing, since
// anyone can write it.
func isInjected(pod *corev1.Pod, r Resolved) bool {
	if pod.Annotations[evenkeel.InjectedKey] != hash(r) {
		return false
	}
	return (r.Delivery == evenkeel.DeliveryPreinstalled || hasVolume(pod, volumeName)) && (r.KeySecret() == "" || hasVolume(pod, keyVolumeName))
}

func hash(r Resolved) string {
	text, _ := json.Marshal(r) // strings and maps of strings always marshal
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:8])
}
