package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/inject"
	"evenkeel.dev/evenkeel/operator/internal/kube/sweep"
	"evenkeel.dev/evenkeel/operator/internal/nodeos"
)

const (
	// maxPods is the number of pods that are looked at.
	maxPods = 20_000
	// listTimeout is the time for one list with all its pages, so that the others have some too.
	listTimeout = time.Minute
)

// errEnough ends a list.
var errEnough = errors.New("enough objects")

// pages lists objects in pages, each of which visit sees. The list is empty again for the next page, since decoding would otherwise
// write into the objects that visit has kept.
func (d *Doctor) pages(ctx context.Context, list client.ObjectList, visit func() error, options ...client.ListOption) error {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	return sweep.Pages(ctx, d.Client, list, visit, options...)
}

// nodes reads the nodes. A large cluster has megabytes of them, so that only what the checks look at is kept.
func (d *Doctor) nodes(ctx context.Context, s *state) ([]Finding, error) {
	page := &corev1.NodeList{}
	err := d.pages(ctx, page, func() error {
		for i := range page.Items {
			node := &page.Items[i]
			if nodeos.IsWindows(node) {
				continue
			}
			s.images.add(node)
			kept := corev1.Node{}
			kept.Name, kept.Labels = node.Name, node.Labels
			kept.Status.NodeInfo, kept.Status.Capacity, kept.Status.Allocatable = node.Status.NodeInfo, node.Status.Capacity, node.Status.Allocatable
			s.nodes = append(s.nodes, kept)
		}
		page.Items = nil
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	return nil, nil
}

func (d *Doctor) profiles(ctx context.Context, s *state) ([]Finding, error) {
	list := &evenkeel.NetworkProfileList{}
	if err := d.Client.List(ctx, list); err != nil {
		return nil, fmt.Errorf("list networkprofiles: %w", err)
	}
	s.profiles = list.Items
	return nil, nil
}

// pods reads the pods that have a profile. Without Evenkeel there are none.
func (d *Doctor) pods(ctx context.Context, s *state) ([]Finding, error) {
	if !s.installed {
		return nil, nil
	}
	var err error
	s.pods, err = d.listPods(ctx, client.HasLabels{evenkeel.ProfileKey})
	if errors.Is(err, errEnough) {
		return []Finding{{"pods", Note, fmt.Sprintf("the cluster has more than %d pods with a profile: the others were not looked at", maxPods), ""}}, nil
	}
	return nil, err
}

// listPods returns the selected pods with what the checks look at; of the first [maxPods], with [errEnough], if there are more.
func (d *Doctor) listPods(ctx context.Context, options ...client.ListOption) ([]corev1.Pod, error) {
	var pods []corev1.Pod
	page := &corev1.PodList{}
	err := d.pages(ctx, page, func() error {
		for i := range page.Items {
			if len(pods) == maxPods {
				return errEnough
			}
			pods = append(pods, slimPod(&page.Items[i]))
		}
		page.Items = nil
		return nil
	}, options...)
	if errors.Is(err, errEnough) {
		return pods, err
	}
	if err != nil {
		return nil, fmt.Errorf("list pods: %w", err)
	}
	return pods, nil
}

// slimPod keeps of a pod what the checks look at.
func slimPod(pod *corev1.Pod) corev1.Pod {
	kept := corev1.Pod{}
	kept.Namespace, kept.Name = pod.Namespace, pod.Name
	kept.Labels = map[string]string{evenkeel.ProfileKey: pod.Labels[evenkeel.ProfileKey]}
	kept.Annotations = map[string]string{evenkeel.InjectedKey: pod.Annotations[evenkeel.InjectedKey], evenkeel.PluginStatusKey: pod.Annotations[evenkeel.PluginStatusKey]}
	kept.Spec.NodeName = pod.Spec.NodeName
	for _, volume := range pod.Spec.Volumes {
		if volume.Image != nil {
			kept.Spec.Volumes = append(kept.Spec.Volumes, volume)
		}
	}
	for _, c := range pod.Spec.InitContainers {
		kept.Spec.InitContainers = append(kept.Spec.InitContainers, corev1.Container{Name: c.Name, Image: c.Image})
	}
	// Where the plugin is mounted, no other container loads it.
	mounts := func(c corev1.Container) bool {
		return slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == inject.MountPath })
	}
	some := slices.ContainsFunc(pod.Spec.Containers, mounts)
	for _, c := range pod.Spec.Containers {
		if !some || mounts(c) {
			kept.Spec.Containers = append(kept.Spec.Containers, corev1.Container{Name: c.Name, Image: c.Image})
		}
	}
	kept.Status.Phase = pod.Status.Phase
	kept.Status.InitContainerStatuses = waiting(pod.Status.InitContainerStatuses)
	kept.Status.ContainerStatuses = waiting(pod.Status.ContainerStatuses)
	return kept
}

func waiting(all []corev1.ContainerStatus) (kept []corev1.ContainerStatus) {
	for _, s := range all {
		if s.State.Waiting != nil {
			kept = append(kept, corev1.ContainerStatus{Name: s.Name, Image: s.Image, State: corev1.ContainerState{Waiting: s.State.Waiting}})
		}
	}
	return kept
}
