package inject

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// Resolved is a profile as it was when a job was created. It is stored in annotations of the job's pod templates, so that every
// pod of the job gets the same, even one that is restarted a week later.
type Resolved struct {
	// Profile is the profile's name.
	Profile string
	// Image is the plugin image with its digest; empty for Preinstalled.
	Image string
	// ImagePullSecrets are the names of the Secrets to pull it with.
	ImagePullSecrets []string `json:",omitempty"`
	// Delivery is resolved: never Auto.
	Delivery evenkeel.Delivery
	// Path is the folder of the libraries in the image, or in the container for Preinstalled.
	Path string
	// Install are the CPU and memory of the init container that copies the files; nil: the default.
	Install corev1.ResourceList `json:",omitempty"`
	// Conflict is Keep or Replace.
	Conflict evenkeel.ConflictPolicy
	// Python says whether containers find the Python package.
	Python bool `json:",omitempty"`
	// Environment has the variables to add. Variables that a container sets itself stay.
	Environment map[string]string
	// Containers are the names that the user chose; empty: selected by their requests.
	Containers []string
	// JobKey is the Secret with the job's key; nil: that of the reduction servers, if the job has some.
	JobKey *JobKey `json:",omitempty"`
	// Reduction has the job's reduction servers; nil: none.
	Reduction *Reduction `json:",omitempty"`
	// RDMA is the device that containers get; nil: none.
	RDMA *RDMA `json:",omitempty"`
	// TunerUnset says why the job does not get the measurements that its profile has from checks; empty: it gets them, or the profile
	// wants none.
	TunerUnset string `json:"-"`
}

// Resolve resolves a profile. Until the controller has observed the nodes, delivery Auto means InitContainer, which works on every
// node.
func Resolve(profile *evenkeel.NetworkProfile, containers string) Resolved {
	plugin := profile.Spec.Plugin
	r := Resolved{
		Profile:     profile.Name,
		Image:       plugin.Image,
		Delivery:    plugin.Delivery,
		Path:        plugin.LibraryPath(),
		Install:     installList(plugin.InstallResources),
		Conflict:    plugin.ConflictPolicy,
		Python:      plugin.Python == evenkeel.PythonEnabled,
		Environment: map[string]string{},
		Containers:  SplitNames(containers),
	}
	if r.Delivery == "" || r.Delivery == evenkeel.DeliveryAuto {
		r.Delivery = profile.Status.Delivery
		if r.Delivery == "" || profile.Status.ObservedGeneration != profile.Generation {
			r.Delivery = evenkeel.DeliveryInitContainer
		}
	}
	if r.Delivery == evenkeel.DeliveryPreinstalled {
		r.Image = ""
	} else {
		r.ImagePullSecrets = profile.Spec.ImagePullSecrets
	}
	if r.Conflict == "" {
		r.Conflict = evenkeel.ConflictKeep
	}
	r.RDMA = resolveRDMA(profile)
	if mode := profile.Spec.Transport.Mode; mode != "" {
		r.Environment[TransportEnv] = strings.ToLower(string(mode))
	}
	if n := profile.Spec.Transport.TCP.FlowsPerPeer; n != nil {
		r.Environment["EVENKEEL_FLOWS"] = strconv.Itoa(int(*n))
	}
	if strict := plugin.Strict; strict != nil && *strict {
		r.Environment[networkEnv] = networkName
	}
	for _, e := range profile.Spec.Environment {
		r.Environment[e.Name] = e.Value
	}
	r.addEncryption(profile.Spec.Transport)
	return r
}

// Annotations and Labels encode a Resolved; FromPod decodes it.
func (r Resolved) Annotations() map[string]string {
	a := map[string]string{
		evenkeel.DeliveryKey:       string(r.Delivery),
		evenkeel.PluginPathKey:     r.Path,
		evenkeel.ConflictPolicyKey: string(r.Conflict),
	}
	if r.Image != "" {
		a[evenkeel.PluginImageKey] = r.Image
	}
	if len(r.ImagePullSecrets) > 0 {
		a[evenkeel.ImagePullSecretsKey] = strings.Join(r.ImagePullSecrets, ",")
	}
	if r.Install != nil {
		a[evenkeel.InstallResourcesKey] = formatInstall(r.Install)
	}
	if r.Python {
		a[evenkeel.PythonKey] = string(evenkeel.PythonEnabled)
	}
	if len(r.Environment) > 0 {
		text, _ := json.Marshal(r.Environment) // a map of strings always marshals, its keys sorted
		a[evenkeel.EnvironmentKey] = string(text)
	}
	if len(r.Containers) > 0 {
		a[evenkeel.ContainersKey] = strings.Join(r.Containers, ",")
	}
	if r.JobKey != nil && !r.JobKey.Made {
		a[evenkeel.JobKeyKey] = r.JobKey.Secret
	}
	if r.Reduction != nil {
		a[evenkeel.ReductionServersKey] = strings.Join(r.Reduction.Servers, ",")
	}
	if r.RDMA != nil {
		maps.Copy(a, r.RDMA.annotations())
	}
	if r.TunerUnset != "" {
		a[evenkeel.TunerUnsetKey] = r.TunerUnset
	}
	return a
}

// Keys are the labels and annotations that not every Resolved has.
func Keys() []string {
	return append([]string{
		evenkeel.PluginImageKey, evenkeel.ImagePullSecretsKey, evenkeel.InstallResourcesKey, evenkeel.PythonKey, evenkeel.EnvironmentKey, evenkeel.ContainersKey,
		evenkeel.ReductionServersKey, evenkeel.ReductionClientKey, evenkeel.RDMAUnusedKey, evenkeel.JobKeyKey, evenkeel.TunerUnsetKey,
	}, rdmaKeys...)
}

// Labels go with the annotations.
func (r Resolved) Labels() map[string]string {
	l := map[string]string{evenkeel.ProfileKey: r.Profile}
	if r.JobKey != nil && r.JobKey.Made {
		l[evenkeel.JobKeyKey] = r.JobKey.Secret
	}
	if r.Reduction != nil {
		l[evenkeel.ReductionClientKey] = r.Reduction.Service
	}
	return l
}

// FromPod decodes Annotations and Labels. Users can forge them, so everything is checked.
func FromPod(labels, annotations map[string]string) (Resolved, error) {
	r := Resolved{
		Profile:     labels[evenkeel.ProfileKey],
		Image:       annotations[evenkeel.PluginImageKey],
		Delivery:    evenkeel.Delivery(annotations[evenkeel.DeliveryKey]),
		Path:        annotations[evenkeel.PluginPathKey],
		Conflict:    evenkeel.ConflictPolicy(annotations[evenkeel.ConflictPolicyKey]),
		Environment: map[string]string{},
		Containers:  SplitNames(annotations[evenkeel.ContainersKey]),

		ImagePullSecrets: SplitNames(annotations[evenkeel.ImagePullSecretsKey]),
		TunerUnset:       annotations[evenkeel.TunerUnsetKey],
	}
	if r.Delivery == "" {
		return r, fmt.Errorf("label %[1]s=%[2]s without the annotations that go with it: put the annotation %[1]s: %[2]s on the job (PyTorchJob or Job) instead of the label on the pod",
			evenkeel.ProfileKey, r.Profile)
	}
	switch r.Delivery {
	case evenkeel.DeliveryImageVolume, evenkeel.DeliveryInitContainer:
		if !strings.Contains(r.Image, "@sha256:") {
			return r, fmt.Errorf("annotation %s is %q: delivery %s needs an image pinned by digest (name@sha256:...)", evenkeel.PluginImageKey, r.Image, r.Delivery)
		}
	case evenkeel.DeliveryPreinstalled:
	default:
		return r, fmt.Errorf("annotation %s is %q: ImageVolume, InitContainer or Preinstalled", evenkeel.DeliveryKey, r.Delivery)
	}
	for _, name := range r.ImagePullSecrets {
		if len(validation.IsDNS1123Subdomain(name)) > 0 {
			return r, fmt.Errorf("annotation %s names %q: names of Secrets, comma-separated", evenkeel.ImagePullSecretsKey, name)
		}
	}
	if !strings.HasPrefix(r.Path, "/") || strings.Contains(r.Path, "..") {
		return r, fmt.Errorf("annotation %s is %q: an absolute path such as %s", evenkeel.PluginPathKey, r.Path, evenkeel.DefaultPath)
	}
	if r.Conflict != evenkeel.ConflictKeep && r.Conflict != evenkeel.ConflictReplace {
		return r, fmt.Errorf("annotation %s is %q: Keep or Replace", evenkeel.ConflictPolicyKey, r.Conflict)
	}
	switch python := annotations[evenkeel.PythonKey]; python {
	case "":
	case string(evenkeel.PythonEnabled):
		r.Python = true
	default:
		return r, fmt.Errorf("annotation %s is %q: %s, or absent", evenkeel.PythonKey, python, evenkeel.PythonEnabled)
	}
	if text := annotations[evenkeel.EnvironmentKey]; text != "" {
		if err := json.Unmarshal([]byte(text), &r.Environment); err != nil {
			return r, fmt.Errorf("annotation %s: %w: a JSON object of names and values", evenkeel.EnvironmentKey, err)
		}
	}
	var err error
	if r.Install, err = parseInstall(annotations[evenkeel.InstallResourcesKey]); err != nil {
		return r, err
	}
	if r.JobKey, err = keyFromPod(labels, annotations); err != nil {
		return r, err
	}
	if r.Reduction, err = reductionFromPod(labels, annotations); err != nil {
		return r, err
	}
	r.RDMA, err = rdmaFromPod(annotations)
	return r, err
}

// Variables are the names of the environment, sorted, so that equal profiles give equal pods.
func (r Resolved) Variables() []string { return slices.Sorted(maps.Keys(r.Environment)) }

// SplitNames are the names in an annotation, such as [evenkeel.ContainersKey]: separated by commas.
func SplitNames(text string) []string {
	var names []string
	for name := range strings.SplitSeq(text, ",") {
		if name = strings.TrimSpace(name); name != "" {
			names = append(names, name)
		}
	}
	return names
}
