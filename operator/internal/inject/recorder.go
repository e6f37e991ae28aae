package inject

import (
	"path"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

const (
	// RecorderEnv is what the names of the flight recorder's files begin with: the rank follows.
	RecorderEnv = "EVENKEEL_FLIGHT_RECORDER"

	recorderVolumeName = "evenkeel-flight-recorder"
	recorderFolder     = "/var/run/evenkeel"
	recorderPrefix     = recorderFolder + "/rank_"
	// recorderMiB bounds the files. The kubelet evicts a pod that writes more, so it is much more than they have: a rank's take about 2 MiB,
	// and while they are written again as much a second time.
	recorderMiB = 1024
)

// addFlightRecorder has the Python package write what each rank has called to a volume of the pod, which outlives a container's restart.
// `kubectl evenkeel why` reads it there. A container that says itself where to write keeps that. It goes after the environment, in which the
// profile may say it.
func addFlightRecorder(in *injection) error {
	if !in.resolved.Python {
		return nil
	}
	added := false
	for _, t := range in.targets {
		switch {
		case t.excluded, slices.ContainsFunc(t.Env, func(e corev1.EnvVar) bool { return e.Name == RecorderEnv }):
		case slices.ContainsFunc(t.VolumeMounts, func(m corev1.VolumeMount) bool { return path.Clean(m.MountPath) == recorderFolder }):
			t.skip("mounts %s itself", recorderFolder)
		default:
			added = true
			t.addEnv(corev1.EnvVar{Name: RecorderEnv, Value: recorderPrefix})
			t.VolumeMounts = append(t.VolumeMounts, corev1.VolumeMount{Name: recorderVolumeName, MountPath: recorderFolder})
		}
	}
	if !added {
		return nil
	}
	if err := checkVolumeName(in.pod, recorderVolumeName); err != nil {
		return err
	}
	limit := resource.NewQuantity(recorderMiB<<20, resource.BinarySI)
	in.pod.Spec.Volumes = append(in.pod.Spec.Volumes, corev1.Volume{
		Name: recorderVolumeName, VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{SizeLimit: limit}},
	})
	return nil
}
