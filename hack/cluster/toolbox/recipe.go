package toolbox

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/mod/modfile"
)

// A recipe describes the build of a tool from a nested module under hack/cluster/tools. The module's go.mod pins the
// version, its go.sum the content; the recipe has the programs to compile and the folders to keep.
type recipe struct {
	name string
	// group is the folder of a module that several tools share; empty for a tool whose folder has its own name. Tools of
	// one group use the same versions of their dependencies, and one "go build" makes all that are wanted: each dependency
	// is compiled once.
	group string
	// module is the Go module whose required version is the tool's version;
	// empty for a tool whose source is the recipe folder itself.
	module string
	// binaries are the programs in the tool's folder.
	binaries []binary
	// links are further names of the first binary, if that selects its function by its name.
	links []string
	// keep maps a folder of the tool's folder to a folder of the module's source.
	keep map[string]string
	// ldflags returns further linker flags for the given version; may be nil.
	ldflags func(version string) []string
	// estimate is the processor time of a first build, for the progress line.
	estimate time.Duration
}

// clusterGroup is the group of what every local cluster runs.
const clusterGroup = "cluster"

// A binary is one program of a tool.
type binary struct {
	name string
	pkg  string // package to build, relative to the recipe's folder or an import path
}

var recipes = append([]recipe{
	{
		name:     "kubernetes",
		group:    clusterGroup,
		module:   "k8s.io/kubernetes",
		binaries: []binary{{"kubernetes", "./kubernetes"}},
		links:    []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl"},
		ldflags:  kubernetesVersionFlags,
		estimate: 6 * time.Minute,
	},
	{
		name:     "etcd",
		group:    clusterGroup,
		module:   "go.etcd.io/etcd/server/v3",
		binaries: []binary{{"etcd", "./etcd"}},
		estimate: 40 * time.Second,
	},
	{
		name:   "containerd",
		group:  clusterGroup,
		module: "github.com/containerd/containerd/v2",
		binaries: []binary{
			{"containerd", "github.com/containerd/containerd/v2/cmd/containerd"},
			{"containerd-shim-runc-v2", "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2"},
			{"ctr", "github.com/containerd/containerd/v2/cmd/ctr"},
		},
		estimate: time.Minute,
	},
	{
		name:     "coredns",
		group:    clusterGroup,
		module:   "github.com/coredns/coredns",
		binaries: []binary{{"coredns", "./coredns"}},
		estimate: 30 * time.Second,
	},
	{
		name:     "training-operator",
		group:    clusterGroup,
		module:   "github.com/kubeflow/training-operator",
		binaries: []binary{{"training-operator", "./training-operator"}},
		keep:     map[string]string{"manifests": "manifests"},
		estimate: 30 * time.Second,
	},
	{
		name:     "mpi-operator",
		group:    clusterGroup,
		module:   "github.com/kubeflow/mpi-operator",
		binaries: []binary{{"mpi-operator", "github.com/kubeflow/mpi-operator/cmd/mpi-operator"}},
		keep:     map[string]string{"manifests": "manifests"},
		estimate: 30 * time.Second,
	},
	{
		name:     "kueue",
		module:   "sigs.k8s.io/kueue",
		binaries: []binary{{"kueue", "sigs.k8s.io/kueue/cmd/kueue"}},
		keep:     map[string]string{"manifests": "config"},
		estimate: 10 * time.Minute,
	},
	{
		name:     "jobset",
		module:   "sigs.k8s.io/jobset",
		binaries: []binary{{"jobset", "sigs.k8s.io/jobset"}},
		keep:     map[string]string{"manifests": "config"},
		estimate: 3 * time.Minute,
	},
	{
		name:     "lws",
		module:   "sigs.k8s.io/lws",
		binaries: []binary{{"lws", "sigs.k8s.io/lws/cmd"}},
		keep:     map[string]string{"manifests": "config"},
		estimate: 3 * time.Minute,
	},
	{
		name:     "trainer",
		module:   "github.com/kubeflow/trainer/v2",
		binaries: []binary{{"trainer", "github.com/kubeflow/trainer/v2/cmd/trainer-controller-manager"}},
		keep:     map[string]string{"manifests": "manifests"},
		estimate: 4 * time.Minute,
	},
	{
		name:     "kuberay",
		module:   "github.com/ray-project/kuberay/ray-operator",
		binaries: []binary{{"kuberay", "github.com/ray-project/kuberay/ray-operator"}},
		keep:     map[string]string{"manifests": "config"},
		estimate: 4 * time.Minute,
	},
	{
		name:     "helm",
		group:    clusterGroup,
		module:   "helm.sh/helm/v4",
		binaries: []binary{{"helm", "helm.sh/helm/v4/cmd/helm"}},
		estimate: time.Minute,
	},
	{
		name:     "syft",
		module:   "github.com/anchore/syft",
		binaries: []binary{{"syft", "github.com/anchore/syft/cmd/syft"}},
		ldflags:  func(version string) []string { return []string{"-X", "main.version=" + version} },
		estimate: 8 * time.Minute,
	},
	{
		name:     "cosign",
		module:   "github.com/sigstore/cosign/v3",
		binaries: []binary{{"cosign", "github.com/sigstore/cosign/v3/cmd/cosign"}},
		estimate: 8 * time.Minute,
	},
	{
		name:     "krew",
		module:   "sigs.k8s.io/krew",
		binaries: []binary{{"krew", "sigs.k8s.io/krew/cmd/krew"}},
		estimate: 90 * time.Second,
	},
	{
		name:     "govulncheck",
		module:   "golang.org/x/vuln",
		binaries: []binary{{"govulncheck", "golang.org/x/vuln/cmd/govulncheck"}},
		estimate: time.Minute,
	},
	{
		name:     "wireguard",
		module:   "golang.zx2c4.com/wireguard",
		binaries: []binary{{"wireguard-go", "golang.zx2c4.com/wireguard"}},
		estimate: 40 * time.Second,
	},
	{
		name:     "pause",
		binaries: []binary{{"pause", "."}},
		estimate: time.Second,
	},
}, olderAPIServers()...)

// OlderKubernetes are the minor versions of Kubernetes that the chart allows, from its kubeVersion to the one before
// the local cluster's. Of each, the toolbox has the API server, at the minor version's newest patch release.
var OlderKubernetes = []string{"1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36"}

func olderAPIServers() []recipe {
	var all []recipe
	for _, minor := range OlderKubernetes {
		name := olderAPIServer(minor)
		all = append(all, recipe{
			name:     name,
			module:   "k8s.io/kubernetes",
			binaries: []binary{{name, "k8s.io/kubernetes/cmd/kube-apiserver"}},
			ldflags:  kubernetesVersionFlags,
			estimate: 6 * time.Minute,
		})
	}
	return all
}

// olderAPIServer is the name of the tool that is the API server of a minor version.
func olderAPIServer(minor string) string { return "kube-apiserver-" + minor }

// kubernetesVersionFlags set the version that the programs report, by which clients and charts know the server's
// features.
func kubernetesVersionFlags(version string) []string {
	minor := strings.Split(version, ".")[1]
	var flags []string
	for _, pkg := range []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"} {
		for _, kv := range []string{
			"gitVersion=" + version, "gitMajor=1", "gitMinor=" + minor, "gitTreeState=clean",
			"gitCommit=" + version, "buildDate=1970-01-01T00:00:00Z",
		} {
			flags = append(flags, "-X", pkg+"."+kv)
		}
	}
	return flags
}

// programs are the names of all programs in the tool's folder.
func (r recipe) programs() []string {
	var names []string
	for _, b := range r.binaries {
		names = append(names, b.name)
	}
	return append(names, r.links...)
}

// findRecipe returns the recipe with this name, or with a program of this name.
func findRecipe(name string) (recipe, error) {
	for _, r := range recipes {
		if r.name == name || slices.Contains(r.programs(), name) {
			return r, nil
		}
	}
	return recipe{}, fmt.Errorf("unknown tool %q: the tools are %s", name, strings.Join(Names(), ", "))
}

// version is the exact version the recipe's folder pins.
func (r recipe) version(folder string) (string, error) {
	if r.module == "" {
		return "v1", nil
	}
	path := filepath.Join(folder, "go.mod")
	text, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("recipe of %s: %w", r.name, err)
	}
	file, err := modfile.Parse(path, text, nil)
	if err != nil {
		return "", fmt.Errorf("recipe of %s: %w", r.name, err)
	}
	for _, require := range file.Require {
		if require.Mod.Path == r.module {
			return require.Mod.Version, nil
		}
	}
	return "", fmt.Errorf("recipe of %s: %s does not require %s", r.name, path, r.module)
}

// folder is the folder of the module that the tool is built from.
func (r recipe) folder(root string) string {
	return filepath.Join(root, "hack", "cluster", "tools", cmp.Or(r.group, r.name))
}

// key is the name of the tool's folder in the cache. It changes with every input of the build, so an existing folder
// needs no check.
func (r recipe) key(folder, version string) (string, error) {
	hash := sha256.New()
	fmt.Fprintf(hash, "%s/%s %s %v %v %v\n", runtime.GOOS, runtime.GOARCH, GoFlags, r.binaries, r.links, r.keep)
	if r.ldflags != nil {
		fmt.Fprintln(hash, r.ldflags(version))
	}
	names := []string{"go.mod", "go.sum"}
	for _, b := range r.binaries {
		if strings.HasPrefix(b.pkg, ".") { // the others are packages of other modules
			names = append(names, filepath.Join(b.pkg, "main.go"))
		}
	}
	for _, name := range names {
		text, err := os.ReadFile(filepath.Join(folder, name))
		if errors.Is(err, fs.ErrNotExist) && name == "go.sum" {
			continue // a module without dependencies has none
		}
		if err != nil {
			return "", fmt.Errorf("recipe of %s: %w", r.name, err)
		}
		fmt.Fprintf(hash, "%s %d\n%s", name, len(text), text)
	}
	return fmt.Sprintf("%s-%s-%s", r.name, version, hex.EncodeToString(hash.Sum(nil))[:12]), nil
}
