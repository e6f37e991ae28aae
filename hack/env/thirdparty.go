package env

import (
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"strings"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// A thirdParty is another project's controller, installed from its own manifests with the program that the toolbox
// built.
type thirdParty struct {
	// name is the tool's name, deployment the Deployment in its manifests.
	name, deployment string
	// overlays are folders of its manifests.
	overlays []string
	// crd is in every cluster that has the controller; kind and release are for error messages.
	crd, kind, release string
	// files are the build context of its image: a Dockerfile, which copies the program from the context "built", and
	// others.
	files map[string]string
	// namespace is that of the Deployment. create makes it, and moves the controller there: the manifests lack it.
	namespace string
	create    bool
	// patches are further patches of kustomize, and then further fields of its file.
	patches string
}

// controllers lists the third-party controllers to install. Their manifests name images, so call it again once these
// are loaded.
func (e *Cluster) controllers() []thirdParty {
	controllers := []thirdParty{e.trainingOperator()}
	if e.config.MPIOperator {
		controllers = append(controllers, e.mpiOperator())
	}
	if e.config.Kueue {
		controllers = append(controllers, e.kueue())
	}
	if e.config.Kinds {
		controllers = append(controllers, e.kinds()...)
	}
	return controllers
}

// install installs the controller, or checks that an existing cluster has it.
func (e *Cluster) install(ctx context.Context, o thirdParty, progress io.Writer) error {
	if e.Local == nil {
		if _, err := e.Kubectl(ctx, "get", "crd", o.crd); err != nil {
			return fmt.Errorf("the cluster has no %s: install %s first: %w", o.kind, o.release, err)
		}
		return nil
	}
	box, err := toolbox.New(progress)
	if err != nil {
		return err
	}
	dir, err := box.Dir(ctx, o.name)
	if err != nil {
		return err
	}
	work, err := os.MkdirTemp("", "evenkeel-"+o.name+"-")
	if err != nil {
		return fmt.Errorf("work folder: %w", err)
	}
	defer os.RemoveAll(work)
	image := "localhost/" + o.name + ":dev"
	var resources []string
	for _, overlay := range o.overlays {
		base, err := filepath.Rel(work, filepath.Join(dir, "manifests", filepath.FromSlash(overlay)))
		if err != nil {
			return fmt.Errorf("work folder: %w", err)
		}
		resources = append(resources, base)
	}
	if o.create {
		resources = append(resources, "namespace.yaml")
		o.patches += "namespace: " + o.namespace + "\n"
		o.files = maps.Clone(o.files)
		o.files["namespace.yaml"] = "{apiVersion: v1, kind: Namespace, metadata: {name: " + o.namespace + "}}\n"
	}
	write := func(name, text string) error { return os.WriteFile(filepath.Join(work, name), []byte(text), 0o644) }
	for name, text := range o.files {
		if err := write(name, text); err != nil {
			return fmt.Errorf("image of the %s: %w", o.name, err)
		}
	}
	if _, err := e.command(ctx, "", "buildah", "build", "--isolation", "chroot", "--layers=false", "--timestamp", "0", "--build-context", "built="+dir, "-t", image, work); err != nil {
		return err
	}
	pinned, err := e.push(ctx, image)
	if err != nil {
		return err
	}
	kustomization := fmt.Sprintf(`apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [%s]
patches:
  - target: {kind: Deployment, name: %s}
    patch: |
      - {op: replace, path: /spec/template/spec/containers/0/image, value: %q}
%s`, strings.Join(resources, ", "), o.deployment, pinned, o.patches)
	if err := write("kustomization.yaml", kustomization); err != nil {
		return fmt.Errorf("kustomization: %w", err)
	}
	if _, err := e.Kubectl(ctx, "apply", "--server-side", "--force-conflicts", "-k", work); err != nil {
		return err
	}
	_, err = e.Kubectl(ctx, "-n", o.namespace, "rollout", "status", "deployment/"+o.deployment, "--timeout=240s")
	return err
}

// initContainers is the training-operator's template of the container in which workers wait for the master's name. Its
// default does not meet the restricted pod standard, which the namespaces of the jobs enforce.
const initContainers = `- name: init-pytorch
  image: {{.InitContainerImage}}
  command: [sh, -c, "for i in $(seq {{.MaxTries}}); do getent hosts {{.MasterAddr}} && exit 0; sleep 1; done; exit 1"]
  securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
`

// trainingOperator is the training-operator's controller of PyTorchJobs, without its webhook. Its MPIJob is left out
// too: the mpi-operator provides a newer version.
func (e *Cluster) trainingOperator() thirdParty {
	return thirdParty{
		name: "training-operator", overlays: []string{"overlays/standalone"}, namespace: "kubeflow", deployment: "training-operator",
		crd: "pytorchjobs.kubeflow.org", kind: "PyTorchJob", release: "Kubeflow's training-operator v1.9",
		files: map[string]string{
			"Dockerfile":         "FROM scratch\nCOPY --from=built training-operator /manager\nCOPY initContainer.yaml /etc/config/initContainer.yaml\n",
			"initContainer.yaml": initContainers,
		},
		patches: fmt.Sprintf(`      - {op: add, path: /spec/template/spec/containers/0/args, value: ["--pytorch-init-container-image=%s"]}
      - {op: replace, path: /spec/template/spec/containers/0/readinessProbe/initialDelaySeconds, value: 1}
      - {op: replace, path: /spec/template/spec/containers/0/readinessProbe/periodSeconds, value: 1}
  - patch: |
      {apiVersion: apiextensions.k8s.io/v1, kind: CustomResourceDefinition, metadata: {name: mpijobs.kubeflow.org}, $patch: delete}
  - patch: |
      {apiVersion: admissionregistration.k8s.io/v1, kind: ValidatingWebhookConfiguration, metadata: {name: validator.training-operator.kubeflow.org}, $patch: delete}
`, e.Images.Bench),
	}
}

// mpiOperator is the real mpi-operator, for checks as MPIJobs.
func (e *Cluster) mpiOperator() thirdParty {
	return thirdParty{
		name: "mpi-operator", overlays: []string{"overlays/standalone"}, namespace: "mpi-operator", deployment: "mpi-operator",
		crd: "mpijobs.kubeflow.org", kind: "MPIJob", release: "Kubeflow's mpi-operator v0.8",
		files: map[string]string{"Dockerfile": "FROM scratch\nCOPY --from=built mpi-operator /opt/mpi-operator\nENTRYPOINT [\"/opt/mpi-operator\"]\n"},
		// Its default limit, 5 calls a second, suits only a few jobs at a time.
		patches: `      - {op: add, path: /spec/template/spec/containers/0/args/-, value: "--kube-api-qps=50"}
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: "--kube-api-burst=100"}
`,
	}
}

// kueueConfig makes Kueue manage Jobs and PyTorchJobs with a queue name, and nothing else but the frameworks that are
// inserted.
const kueueConfig = `apiVersion: config.kueue.x-k8s.io/v1beta2
kind: Configuration
health: {healthProbeBindAddress: ":8081"}
metrics: {bindAddress: ":8443"}
webhook: {port: 9443}
leaderElection: {leaderElect: false}
integrations: {frameworks: [batch/job, kubeflow.org/pytorchjob%s]}
`

// kueue is the real Kueue, without its visibility API.
func (e *Cluster) kueue() thirdParty {
	more := ""
	if e.config.Kinds {
		more = ", pod"
	}
	return thirdParty{
		name: "kueue", overlays: []string{"default"}, namespace: "kueue-system", deployment: "kueue-controller-manager",
		crd: "clusterqueues.kueue.x-k8s.io", kind: "ClusterQueue", release: "Kueue v0.19",
		files: map[string]string{"Dockerfile": "FROM scratch\nCOPY --from=built kueue /manager\nUSER 65532:65532\n"},
		patches: fmt.Sprintf(`      - {op: replace, path: /spec/template/spec/containers/0/readinessProbe/initialDelaySeconds, value: 1}
      - {op: replace, path: /spec/template/spec/containers/0/readinessProbe/periodSeconds, value: 1}
  - target: {kind: ConfigMap, name: kueue-manager-config}
    patch: |
      - {op: replace, path: /data/controller_manager_config.yaml, value: %q}
  - patch: |
      {apiVersion: apiregistration.k8s.io/v1, kind: APIService, metadata: {name: v1beta1.visibility.kueue.x-k8s.io}, $patch: delete}
  - patch: |
      {apiVersion: apiregistration.k8s.io/v1, kind: APIService, metadata: {name: v1beta2.visibility.kueue.x-k8s.io}, $patch: delete}
`, fmt.Sprintf(kueueConfig, more)),
	}
}

// readyFast makes the first container of a Deployment be asked early whether it is ready.
const readyFast = `      - {op: replace, path: /spec/template/spec/containers/0/readinessProbe/initialDelaySeconds, value: 1}
      - {op: replace, path: /spec/template/spec/containers/0/readinessProbe/periodSeconds, value: 1}
`

// kinds are the real controllers of the other kinds of jobs: JobSet, LeaderWorkerSet, Kubeflow's Trainer and KubeRay.
func (e *Cluster) kinds() []thirdParty {
	manager := func(program string) map[string]string {
		return map[string]string{"Dockerfile": "FROM scratch\nCOPY --from=built " + program + " /manager\nUSER 65532:65532\nENTRYPOINT [\"/manager\"]\n"}
	}
	return []thirdParty{
		{
			name: "jobset", overlays: []string{"default"}, namespace: "jobset-system", deployment: "jobset-controller-manager",
			crd: "jobsets.jobset.x-k8s.io", kind: "JobSet", release: "JobSet v0.11", files: manager("jobset"), patches: readyFast,
		},
		{
			name: "lws", overlays: []string{"default"}, namespace: "lws-system", deployment: "lws-controller-manager",
			crd: "leaderworkersets.leaderworkerset.x-k8s.io", kind: "LeaderWorkerSet", release: "LWS v0.9", files: manager("lws"),
			patches: readyFast + `      - {op: replace, path: /spec/replicas, value: 1}
      - {op: replace, path: /spec/template/spec/containers/0/resources/requests/cpu, value: 100m}
`,
		},
		{
			// Its own overlay downloads JobSet.
			name: "trainer", overlays: []string{"base/crds", "base/manager", "base/rbac", "base/webhook"},
			namespace: "kubeflow-system", create: true, deployment: "kubeflow-trainer-controller-manager",
			crd: "trainjobs.trainer.kubeflow.org", kind: "TrainJob", release: "Kubeflow's Trainer v2.2", files: manager("trainer"),
			patches: readyFast + "secretGenerator: [{name: kubeflow-trainer-webhook-cert, options: {disableNameSuffixHash: true}}]\n",
		},
		{
			name: "kuberay", overlays: []string{"default"}, namespace: "ray-system", create: true, deployment: "kuberay-operator",
			crd: "rayclusters.ray.io", kind: "RayCluster", release: "KubeRay v1.5", files: manager("kuberay"),
			// The tests' containers are stand-ins, which Ray's probes would not find ready.
			patches: readyFast + `      - {op: replace, path: /spec/template/spec/containers/0/resources/limits/cpu, value: "1"}
      - {op: add, path: /spec/template/spec/containers/0/env, value: [{name: ENABLE_PROBES_INJECTION, value: "false"}, {name: ENABLE_INIT_CONTAINER_INJECTION, value: "false"}]}
`,
		},
	}
}
