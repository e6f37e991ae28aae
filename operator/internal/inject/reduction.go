package inject

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

const (
	// KeyName is the entry of the job's key in its Secret. KeyFile is its path in containers, and KeyFileEnv the variable that
	// names that path to the plugin and the servers.
	KeyName    = "job-key"
	KeyFile    = keyFolder + "/" + KeyName
	KeyFileEnv = "EVENKEEL_JOB_KEY_FILE"
	// JobEnv is the variable with the job's name for the metrics and log lines of its servers.
	JobEnv = "EVENKEEL_JOB"

	maxJobName    = 63 // the plugin accepts no longer name
	keyFolder     = "/var/run/secrets/evenkeel.dev"
	keyVolumeName = "evenkeel-job-key"
	serversEnv    = "EVENKEEL_REDUCTION_SERVERS"
)

// jobVariables are set by Evenkeel in jobs with reduction servers: addresses and key belong together.
var jobVariables = []string{serversEnv, KeyFileEnv, "EVENKEEL_JOB_KEY"}

// Reduction is how a job's containers reach its reduction servers.
type Reduction struct {
	// Service is the ReductionService's name, and that of the Secret with the job's key.
	Service string
	// Servers are their addresses, host:port.
	Servers []string
}

// JobName is a job's value of JobEnv. A name that is too long is cut, and ends in a hash of the whole.
func JobName(namespace, name string) string {
	whole := namespace + "/" + name
	if len(whole) <= maxJobName {
		return whole
	}
	sum := sha256.Sum256([]byte(whole))
	digits := "-" + hex.EncodeToString(sum[:4])
	return whole[:maxJobName-len(digits)] + digits
}

// KeyVolume is the Secret with the job's key. The kubelet starts no container before the Secret exists.
func KeyVolume(secret string) corev1.Volume {
	mode := int32(0o444) // whatever user the container runs as
	return corev1.Volume{Name: keyVolumeName, VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{
		SecretName: secret, DefaultMode: &mode, Items: []corev1.KeyToPath{{Key: KeyName, Path: KeyName}},
	}}}
}

// KeyMount is the mount of KeyVolume.
func KeyMount() corev1.VolumeMount {
	return corev1.VolumeMount{Name: keyVolumeName, MountPath: keyFolder, ReadOnly: true}
}

// reductionFromPod reads and checks what Labels and Annotations wrote. Nil: the job has no servers.
func reductionFromPod(labels, annotations map[string]string) (*Reduction, error) {
	service, servers := labels[evenkeel.ReductionClientKey], annotations[evenkeel.ReductionServersKey]
	if service == "" && servers == "" {
		return nil, nil
	}
	if service == "" || servers == "" {
		return nil, fmt.Errorf("label %s and annotation %s go together: put the annotation %s on the job instead",
			evenkeel.ReductionClientKey, evenkeel.ReductionServersKey, evenkeel.ReductionKey)
	}
	if errs := validation.IsDNS1123Label(service); errs != nil {
		return nil, fmt.Errorf("label %s is %q: the name of a ReductionService", evenkeel.ReductionClientKey, service)
	}
	r := &Reduction{Service: service, Servers: strings.Split(servers, ",")}
	for _, server := range r.Servers {
		if host, port, err := net.SplitHostPort(server); err != nil || host == "" || port == "" {
			return nil, fmt.Errorf("annotation %s has %q: want host:port,host:port and so on", evenkeel.ReductionServersKey, server)
		}
	}
	return r, nil
}

// addJobKey adds what containers need to use the job's reduction servers: the key, the addresses and NCCL's switch.
func addJobKey(in *injection) error {
	r := in.resolved.Reduction
	if r == nil {
		return nil
	}
	if err := checkVolumeName(in.pod, keyVolumeName); err != nil {
		return err
	}
	in.pod.Spec.Volumes = append(in.pod.Spec.Volumes, KeyVolume(r.Service))
	for _, t := range in.targets {
		if t.excluded {
			continue
		}
		if own := t.ownJobKey(); own != "" {
			t.skip("%s itself, and so does without the reduction servers", own)
			continue
		}
		t.usesServers = true
		t.VolumeMounts = append(t.VolumeMounts, KeyMount())
		t.Env = append(t.Env,
			corev1.EnvVar{Name: KeyFileEnv, Value: KeyFile},
			corev1.EnvVar{Name: serversEnv, Value: strings.Join(r.Servers, ",")})
		t.setEnv(collNetEnv, "1", false)
	}
	return nil
}

// ownJobKey says which part of the key and the addresses the container has already; empty for none. Such a container gets
// none of them, since the job's servers know no other key.
func (t *target) ownJobKey() string {
	for _, e := range t.Env {
		if slices.Contains(jobVariables, e.Name) {
			return "sets " + e.Name
		}
	}
	for _, m := range t.VolumeMounts {
		if path.Clean(m.MountPath) == keyFolder {
			return "mounts " + keyFolder
		}
	}
	return ""
}
