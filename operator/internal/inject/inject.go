// Package inject decides what a pod gets from a profile and adds it. It is pure: a pod and a [Resolved] in, the pod
// with additions out. It only adds; what the user wrote stays, and a second application changes nothing.
package inject

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

const (
	// MountPath is where the plugin image's root appears in a container, in both deliveries.
	MountPath = "/opt/evenkeel"
	// Library is the file that NCCL loads.
	Library = "libnccl-net-evenkeel.so"

	volumeName  = "evenkeel"
	installName = "evenkeel-install"
	pluginEnv   = "NCCL_NET_PLUGIN"
	nonRootUser = 65532
)

// meshSidecars are containers that other injectors add and that run no training.
var meshSidecars = []string{"istio-proxy", "linkerd-proxy"}

// Apply adds the plugin to the pod. The error, if any, is the user's to mend: it says what is wrong with the pod.
func Apply(pod *corev1.Pod, r Resolved) error {
	if pod.Annotations[evenkeel.InjectedKey] != "" && ours(pod, r) {
		return nil
	}
	if pod.Spec.OS != nil && pod.Spec.OS.Name == corev1.Windows {
		annotate(pod, []string{"the pod: NCCL does not run on Windows"}, r)
		return nil
	}
	targets, err := targets(pod, r)
	if err != nil {
		return err
	}
	if err := deliver(pod, r); err != nil {
		return err
	}
	if err := deliverKey(pod, r); err != nil {
		return err
	}
	var skipped []string
	for _, c := range targets {
		skipped = append(skipped, addTo(c, r)...)
	}
	if r.RDMA != nil {
		if why := r.RDMA.join(pod); why != "" {
			skipped = append(skipped, why)
		}
	}
	annotate(pod, skipped, r)
	return nil
}

// ours reports whether the pod carries exactly what Apply would add: the marker alone proves nothing, anyone can write it.
func ours(pod *corev1.Pod, r Resolved) bool {
	if pod.Annotations[evenkeel.InjectedKey] != hash(r) {
		return false
	}
	return (r.Delivery == evenkeel.DeliveryPreinstalled || free(pod, volumeName) != nil) && (r.Reduction == nil || free(pod, keyVolumeName) != nil)
}

// targets are the containers that run training: those the user named, else those that ask for GPUs, else all.
func targets(pod *corev1.Pod, r Resolved) ([]*corev1.Container, error) {
	var all, gpu, named []*corev1.Container
	var names []string
	for i := range pod.Spec.Containers {
		c := &pod.Spec.Containers[i]
		names = append(names, c.Name)
		if slices.Contains(r.Containers, c.Name) {
			named = append(named, c)
		}
		if slices.Contains(meshSidecars, c.Name) {
			continue
		}
		all = append(all, c)
		if wantsGPU(c) {
			gpu = append(gpu, c)
		}
	}
	for _, name := range r.Containers {
		if !slices.Contains(names, name) {
			return nil, fmt.Errorf("annotation %s names the container %q; the pod has %s", evenkeel.ContainersKey, name, strings.Join(names, ", "))
		}
	}
	switch {
	case len(named) > 0:
		return named, nil
	case len(gpu) > 0:
		return gpu, nil
	default:
		return all, nil
	}
}

func wantsGPU(c *corev1.Container) bool {
	for _, list := range []corev1.ResourceList{c.Resources.Limits, c.Resources.Requests} {
		for name := range list {
			if strings.HasPrefix(string(name), "nvidia.com/") || name == "amd.com/gpu" {
				return true
			}
		}
	}
	return false
}

// deliver adds what brings the files into the pod.
func deliver(pod *corev1.Pod, r Resolved) error {
	if r.Delivery == evenkeel.DeliveryPreinstalled {
		return nil
	}
	source := corev1.VolumeSource{Image: &corev1.ImageVolumeSource{Reference: r.Image, PullPolicy: corev1.PullIfNotPresent}}
	if r.Delivery == evenkeel.DeliveryInitContainer {
		source = corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}
	}
	if err := free(pod, volumeName); err != nil {
		return err
	}
	for _, c := range pod.Spec.InitContainers {
		if c.Name == installName {
			return fmt.Errorf("the pod has an init container named %q already: Evenkeel needs that name, rename yours", installName)
		}
	}
	pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: volumeName, VolumeSource: source})
	if r.Delivery == evenkeel.DeliveryInitContainer {
		// First, so that the user's own init containers find the files too.
		pod.Spec.InitContainers = slices.Insert(pod.Spec.InitContainers, 0, install(r))
	}
	return nil
}

// free reports a volume of the user's that has a name of ours.
func free(pod *corev1.Pod, volume string) error {
	if slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == volume }) {
		return fmt.Errorf("the pod has a volume named %q already: Evenkeel needs that name, rename yours", volume)
	}
	return nil
}

// install copies the files. Its security context fits the restricted pod standard whatever the pod's own says.
func install(r Resolved) corev1.Container {
	yes, no, user := true, false, int64(nonRootUser)
	return corev1.Container{
		Name:            installName,
		Image:           r.Image,
		ImagePullPolicy: corev1.PullIfNotPresent,
		Command:         []string{"/evenkeel-install"},
		Args:            []string{r.Path, MountPath + r.Path},
		VolumeMounts:    []corev1.VolumeMount{{Name: volumeName, MountPath: MountPath}},
		Resources: corev1.ResourceRequirements{
			Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("10m"), corev1.ResourceMemory: resource.MustParse("16Mi")},
			Limits:   corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("64Mi")},
		},
		SecurityContext: &corev1.SecurityContext{
			RunAsNonRoot: &yes, RunAsUser: &user, ReadOnlyRootFilesystem: &yes, AllowPrivilegeEscalation: &no,
			Capabilities:   &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
			SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
		},
	}
}

// addTo adds the mount and the environment to one container and returns what it left alone.
func addTo(c *corev1.Container, r Resolved) []string {
	library := path.Join(r.Path, Library)
	if r.Delivery != evenkeel.DeliveryPreinstalled {
		library = path.Join(MountPath, r.Path, Library)
		for _, m := range c.VolumeMounts {
			if path.Clean(m.MountPath) == MountPath {
				return []string{fmt.Sprintf("container %s: mounts %s itself", c.Name, MountPath)}
			}
		}
		c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: volumeName, MountPath: MountPath, ReadOnly: true})
	}
	var skipped []string
	add := func(name, value string, replace bool) {
		for i := range c.Env {
			if c.Env[i].Name != name {
				continue
			}
			if c.Env[i].ValueFrom == nil && c.Env[i].Value == value {
				return
			}
			if replace {
				c.Env[i] = corev1.EnvVar{Name: name, Value: value}
				return
			}
			skipped = append(skipped, fmt.Sprintf("container %s: sets %s itself", c.Name, name))
			return
		}
		c.Env = append(c.Env, corev1.EnvVar{Name: name, Value: value})
	}
	add(pluginEnv, library, r.Conflict == evenkeel.ConflictReplace)
	reached := false
	if r.Reduction != nil {
		why := ""
		if reached, why = reach(c, r.Reduction); reached {
			add(collNetEnv, "1", false)
		} else {
			skipped = append(skipped, why)
		}
	}
	for _, name := range r.Variables() {
		if reached && slices.Contains(ofJob, name) {
			continue // the job's own, which its servers know too
		}
		add(name, r.Environment[name], false)
	}
	if r.RDMA != nil {
		skipped = append(skipped, r.RDMA.addTo(c)...)
	}
	return skipped
}

func annotate(pod *corev1.Pod, skipped []string, r Resolved) {
	if pod.Annotations == nil {
		pod.Annotations = map[string]string{}
	}
	pod.Annotations[evenkeel.InjectedKey] = hash(r)
	if len(skipped) > 0 {
		pod.Annotations[evenkeel.SkippedKey] = strings.Join(skipped, "; ")
	}
}

func hash(r Resolved) string {
	text, _ := json.Marshal(r) // strings and maps of strings always marshal
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:8])
}
