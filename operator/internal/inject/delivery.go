package inject

import (
	"fmt"
	"path"
	"slices"

	corev1 "k8s.io/api/core/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

const (
	// MountPath is where the plugin image's root appears in a container, in both deliveries.
	MountPath = "/opt/evenkeel"
	// Library is the file that NCCL loads.
	Library = "libnccl-net-evenkeel.so"
	// shortName is what containers with an old NCCL or RCCL, which takes no path, set themselves.
	shortName = "evenkeel"

	volumeName  = "evenkeel"
	installName = "evenkeel-install"
	nonRootUser = 65532
)

// addDelivery brings the plugin's files into the pod and sets NCCL_NET_PLUGIN. A container that mounts something else
// at MountPath is excluded.
func addDelivery(in *injection) error {
	r := in.resolved
	if r.Delivery != evenkeel.DeliveryPreinstalled {
		if err := addVolume(in.pod, r); err != nil {
			return err
		}
		for _, t := range in.targets {
			t.mountLibraries()
		}
	}
	for _, t := range in.targets {
		if t.excluded {
			continue
		}
		t.setEnv(pluginEnv, libraryPath(r), r.Conflict == evenkeel.ConflictReplace)
		if t.usesPlugin = t.has(pluginEnv, libraryPath(r)) || t.has(pluginEnv, shortName); t.usesPlugin {
			t.setEnv(refCountEnv, "1", false)
		}
	}
	return nil
}

// addVolume adds the volume with the files and, for delivery InitContainer, the container that copies them into it.
func addVolume(pod *corev1.Pod, r Resolved) error {
	if err := checkVolumeName(pod, volumeName); err != nil {
		return err
	}
	if hasInstall(pod) {
		return fmt.Errorf("the pod has an init container named %q already: Evenkeel needs that name, rename yours", installName)
	}
	source := corev1.VolumeSource{Image: &corev1.ImageVolumeSource{Reference: r.Image, PullPolicy: corev1.PullIfNotPresent}}
	if r.Delivery == evenkeel.DeliveryInitContainer {
		source = corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}
		// First, so that the user's own init containers find the files too.
		pod.Spec.InitContainers = slices.Insert(pod.Spec.InitContainers, 0, installContainer(pod, r))
	}
	pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: volumeName, VolumeSource: source})
	for _, name := range r.ImagePullSecrets {
		if secret := (corev1.LocalObjectReference{Name: name}); !slices.Contains(pod.Spec.ImagePullSecrets, secret) {
			pod.Spec.ImagePullSecrets = append(pod.Spec.ImagePullSecrets, secret)
		}
	}
	return nil
}

// restoreInstall puts the container that copies the files back into an injected pod, from which a webhook that came later has taken it,
// as those do that replace the list. Its volume would be empty, and NCCL would do without the plugin.
func restoreInstall(pod *corev1.Pod, r Resolved) {
	if r.Delivery == evenkeel.DeliveryInitContainer && !hasInstall(pod) && !forWindows(&pod.Spec) {
		pod.Spec.InitContainers = slices.Insert(pod.Spec.InitContainers, 0, installContainer(pod, r))
	}
}

func hasInstall(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Spec.InitContainers, func(c corev1.Container) bool { return c.Name == installName })
}

// DeliveredImage is the image that a pod has the plugin's files from; empty: it gets none.
func DeliveredImage(spec *corev1.PodSpec) string {
	for i := range spec.InitContainers {
		if c := &spec.InitContainers[i]; c.Name == installName {
			return c.Image
		}
	}
	for i := range spec.Volumes {
		if v := &spec.Volumes[i]; v.Name == volumeName && v.Image != nil {
			return v.Image.Reference
		}
	}
	return ""
}

func (t *target) mountLibraries() {
	if slices.ContainsFunc(t.VolumeMounts, func(m corev1.VolumeMount) bool { return path.Clean(m.MountPath) == MountPath }) {
		t.excluded = true
		t.skip("mounts %s itself", MountPath)
		return
	}
	t.VolumeMounts = append(t.VolumeMounts, corev1.VolumeMount{Name: volumeName, MountPath: MountPath, ReadOnly: true})
}

// libraryPath is where containers find the library.
func libraryPath(r Resolved) string {
	if r.Delivery == evenkeel.DeliveryPreinstalled {
		return path.Join(r.Path, Library)
	}
	return path.Join(MountPath, r.Path, Library)
}

// checkVolumeName returns an error if the user has a volume of a name that Evenkeel needs.
func checkVolumeName(pod *corev1.Pod, volume string) error {
	if hasVolume(pod, volume) {
		return fmt.Errorf("the pod has a volume named %q already: Evenkeel needs that name, rename yours", volume)
	}
	return nil
}

func hasVolume(pod *corev1.Pod, volume string) bool {
	return slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == volume })
}

// installContainer copies the files. Its security context fits the restricted pod standard, whatever the pod's own says.
func installContainer(pod *corev1.Pod, r Resolved) corev1.Container {
	yes, no := true, false
	return corev1.Container{
		Name:            installName,
		Image:           r.Image,
		ImagePullPolicy: corev1.PullIfNotPresent,
		Command:         []string{"/evenkeel-install"},
		Args:            []string{r.Path, MountPath + r.Path},
		VolumeMounts:    []corev1.VolumeMount{{Name: volumeName, MountPath: MountPath}},
		Resources:       r.installResources(pod),
		SecurityContext: &corev1.SecurityContext{
			RunAsNonRoot: &yes, RunAsUser: installUser(pod), ReadOnlyRootFilesystem: &yes, AllowPrivilegeEscalation: &no,
			Capabilities:   &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
			SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
		},
	}
}

// installUser is nil wherever the container then gets a user that is not root: the pod's, the one that the cluster assigns
// to the namespace, or the image's. A user of ours could be outside the range that the namespace allows.
func installUser(pod *corev1.Pod) *int64 {
	if s := pod.Spec.SecurityContext; s == nil || s.RunAsUser == nil || *s.RunAsUser != 0 {
		return nil
	}
	user := int64(nonRootUser)
	return &user
}
