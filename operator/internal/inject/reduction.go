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
	// KeyName is the job's key in its Secret, KeyFile where containers have it, and KeyFileEnv what tells the plugin and the
	// servers so.
	KeyName    = "job-key"
	KeyFile    = keyFolder + "/" + KeyName
	KeyFileEnv = "EVENKEEL_JOB_KEY_FILE"
	// JobEnv is what the job is called in the metrics and log lines of its servers.
	JobEnv = "EVENKEEL_JOB"

	mostJob       = 63 // the plugin takes no longer name
	keyFolder     = "/var/run/secrets/evenkeel.dev"
	keyVolumeName = "evenkeel-job-key"
	serversEnv    = "EVENKEEL_REDUCTION_SERVERS"
	collNetEnv    = "NCCL_COLLNET_ENABLE"
)

// ofJob are the variables that a job with reduction servers has of its own: servers and key belong together.
var ofJob = []string{serversEnv, KeyFileEnv, "EVENKEEL_JOB_KEY"}

// Reduction is how a job's containers reach its reduction servers.
type Reduction struct {
	// Service is the ReductionService's name, and that of the Secret with the job's key.
	Service string
	// Servers are their addresses, host:port.
	Servers []string
}

// JobName is a job's value of JobEnv. What is too long is cut, and ends in digits that other jobs do not have.
func JobName(namespace, name string) string {
	whole := namespace + "/" + name
	if len(whole) <= mostJob {
		return whole
	}
	sum := sha256.Sum256([]byte(whole))
	digits := "-" + hex.EncodeToString(sum[:4])
	return whole[:mostJob-len(digits)] + digits
}

// KeyVolume is the Secret with the job's key. The kubelet starts no container before the Secret is there.
func KeyVolume(secret string) corev1.Volume {
	mode := int32(0o444) // whatever user the container runs as
	return corev1.Volume{Name: keyVolumeName, VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{
		SecretName: secret, DefaultMode: &mode, Items: []corev1.KeyToPath{{Key: KeyName, Path: KeyName}},
	}}}
}

// KeyMount is where containers have it.
func KeyMount() corev1.VolumeMount {
	return corev1.VolumeMount{Name: keyVolumeName, MountPath: keyFolder, ReadOnly: true}
}

// reductionFromPod reads and checks what Labels and Annotations wrote.
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

// deliverKey adds what brings the job's key into the pod.
func deliverKey(pod *corev1.Pod, r Resolved) error {
	if r.Reduction == nil {
		return nil
	}
	if err := free(pod, keyVolumeName); err != nil {
		return err
	}
	pod.Spec.Volumes = append(pod.Spec.Volumes, KeyVolume(r.Reduction.Service))
	return nil
}

// reach adds to the container what it needs to use the servers: all of it, or nothing where it has a part already, since
// the job's servers know no other key. Then why says so.
func reach(c *corev1.Container, r *Reduction) (reached bool, why string) {
	for _, e := range c.Env {
		if slices.Contains(ofJob, e.Name) {
			return false, fmt.Sprintf("container %s: sets %s itself, and so does without the reduction servers", c.Name, e.Name)
		}
	}
	for _, m := range c.VolumeMounts {
		if path.Clean(m.MountPath) == keyFolder {
			return false, fmt.Sprintf("container %s: mounts %s itself, and so does without the reduction servers", c.Name, keyFolder)
		}
	}
	c.VolumeMounts = append(c.VolumeMounts, KeyMount())
	c.Env = append(c.Env,
		corev1.EnvVar{Name: KeyFileEnv, Value: KeyFile},
		corev1.EnvVar{Name: serversEnv, Value: strings.Join(r.Servers, ",")})
	return true, ""
}
