package inject

import (
	"fmt"
	"path"
	"slices"

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

	keyFolder     = "/var/run/secrets/evenkeel.dev"
	keyVolumeName = "evenkeel-job-key"
	keyEnv        = "EVENKEEL_JOB_KEY"
)

// keyVariables say which key a process has.
var keyVariables = []string{KeyFileEnv, keyEnv}

// JobKey is the Secret with the key that a job's processes prove to each other.
type JobKey struct {
	// Secret is its name.
	Secret string
	// Made is set where Evenkeel makes it. Otherwise the job's user brings it.
	Made bool `json:",omitempty"`
}

// UsersKey returns the Secret that a user named; nil: none. An error is for the user.
func UsersKey(name string) (*JobKey, error) {
	if name == "" {
		return nil, nil
	}
	if len(validation.IsDNS1123Subdomain(name)) > 0 {
		return nil, fmt.Errorf("annotation %s is %q: the name of a Secret with the entry %s, in the job's namespace", evenkeel.JobKeyKey, name, KeyName)
	}
	return &JobKey{Secret: name}, nil
}

// keyFromPod reads and checks what Labels and Annotations wrote; nil: no key but that of the reduction servers.
func keyFromPod(labels, annotations map[string]string) (*JobKey, error) {
	made := labels[evenkeel.JobKeyKey]
	if made == "" || annotations[evenkeel.JobKeyKey] != "" {
		return UsersKey(annotations[evenkeel.JobKeyKey])
	}
	if len(validation.IsDNS1123Subdomain(made)) > 0 {
		return nil, fmt.Errorf("label %s is %q: the name of a Secret", evenkeel.JobKeyKey, made)
	}
	return &JobKey{Secret: made, Made: true}, nil
}

// KeySecret is the Secret with the job's key; empty: the job has none. A job with reduction servers has one key with them.
func (r Resolved) KeySecret() string {
	switch {
	case r.JobKey != nil:
		return r.JobKey.Secret
	case r.Reduction != nil:
		return r.Reduction.Service
	}
	return ""
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

// addJobKey gives the job's key to the containers that run training, and to no other.
func addJobKey(in *injection) error {
	secret := in.resolved.KeySecret()
	if secret == "" {
		if in.resolved.Encrypted() {
			return fmt.Errorf("NetworkProfile %s requires encryption, and the pod has no key: the annotation %s names a Secret of its namespace with the entry %s",
				in.resolved.Profile, evenkeel.JobKeyKey, KeyName)
		}
		return nil
	}
	if err := checkVolumeName(in.pod, keyVolumeName); err != nil {
		return err
	}
	in.pod.Spec.Volumes = append(in.pod.Spec.Volumes, KeyVolume(secret))
	for _, t := range in.targets {
		if t.excluded {
			continue
		}
		if own := t.ownJobKey(in.resolved.Reduction != nil); own != "" {
			without := "the job's key"
			if in.resolved.Reduction != nil {
				without = "the reduction servers"
			}
			t.skip("%s itself, and so does without %s", own, without)
			continue
		}
		t.hasJobKey = true
		t.VolumeMounts = append(t.VolumeMounts, KeyMount())
		t.Env = append(t.Env, corev1.EnvVar{Name: KeyFileEnv, Value: KeyFile})
	}
	return nil
}

// ownJobKey says which part of the key, or of the servers that know it, the container has already; empty for none. Such a container
// gets none of them, since the job's servers know no other key.
func (t *target) ownJobKey(servers bool) string {
	for _, e := range t.Env {
		if slices.Contains(keyVariables, e.Name) || servers && e.Name == serversEnv {
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
