// Package nodeos knows which nodes Evenkeel leaves alone for their operating system.
package nodeos

import corev1 "k8s.io/api/core/v1"

// IsWindows reports whether the node runs Windows. NCCL does not, nor does any image of Evenkeel. The kubelet sets the label.
func IsWindows(node *corev1.Node) bool {
	return node.Labels[corev1.LabelOSStable] == string(corev1.Windows)
}
