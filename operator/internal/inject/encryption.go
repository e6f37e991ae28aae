package inject

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

const (
	// EncryptionEnv is the variable that says whether the plugin and the servers encrypt: off or required.
	EncryptionEnv = "EVENKEEL_ENCRYPTION"
	// EncryptionRequired is its value in jobs of profiles that require it.
	EncryptionRequired = "required"
	// RDMANetworkEnv is the variable that says whether RDMA, which is not encrypted, may be used nevertheless: trusted or untrusted.
	RDMANetworkEnv = "EVENKEEL_RDMA_NETWORK"
)

// encryptionVariables keep a process from sending in clear. NCCL would use its own sockets where the plugin refuses to start, such
// as without a key.
var encryptionVariables = []string{EncryptionEnv, RDMANetworkEnv, networkEnv}

// addEncryption sets the variables with which processes of the profile never send in clear.
func (r *Resolved) addEncryption(transport evenkeel.TransportSpec) {
	if transport.Encryption != evenkeel.EncryptionRequired {
		return
	}
	network := evenkeel.RDMANetworkUntrusted
	if transport.RDMA.Network != "" {
		network = transport.RDMA.Network
	}
	r.Environment[EncryptionEnv] = EncryptionRequired
	r.Environment[RDMANetworkEnv] = strings.ToLower(string(network))
	r.Environment[networkEnv] = networkName
}

// Encrypted reports whether the job's processes encrypt, and refuse peers that do not.
func (r Resolved) Encrypted() bool { return r.Environment[EncryptionEnv] == EncryptionRequired }

// WithoutRDMA reports whether jobs never get an RDMA device, whatever nodes offer.
func WithoutRDMA(transport evenkeel.TransportSpec) bool {
	return transport.Mode == evenkeel.TransportTCP ||
		transport.Encryption == evenkeel.EncryptionRequired && transport.RDMA.Network != evenkeel.RDMANetworkTrusted
}

// InClear is the profile without encryption, for processes that have no key and nothing to hide. They use no other transport than
// with it.
func (r Resolved) InClear() Resolved {
	if !r.Encrypted() {
		return r
	}
	plain := r
	plain.Environment = map[string]string{}
	for name, value := range r.Environment {
		if name != EncryptionEnv && name != RDMANetworkEnv {
			plain.Environment[name] = value
		}
	}
	if r.RDMA == nil {
		plain.Environment[TransportEnv] = "tcp"
	}
	return plain
}

// checkEncryption refuses a pod with a container that would send in clear although the profile requires encryption.
func checkEncryption(in *injection) error {
	r := in.resolved
	if !r.Encrypted() {
		return nil
	}
	for _, t := range in.targets {
		own := ""
		switch {
		case t.excluded:
			own = "mounts " + MountPath
		case !t.usesPlugin:
			own = "sets " + pluginEnv
		}
		for _, name := range encryptionVariables {
			if own == "" && slices.ContainsFunc(t.Env, func(e corev1.EnvVar) bool {
				return e.Name == name && (e.ValueFrom != nil || e.Value != r.Environment[name])
			}) {
				own = "sets " + name
			}
		}
		if own != "" {
			return fmt.Errorf("container %s %s itself, and NetworkProfile %s requires encryption: remove that, or use another profile", t.Name, own, r.Profile)
		}
	}
	return nil
}
