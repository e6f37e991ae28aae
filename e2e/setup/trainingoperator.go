package setup

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// initContainers is the template of what workers wait in for the master's name, at the path where the training-operator
// looks for one. Its own default does not meet the restricted pod standard, which our jobs' namespaces enforce; and it goes
// by nslookup's exit status, which busybox 1.35 makes an error when any of the search domains lacks the name.
const initContainers = `- name: init-pytorch
  image: {{.InitContainerImage}}
  command: [sh, -c, "for i in $(seq {{.MaxTries}}); do nslookup {{.MasterAddr}} | grep -q ^Name: && exit 0; sleep 1; done; exit 1"]
  securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
`

// trainingOperator installs the real training-operator, for PyTorchJobs, unless the cluster serves them already.
func (e *Env) trainingOperator(ctx context.Context) error {
	if e.Local == nil {
		if _, err := e.Kubectl(ctx, "get", "crd", "pytorchjobs.kubeflow.org"); err != nil {
			return fmt.Errorf("the cluster has no PyTorchJob: install Kubeflow's training-operator v1.9 first: %w", err)
		}
		return nil
	}
	box, err := toolbox.New(e.config.Progress)
	if err != nil {
		return err
	}
	dir, err := box.Dir(ctx, "training-operator")
	if err != nil {
		return err
	}
	work, err := os.MkdirTemp("", "evenkeel-training-operator-")
	if err != nil {
		return fmt.Errorf("work folder: %w", err)
	}
	defer os.RemoveAll(work)
	image, err := e.trainingOperatorImage(ctx, dir, work)
	if err != nil {
		return err
	}
	base, err := filepath.Rel(work, filepath.Join(dir, "manifests", "overlays", "standalone"))
	if err != nil {
		return fmt.Errorf("work folder: %w", err)
	}
	kustomization := fmt.Sprintf(`apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [%q]
patches:
  - target: {kind: Deployment, name: training-operator}
    patch: |
      - {op: add, path: /spec/template/spec/containers/0/args, value: ["--enable-scheme=pytorchjob", "--pytorch-init-container-image=%s"]}
      - {op: replace, path: /spec/template/spec/containers/0/image, value: %q}
      - {op: replace, path: /spec/template/spec/containers/0/readinessProbe/initialDelaySeconds, value: 1}
      - {op: replace, path: /spec/template/spec/containers/0/readinessProbe/periodSeconds, value: 1}
`, base, e.Images.Bench, image)
	if err := os.WriteFile(filepath.Join(work, "kustomization.yaml"), []byte(kustomization), 0o644); err != nil {
		return fmt.Errorf("kustomization: %w", err)
	}
	if _, err := e.Kubectl(ctx, "apply", "--server-side", "--force-conflicts", "-k", work); err != nil {
		return err
	}
	_, err = e.Kubectl(ctx, "-n", "kubeflow", "rollout", "status", "deployment/training-operator", "--timeout=120s")
	return err
}

func (e *Env) trainingOperatorImage(ctx context.Context, dir, work string) (string, error) {
	files := map[string]string{
		"Dockerfile":         "FROM scratch\nCOPY --from=built training-operator /manager\nCOPY initContainer.yaml /etc/config/initContainer.yaml\n",
		"initContainer.yaml": initContainers,
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(work, name), []byte(text), 0o644); err != nil {
			return "", fmt.Errorf("training-operator image: %w", err)
		}
	}
	const name = "localhost/training-operator:dev"
	if _, err := e.command(ctx, "", "buildah", "build", "--isolation", "chroot", "--layers=false", "--timestamp", "0", "--build-context", "built="+dir, "-t", name, work); err != nil {
		return "", err
	}
	return e.push(ctx, name)
}
