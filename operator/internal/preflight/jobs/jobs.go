// Package jobs builds the Kubernetes objects of a check's runs. It is pure: objects and their names follow from the
// check and the planned run alone, so that a restarted controller finds what it created.
package jobs

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/accelerator"
	"evenkeel.dev/evenkeel/operator/internal/inject"
	"evenkeel.dev/evenkeel/operator/internal/preflight"
)

const (
	// Container runs the benchmark, in every pod.
	Container = "benchmark"
	// GraceSeconds is the time after a run's timeout at which Kubernetes ends its pods, if the controller did not.
	GraceSeconds = 60
	// localMaxBytes is the maximum buffer size inside a node: enough to prove that the plugin works.
	localMaxBytes = 4 << 20
	// masterPort is the port of rank 0. Each pod has an address of its own.
	masterPort = 29500
	// mpiTimeoutEnv is how many seconds they wait for each other.
	mpiTimeoutEnv = "EVENKEEL_MPI_TIMEOUT"
)

// waitForDNSScript runs its arguments once the names of all workers of an MPIJob resolve, or after half a minute. ssh
// does not retry a failed lookup.
const waitForDNSScript = `for h in $(cut -d " " -f 1 /etc/mpi/hostfile); do i=0; until getent hosts "$h" >/dev/null || [ $i -gt 150 ]; do i=$((i+1)); sleep 0.2; done; done; exec "$@"`

// printMemlockScript prints the limit of locked memory, in KiB or as "unlimited", and runs its arguments.
const printMemlockScript = `echo "# Locked memory, KiB: $(ulimit -l)"; exec "$@"`

// MPIJobKind is the mpi-operator's kind.
var MPIJobKind = schema.GroupVersionKind{Group: "kubeflow.org", Version: "v2beta1", Kind: "MPIJob"}

// Check is what all runs of a check have in common.
type Check struct {
	Object *evenkeel.NetworkCheck
	// Options include defaults and the runner's image.
	Options evenkeel.CheckOptions
	Plugin  inject.Resolved
	// ImagePullSecrets are the names of the Secrets to pull the runner's image with.
	ImagePullSecrets []string
	// PriorityClass is the pods' own, or empty for the cluster's default.
	PriorityClass string
}

// id distinguishes successive checks of the same name.
func (c Check) id() string {
	sum := sha256.Sum256([]byte(c.Object.UID))
	return hex.EncodeToString(sum[:3])
}

// ServiceName is the name of the check's Service.
func (c Check) ServiceName() string { return "evenkeel-check-" + c.id() }

// ReportName is the name of the check's ConfigMap.
func (c Check) ReportName() string { return c.Object.Name + "-" + c.id() + "-report" }

// RunName is the name of a run's objects. It is a DNS label, and short enough for host names derived from it.
func (c Check) RunName(w preflight.PlannedRun) string {
	name := strings.ReplaceAll(c.Object.Name, ".", "-")
	if name[0] >= '0' && name[0] <= '9' {
		name = "c" + name
	}
	name = strings.TrimRight(name[:min(len(name), 28)], "-")
	return name + "-" + c.id() + "-" + w.Name()
}

// Meta is the metadata of an object that the check owns.
func (c Check) Meta(name string) metav1.ObjectMeta {
	yes, no := true, false
	return metav1.ObjectMeta{
		Namespace: c.Object.Namespace, Name: name, Labels: map[string]string{evenkeel.CheckKey: c.Object.Name},
		OwnerReferences: []metav1.OwnerReference{{
			APIVersion: evenkeel.GroupVersion.String(), Kind: "NetworkCheck", Name: c.Object.Name, UID: c.Object.UID,
			Controller: &yes, BlockOwnerDeletion: &no,
		}},
	}
}

// Service gives the pods of all runs their host names.
func (c Check) Service() *corev1.Service {
	return &corev1.Service{
		ObjectMeta: c.Meta(c.ServiceName()),
		Spec: corev1.ServiceSpec{
			ClusterIP: corev1.ClusterIPNone, Selector: map[string]string{evenkeel.CheckKey: c.Object.Name},
			// Pods are found before they are ready; ranks wait for each other by themselves.
			PublishNotReadyAddresses: true,
		},
	}
}

// Job returns an Indexed Job for the run, with a pod on each node that requests the accelerators.
func (c Check) Job(w preflight.PlannedRun, accelerators corev1.ResourceList) (*batchv1.Job, error) {
	name, size := c.RunName(w), int32(len(w.Nodes))
	var environment []corev1.EnvVar
	if !isSingleNode(w) {
		environment = []corev1.EnvVar{
			{Name: "WORLD_SIZE", Value: strconv.Itoa(len(w.Nodes))},
			{Name: "MASTER_ADDR", Value: name + "-0." + c.ServiceName()},
			{Name: "MASTER_PORT", Value: strconv.Itoa(masterPort)},
		}
	}
	if c.Options.Runner.Type.UsesGPUs() {
		environment = append(environment, corev1.EnvVar{Name: mpiTimeoutEnv, Value: strconv.Itoa(c.rankTimeout())})
	}
	template, err := c.podTemplate(name, w, evenkeel.RoleRank, c.benchmarkCommand(w, evenkeel.LauncherIndexedJob), environment, accelerators)
	if err != nil {
		return nil, err
	}
	template.Spec.Subdomain = c.ServiceName()
	mode, zero, deadline := batchv1.IndexedCompletion, int32(0), int64(*c.Options.RunTimeoutSeconds+GraceSeconds)
	return &batchv1.Job{
		ObjectMeta: c.Meta(name),
		Spec: batchv1.JobSpec{
			CompletionMode: &mode, Completions: &size, Parallelism: &size,
			// By index, so that a failed rank does not delete the others and their logs.
			BackoffLimitPerIndex: &zero, ActiveDeadlineSeconds: &deadline, Template: *template,
		},
	}, nil
}

// MPIJob returns an MPIJob for the run: a worker on each node that requests the accelerators, and a launcher on one of
// them.
func (c Check) MPIJob(w preflight.PlannedRun, accelerators corev1.ResourceList) (*unstructured.Unstructured, error) {
	name, slots := c.RunName(w), c.slots()
	worker, err := c.podTemplate(name, w, evenkeel.RoleRank, []string{"/usr/sbin/sshd", "-De", "-f", "/home/mpiuser/.sshd_config"}, nil, accelerators)
	if err != nil {
		return nil, err
	}
	var environment []corev1.EnvVar
	if !isSingleNode(w) {
		environment = []corev1.EnvVar{
			{Name: "MASTER_ADDR", Value: fmt.Sprintf("%s-worker-0.%s.%s.svc", name, name, c.Object.Namespace)},
			{Name: "MASTER_PORT", Value: strconv.Itoa(masterPort)},
		}
	}
	launcher, err := c.podTemplate(name, w, evenkeel.RoleLauncher, nil, environment, nil)
	if err != nil {
		return nil, err
	}
	// mpirun passes only the variables named by -x to the workers.
	command := []string{"sh", "-c", waitForDNSScript, "sh", "mpirun", "-np", strconv.Itoa(len(w.Nodes) * slots), "--bind-to", "none"}
	for _, e := range launcher.Spec.Containers[0].Env {
		command = append(command, "-x", e.Name)
	}
	launcher.Spec.Containers[0].Command = append(command, c.benchmarkCommand(w, evenkeel.LauncherMPIJob)...)

	replica := func(count int, template *corev1.PodTemplateSpec) (map[string]any, error) {
		content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(template)
		if err != nil {
			return nil, err
		}
		unstructured.RemoveNestedField(content, "metadata", "creationTimestamp")
		// The replica's restart policy is used. One in the template would cause warnings.
		unstructured.RemoveNestedField(content, "spec", "restartPolicy")
		return map[string]any{"replicas": int64(count), "restartPolicy": "Never", "template": content}, nil
	}
	launchers, err := replica(1, launcher)
	if err != nil {
		return nil, err
	}
	workers, err := replica(len(w.Nodes), worker)
	if err != nil {
		return nil, err
	}
	job := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{
		"slotsPerWorker": int64(slots), "sshAuthMountPath": "/home/mpiuser/.ssh", "launcherCreationPolicy": "WaitForWorkersReady",
		"runPolicy":       map[string]any{"cleanPodPolicy": "None", "backoffLimit": int64(0), "activeDeadlineSeconds": int64(*c.Options.RunTimeoutSeconds + GraceSeconds)},
		"mpiReplicaSpecs": map[string]any{"Launcher": launchers, "Worker": workers},
	}}}
	job.SetGroupVersionKind(MPIJobKind)
	meta := c.Meta(name)
	job.SetNamespace(meta.Namespace)
	job.SetName(meta.Name)
	job.SetLabels(meta.Labels)
	job.SetOwnerReferences(meta.OwnerReferences)
	return job, nil
}

// slots is the number of ranks on each node.
func (c Check) slots() int {
	if n := c.Options.Runner.GPUsPerNode; n != nil {
		return int(*n)
	}
	return 1
}

// rankTimeout is how many seconds ranks wait for each other. Ranks that cannot reach each other fail before the run's
// timeout, so that their logs are read.
func (c Check) rankTimeout() int { return int(max(5, *c.Options.RunTimeoutSeconds/2)) }

// benchmarkCommand returns the command of a rank. In an Indexed Job, one process of nccl-tests or rccl-tests uses all
// GPUs of a node.
func (c Check) benchmarkCommand(w preflight.PlannedRun, launcher evenkeel.Launcher) []string {
	sweep := c.Options.Sweep
	from, to := *sweep.MinBytes, *sweep.MaxBytes
	if isSingleNode(w) {
		from, to = min(from, localMaxBytes), min(to, localMaxBytes)
	}
	sizes := []string{"-b", strconv.FormatInt(from, 10), "-e", strconv.FormatInt(to, 10), "-f", "4", "-n", strconv.Itoa(int(*sweep.Iterations)), "-w", "2", "-c", "1"}
	if c.Options.Runner.Type.UsesGPUs() {
		program, gpus := gpuPrograms[sweep.Collective], 1
		if launcher == evenkeel.LauncherIndexedJob {
			program, gpus = GPURunners[c.Options.Runner.Type].WithoutMPIRun+"/"+program, c.slots()
		}
		return append([]string{program}, append(sizes, "-g", strconv.Itoa(gpus))...)
	}
	command := append([]string{"evenkeel-bench", "allreduce", "--json"}, sizes...)
	command = append(command, "--timeout", strconv.Itoa(c.rankTimeout()))
	if w.Device >= 0 {
		command = append(command, "--device", strconv.Itoa(w.Device))
	}
	if isSingleNode(w) {
		command = append(command, "--spawn", "2")
	}
	if w.Stage == evenkeel.StageRDMA {
		command = append([]string{"sh", "-c", printMemlockScript, "sh"}, command...)
	}
	return command
}

// isSingleNode reports whether the run is within one node.
func isSingleNode(w preflight.PlannedRun) bool {
	return w.Stage == evenkeel.StageLocal || w.Stage == evenkeel.StageRDMA
}

// podTemplate returns a pod that fits the restricted standard, for one of the nodes, with the plugin as training pods
// get it.
func (c Check) podTemplate(run string, w preflight.PlannedRun, role string, command []string, environment []corev1.EnvVar, accelerators corev1.ResourceList) (*corev1.PodTemplateSpec, error) {
	runner := c.Options.Runner
	labels := map[string]string{evenkeel.CheckKey: c.Object.Name, evenkeel.RunKey: run, evenkeel.RoleKey: role}
	for key, value := range runner.PodLabels {
		labels[key] = string(value) // never one of ours, says the definition
	}
	yes, no := true, false
	if w.Stage == evenkeel.StageRDMA {
		environment = append(environment, corev1.EnvVar{Name: inject.TransportEnv, Value: preflight.TransportRDMA})
	}
	for _, e := range runner.Environment {
		if e.Name == inject.TransportEnv && w.Stage == evenkeel.StageRDMA {
			continue // the stage requires its own value
		}
		environment = append(environment, corev1.EnvVar{Name: e.Name, Value: e.Value})
	}
	volumes := []corev1.Volume{{Name: "tmp", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
	mounts := []corev1.VolumeMount{{Name: "tmp", MountPath: "/tmp"}}
	resources := *runner.Resources.DeepCopy()
	if resources.Limits == nil {
		resources.Limits = corev1.ResourceList{}
	}
	if runner.Type.UsesGPUs() {
		// NCCL logs at this level which network it uses.
		environment = append(environment, corev1.EnvVar{Name: "NCCL_DEBUG", Value: "INFO"})
		if w.Stage == evenkeel.StageLocal {
			environment = append(environment, pluginOnly(runner)...)
		}
		volumes = append(volumes, corev1.Volume{Name: "shm", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory}}})
		mounts = append(mounts, corev1.VolumeMount{Name: "shm", MountPath: "/dev/shm"})
		if role == evenkeel.RoleRank {
			resources.Limits[GPURunners[runner.Type].GPU] = *resource.NewQuantity(int64(c.slots()), resource.DecimalSI)
		}
	}
	for name, count := range accelerators {
		if own := resources.Limits[name]; own.Cmp(count) < 0 {
			resources.Limits[name] = count
		}
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Labels: labels, Annotations: maps.Clone(runner.PodAnnotations)},
		Spec: corev1.PodSpec{
			RuntimeClassName: runner.RuntimeClassName,
			RestartPolicy:    corev1.RestartPolicyNever, AutomountServiceAccountToken: &no, EnableServiceLinks: &no,
			TerminationGracePeriodSeconds: new(int64), PriorityClassName: c.PriorityClass,
			SecurityContext: &corev1.PodSecurityContext{RunAsNonRoot: &yes, SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}, SupplementalGroups: slices.Clone(runner.SupplementalGroups)},
			Affinity:        &corev1.Affinity{NodeAffinity: nodeAffinityTo(w.Nodes)},
			Tolerations:     Tolerations(runner.Tolerations),
			Volumes:         volumes,
			Containers: []corev1.Container{{
				Name: Container, Image: runner.Image, ImagePullPolicy: corev1.PullIfNotPresent, Command: command, Env: environment,
				Resources: resources, VolumeMounts: mounts,
				SecurityContext: &corev1.SecurityContext{AllowPrivilegeEscalation: &no, Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}},
			}},
		},
	}
	if role == evenkeel.RoleRank && len(w.Nodes) > 1 {
		pod.Spec.Affinity.PodAntiAffinity = &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{
			TopologyKey:   corev1.LabelHostname,
			LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{evenkeel.RunKey: run, evenkeel.RoleKey: role}},
		}}}
	}
	for _, name := range c.ImagePullSecrets {
		pod.Spec.ImagePullSecrets = append(pod.Spec.ImagePullSecrets, corev1.LocalObjectReference{Name: name})
	}
	for _, secret := range runner.ImagePullSecrets {
		if !slices.Contains(pod.Spec.ImagePullSecrets, secret) {
			pod.Spec.ImagePullSecrets = append(pod.Spec.ImagePullSecrets, secret)
		}
	}
	plugin := c.Plugin
	if plugin.RDMA != nil && role != evenkeel.RoleRank {
		plugin.RDMA = nil // a launcher moves no data
	}
	if plugin.RDMA != nil && plugin.RDMA.LockMemory && w.Stage == evenkeel.StageRDMA {
		// The capability is effective for root only. Evenkeel's namespace has to allow it.
		root := int64(0)
		pod.Spec.SecurityContext.RunAsNonRoot, pod.Spec.SecurityContext.RunAsUser = &no, &root
	}
	if err := inject.AddPlugin(pod, plugin); err != nil {
		return nil, fmt.Errorf("the plugin of NetworkProfile %s: %w", c.Plugin.Profile, err)
	}
	return &corev1.PodTemplateSpec{ObjectMeta: pod.ObjectMeta, Spec: pod.Spec}, nil
}

// pluginOnly are the settings by which GPUs of one node use the network plugin. By default NCCL would use NVLink, PCIe
// or shared memory, and stage Local would say nothing about the plugin. What the check sets itself stays.
func pluginOnly(runner evenkeel.RunnerSpec) []corev1.EnvVar {
	settings := []corev1.EnvVar{{Name: "NCCL_P2P_DISABLE", Value: "1"}, {Name: "NCCL_SHM_DISABLE", Value: "1"}, {Name: "NCCL_NVLS_ENABLE", Value: "0"}}
	return slices.DeleteFunc(settings, func(s corev1.EnvVar) bool {
		return slices.ContainsFunc(runner.Environment, func(own evenkeel.EnvironmentVariable) bool { return own.Name == s.Name })
	})
}

// nodeAffinityTo allows these nodes only, by name. Labels can be wrong. A field requirement accepts one value, so there
// is a term for each node.
func nodeAffinityTo(nodes []string) *corev1.NodeAffinity {
	var terms []corev1.NodeSelectorTerm
	for _, node := range slices.Sorted(slices.Values(nodes)) {
		terms = append(terms, corev1.NodeSelectorTerm{MatchFields: []corev1.NodeSelectorRequirement{{
			Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{node},
		}}})
	}
	return &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: terms}}
}

// Tolerations of the check's pods: the user's, those for GPUs, and those for the taints that only a check that passes
// removes: Evenkeel's own taint, and the taint of the shipped NodeReadinessRule.
func Tolerations(own []corev1.Toleration) []corev1.Toleration {
	return append([]corev1.Toleration{
		{Key: string(accelerator.NVIDIA), Operator: corev1.TolerationOpExists},
		{Key: string(accelerator.AMD), Operator: corev1.TolerationOpExists},
		{Key: evenkeel.HealthKey, Operator: corev1.TolerationOpExists},
		{Key: evenkeel.ReadinessTaintKey, Operator: corev1.TolerationOpExists},
	}, own...)
}
