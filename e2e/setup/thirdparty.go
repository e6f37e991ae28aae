package setup

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// A kubeflowOperator is one of Kubeflow's operators, installed from its own manifests with the program that the toolbox built.
type kubeflowOperator struct {
	// name is the tool's, and the Deployment's; overlay is the folder of its manifests.
	name, overlay string
	// crd is what a cluster that has the operator serves, kind the object for people, and release what to install.
	crd, kind, release string
	// files go into its image: a Dockerfile, which copies the program from the build context "built", and what else it copies.
	files map[string]string
	// namespace has the Deployment.
	namespace string
	// patches, as kustomize takes them, are added to that of the image.
	patches string
}

// install installs the operator, or sees that a user's cluster has it.
func (e *Env) install(ctx context.Context, o kubeflowOperator) error {
	if e.Local == nil {
		if _, err := e.Kubectl(ctx, "get", "crd", o.crd); err != nil {
			return fmt.Errorf("the cluster has no %s: install Kubeflow's %s first: %w", o.kind, o.release, err)
		}
		return nil
	}
	box, err := toolbox.New(e.config.Progress)
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
	base, err := filepath.Rel(work, filepath.Join(dir, "manifests", "overlays", o.overlay))
	if err != nil {
		return fmt.Errorf("work folder: %w", err)
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
resources: [%q]
patches:
  - target: {kind: Deployment, name: %s}
    patch: |
      - {op: replace, path: /spec/template/spec/containers/0/image, value: %q}
%s`, base, o.name, pinned, o.patches)
	if err := write("kustomization.yaml", kustomization); err != nil {
		return fmt.Errorf("kustomization: %w", err)
	}
	if _, err := e.Kubectl(ctx, "apply", "--server-side", "--force-conflicts", "-k", work); err != nil {
		return err
	}
	_, err = e.Kubectl(ctx, "-n", o.namespace, "rollout", "status", "deployment/"+o.name, "--timeout=120s")
	return err
}

// initContainers is the template of what workers wait in for the master's name, at the path where the training-operator
// looks for one: its own default does not meet the restricted pod standard, which our jobs' namespaces enforce.
const initContainers = `- name: init-pytorch
  image: {{.InitContainerImage}}
  command: [sh, -c, "for i in $(seq {{.MaxTries}}); do getent hosts {{.MasterAddr}} && exit 0; sleep 1; done; exit 1"]
  securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
`

// trainingOperator installs the real training-operator, for PyTorchJobs. The kind MPIJob, of which it has an older version,
// is left to the mpi-operator.
func (e *Env) trainingOperator(ctx context.Context) error {
	return e.install(ctx, kubeflowOperator{
		name: "training-operator", overlay: "standalone", namespace: "kubeflow",
		crd: "pytorchjobs.kubeflow.org", kind: "PyTorchJob", release: "training-operator v1.9",
		files: map[string]string{
			"Dockerfile":         "FROM scratch\nCOPY --from=built training-operator /manager\nCOPY initContainer.yaml /etc/config/initContainer.yaml\n",
			"initContainer.yaml": initContainers,
		},
		patches: fmt.Sprintf(`      - {op: add, path: /spec/template/spec/containers/0/args, value: ["--enable-scheme=pytorchjob", "--pytorch-init-container-image=%s"]}
      - {op: replace, path: /spec/template/spec/containers/0/readinessProbe/initialDelaySeconds, value: 1}
      - {op: replace, path: /spec/template/spec/containers/0/readinessProbe/periodSeconds, value: 1}
  - patch: |
      {apiVersion: apiextensions.k8s.io/v1, kind: CustomResourceDefinition, metadata: {name: mpijobs.kubeflow.org}, $patch: delete}
`, e.Images.Bench),
	})
}

// mpiOperator installs the real mpi-operator, for checks as MPIJobs.
func (e *Env) mpiOperator(ctx context.Context) error {
	return e.install(ctx, kubeflowOperator{
		name: "mpi-operator", overlay: "standalone", namespace: "mpi-operator",
		crd: "mpijobs.kubeflow.org", kind: "MPIJob", release: "mpi-operator v0.8",
		files: map[string]string{"Dockerfile": "FROM scratch\nCOPY --from=built mpi-operator /opt/mpi-operator\nENTRYPOINT [\"/opt/mpi-operator\"]\n"},
		// Its own limit, 5 calls a second, is made for a few jobs at a time.
		patches: `      - {op: add, path: /spec/template/spec/containers/0/args/-, value: "--kube-api-qps=50"}
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: "--kube-api-burst=100"}
`,
	})
}
