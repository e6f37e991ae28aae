// Package local runs a real Kubernetes cluster on this machine. Control plane, image registry and DNS are processes;
// nodes have containerd and a kubelet, each node in Linux namespaces of its own. It needs root, but neither a container
// engine nor a registry; the programs come from [toolbox] and from Debian.
//
// A cluster has one owner, a detached supervisor process. When that exits, by [Down], by a crash or by kill -9, every
// process of the cluster exits too. The rest (network namespaces, cgroups, files) is removed by the next [Down] or [Up]
// of the same name.
package local

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// A Cluster is a running cluster.
type Cluster struct {
	config Config
	state  state
	owner  owner
}

// programs are those that the cluster needs from Debian.
var programs = []toolbox.Program{
	{Name: "/usr/lib/cni/bridge", Package: "containernetworking-plugins"},
	{Name: "buildah", Package: "buildah"},
	{Name: "docker-registry", Package: "docker-registry"},
	{Name: "ip", Package: "iproute2"},
	{Name: "iptables", Package: "iptables"},
	{Name: "mount", Package: "mount"},
	{Name: "nft", Package: "nftables"},
	{Name: "nsenter", Package: "util-linux"},
	{Name: "runc", Package: "runc"},
}

// Tools are the names of what a cluster runs from the toolbox.
var Tools = []string{"kubernetes", "etcd", "containerd", "coredns", "pause"}

// Up starts a cluster, or returns the one of that name if it runs with the same settings. A cluster that does not
// answer is taken down and restarted. If ctx ends before the cluster is up, it is removed.
func Up(ctx context.Context, c Config) (*Cluster, error) {
	c, err := c.withDefaults()
	if err != nil {
		return nil, err
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("a cluster needs root: it makes network namespaces, mounts and cgroups")
	}
	if err := toolbox.EnsurePrograms(ctx, c.Progress, programs); err != nil {
		return nil, err
	}
	t, err := findTools(ctx, c)
	if err != nil {
		return nil, err
	}
	s, err := stateOf(c.Name)
	if err != nil {
		return nil, err
	}
	unlock, err := s.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if running, err := Open(c.Name); err == nil {
		if err := running.usable(ctx, c, t); err == nil {
			running.config.Progress = c.Progress
			return running, nil
		} else if errors.Is(err, errDifferent) {
			return nil, err
		} else {
			fmt.Fprintf(c.Progress, "cluster %s runs but is not usable (%v): restarting it\n", c.Name, err)
		}
	}
	if err := s.remove(c.Name); err != nil {
		return nil, err
	}
	if err := s.prepare(ctx, settings{Config: c, Tools: t}); err != nil {
		return nil, err
	}
	if err := s.start(ctx, c); err != nil {
		return nil, err
	}
	return Open(c.Name)
}

// Open returns a running cluster, without checking its health.
func Open(name string) (*Cluster, error) {
	s, err := stateOf(name)
	if err != nil {
		return nil, err
	}
	o, ok := s.supervisor()
	if !ok {
		return nil, fmt.Errorf("no cluster %q runs: start it with \"go run ./hack/cluster up --name %s\"", name, name)
	}
	v, err := s.settings()
	if err != nil {
		return nil, err
	}
	return &Cluster{config: v.Config, state: s, owner: o}, nil
}

// Down stops a cluster and removes everything that it has created, also after its supervisor was killed. It is no error
// if there is none.
func Down(ctx context.Context, name string) error {
	s, err := stateOf(name)
	if err != nil {
		return err
	}
	unlock, err := s.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	return s.remove(name)
}

// Config returns the settings the cluster runs with.
func (c *Cluster) Config() Config { return c.config }

// Kubeconfig returns the path of an administrator's kubeconfig for the machine's own network.
func (c *Cluster) Kubeconfig() string { return c.state.kubeconfig() }

// KubectlEnv returns the environment variable that selects the cluster for kubectl and helm.
func (c *Cluster) KubectlEnv() []string { return []string{"KUBECONFIG=" + c.Kubeconfig()} }

// Logs returns the folder with the logs of the control plane's processes, and a folder for each node.
func (c *Cluster) Logs() string { return c.state.logs() }

// Shared returns the path of a folder that the machine and all nodes have, on the machine and on a node. Of /run, /tmp
// and /var a node has its own.
func (c *Cluster) Shared() (machine, node string) { return c.state.shared(), sharedView }

// Nodes returns the names of the nodes.
func (c *Cluster) Nodes() []string {
	var names []string
	for _, node := range c.config.plan() {
		names = append(names, node.name)
	}
	return names
}

// Healthy returns nil when the API server answers and all nodes are ready.
func (c *Cluster) Healthy(ctx context.Context) error {
	api, err := newAPI(fmt.Sprintf("https://127.0.0.1:%d", c.owner.Port), c.state.path("pki"), "admin", nil)
	if err != nil {
		return err
	}
	if err := api.ready(ctx); err != nil {
		return err
	}
	return api.nodesReady(ctx, c.config)
}

// Command prepares a command that runs inside a node, in all its namespaces.
func (c *Cluster) Command(ctx context.Context, node string, argv ...string) (*exec.Cmd, error) {
	if _, err := c.config.node(node); err != nil {
		return nil, err
	}
	if len(argv) == 0 {
		return nil, errors.New("no command to run in the node")
	}
	var init owner
	if err := readJSON(c.state.node(node, "init.json"), &init); err != nil {
		return nil, err
	}
	if !init.alive() {
		return nil, fmt.Errorf("node %s does not run; its log is %s", node, filepath.Join(c.Logs(), node+".log"))
	}
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{"-t", fmt.Sprint(init.PID), "-a", "--"}, argv...)...)
	cmd.Env = append(os.Environ(), "PATH="+nodePath())
	return cmd, nil
}

// PretendDevice prepares a command that registers a number of devices that do not exist, as an extended resource of a
// node. They are available as long as it runs.
func (c *Cluster) PretendDevice(ctx context.Context, node, resource string, count int) (*exec.Cmd, error) {
	return c.Command(ctx, node, programView, rolePretendDevice, resource, strconv.Itoa(count))
}

// Exec runs a command inside a node and returns its standard output. The error has its standard error.
func (c *Cluster) Exec(ctx context.Context, node string, argv ...string) (string, error) {
	cmd, err := c.Command(ctx, node, argv...)
	if err != nil {
		return "", err
	}
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("node %s: %s: %w: %s", node, argv[0], err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

var errDifferent = errors.New("take it down first")

// usable returns nil if the cluster has the requested settings and is healthy.
func (c *Cluster) usable(ctx context.Context, want Config, t tools) error {
	v, err := c.state.settings()
	if err != nil {
		return err
	}
	if !v.Config.same(want) {
		return fmt.Errorf("cluster %q runs with other settings (%s; requested: %s): %w: go run ./hack/cluster down --name %s",
			want.Name, v.Config, want, errDifferent, want.Name)
	}
	if v.Tools != t {
		return fmt.Errorf("cluster %q runs other versions of its programs: %w: go run ./hack/cluster down --name %s",
			want.Name, errDifferent, want.Name)
	}
	return c.Healthy(ctx)
}

func findTools(ctx context.Context, c Config) (t tools, err error) {
	box, err := toolbox.New(c.Progress)
	if err != nil {
		return t, err
	}
	dirs, err := box.Dirs(ctx, Tools...)
	if err != nil {
		return t, err
	}
	for i, dir := range []*string{&t.Kubernetes, &t.Etcd, &t.Containerd, &t.CoreDNS, &t.Pause} {
		*dir = dirs[i]
	}
	return t, nil
}

// lock prevents two runs from starting or stopping the same cluster at the same time.
func (s state) lock(ctx context.Context) (unlock func(), err error) {
	if err := os.MkdirAll(filepath.Dir(string(s)), 0o755); err != nil {
		return nil, err
	}
	file, err := os.OpenFile(s.lockFile(), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	err = poll(2*startTimeout, 100*time.Millisecond, ctx.Done(), func() error {
		return unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	})
	if err != nil {
		file.Close()
		return nil, fmt.Errorf("another run starts or stops this cluster: %w", err)
	}
	return func() { file.Close() }, nil
}

// remove kills the cluster's processes and removes its folder.
func (s state) remove(name string) error {
	if o, ok := s.supervisor(); ok {
		if err := unix.Kill(o.PID, unix.SIGTERM); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("stop cluster %s: %w", name, err)
		}
		if err := waitEnd(o, stopTimeout); err != nil {
			unix.Kill(o.PID, unix.SIGKILL)
			if err := waitEnd(o, stopTimeout); err != nil {
				return fmt.Errorf("stop cluster %s: %w", name, err)
			}
		}
	}
	if err := release(s, name); err != nil {
		return fmt.Errorf("clean up after cluster %s: %w", name, err)
	}
	if err := os.RemoveAll(string(s)); err != nil {
		return fmt.Errorf("clean up after cluster %s: %w", name, err)
	}
	return nil
}

func waitEnd(o owner, timeout time.Duration) error {
	return poll(timeout, 20*time.Millisecond, nil, func() error {
		if o.alive() {
			return fmt.Errorf("process %d still runs", o.PID)
		}
		return nil
	})
}

// prepare writes all files of a new cluster.
func (s state) prepare(ctx context.Context, v settings) error {
	fmt.Fprintf(v.Config.Progress, "preparing cluster %s (%s)\n", v.Config.Name, v.Config)
	for _, dir := range []string{s.logs(), s.path("etcd"), s.path("registry")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
	}
	if err := installProgram(ctx, s.program()); err != nil {
		return err
	}
	if err := s.writeKeys(v.Config); err != nil {
		return fmt.Errorf("keys and certificates: %w", err)
	}
	mayLower, err := mayLowerOOMScore()
	if err != nil {
		return err
	}
	pause, err := os.ReadFile(filepath.Join(v.Tools.Pause, "pause"))
	if err != nil {
		return err
	}
	archive, err := pauseArchive(pause)
	if err != nil {
		return err
	}
	files := map[string]string{
		s.path("Corefile"):      corefile(s.path("pki", "coredns.kubeconfig")),
		s.path("registry.yaml"): registryConfig(s.path("registry")),
	}
	for _, node := range v.Config.plan() {
		if err := os.MkdirAll(filepath.Join(s.logs(), node.name), 0o755); err != nil {
			return err
		}
		files[s.node(node.name, "containerd.toml")] = containerdConfig(!mayLower)
		files[s.node(node.name, "kubelet.yaml")] = kubeletConfig()
		files[s.node(node.name, "proxy.yaml")] = proxyConfig(node.name)
		files[s.node(node.name, "cni", "10-evenkeel.conflist")] = cniConfig(node.podCIDR)
		files[s.node(node.name, "registries", Registry, "hosts.toml")] = registryHosts()
		files[s.node(node.name, "pause.tar")] = string(archive)
	}
	for path, text := range files {
		if err := writeFile(path, []byte(text), 0o644); err != nil {
			return err
		}
	}
	return writeJSON(s.path("cluster.json"), v)
}

// writeKeys creates every key and certificate of a new cluster.
func (s state) writeKeys(c Config) error {
	ca, err := newAuthority("evk-" + c.Name)
	if err != nil {
		return err
	}
	private, public, err := newTokenKey()
	if err != nil {
		return err
	}
	serving, err := ca.server("kube-apiserver", "kubernetes", "kubernetes.default", "kubernetes.default.svc",
		"kubernetes.default.svc."+dnsDomain, "localhost", serviceIP, ControlPlaneIP, "127.0.0.1")
	if err != nil {
		return err
	}
	pki := s.path("pki")
	files := map[string][]byte{
		filepath.Join(pki, "ca.crt"):        ca.pem,
		filepath.Join(pki, "ca.key"):        ca.keyPEM,
		filepath.Join(pki, "sa.key"):        private,
		filepath.Join(pki, "sa.pub"):        public,
		filepath.Join(pki, "apiserver.crt"): serving.cert,
		filepath.Join(pki, "apiserver.key"): serving.key,
	}
	// Each client gets its certificate and a kubeconfig for inside the cluster's network.
	client := func(dir, name, user string, groups ...string) error {
		pair, err := ca.client(user, groups...)
		if err != nil {
			return err
		}
		base := filepath.Join(dir, name)
		files[base+".crt"], files[base+".key"] = pair.cert, pair.key
		files[base+".kubeconfig"] = kubeconfig(c.Name, apiServer, ca.pem, pair)
		return nil
	}
	err = errors.Join(
		client(pki, "admin", "admin", "system:masters"),
		client(pki, "kubelet-client", "kube-apiserver-kubelet-client", "system:masters"),
		client(pki, "controller-manager", "system:kube-controller-manager"),
		client(pki, "scheduler", "system:kube-scheduler"),
		client(pki, "coredns", "coredns", "system:masters"),
	)
	for _, node := range c.plan() {
		dir := s.node(node.name)
		files[filepath.Join(dir, "ca.crt")] = ca.pem
		err = errors.Join(err,
			client(dir, "kubelet", "system:node:"+node.name, "system:nodes"),
			client(dir, "proxy", "system:kube-proxy"))
	}
	if err != nil {
		return err
	}
	for path, text := range files {
		if err := writeFile(path, text, 0o600); err != nil {
			return err
		}
	}
	return nil
}

const programPackage = toolbox.Module + "/hack/cluster"

// installProgram installs the program with the roles at path. It is a copy of this one if it is that program, as "go
// run" removes its binary at the end; else it is built from the checkout.
func installProgram(ctx context.Context, path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Path == programPackage {
		self, err := os.Executable()
		if err != nil {
			return err
		}
		text, err := os.ReadFile(self)
		if err != nil {
			return err
		}
		return writeFile(path, text, 0o755)
	}
	root, err := toolbox.Root()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-o", path, "./hack/cluster")
	cmd.Dir = root
	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build ./hack/cluster: %w\n%s", err, output)
	}
	return nil
}

// start runs the supervisor and returns when it reports that the cluster is up.
func (s state) start(ctx context.Context, c Config) (err error) {
	report, reportEnd, err := os.Pipe()
	if err != nil {
		return err
	}
	defer report.Close()
	consentEnd, consent, err := os.Pipe()
	if err != nil {
		return errors.Join(err, reportEnd.Close())
	}
	defer consent.Close()
	logPath := filepath.Join(s.logs(), "supervisor.log")
	logFile, err := os.OpenFile(logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer logFile.Close()
	cmd := exec.Command(s.program(), roleSupervise, string(s))
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = logFile, logFile
	cmd.ExtraFiles = []*os.File{reportEnd, consentEnd}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // it outlives this process, and the terminal's Ctrl-C
	err = cmd.Start()
	reportEnd.Close()
	consentEnd.Close()
	if err != nil {
		return fmt.Errorf("start the supervisor: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()

	result := make(chan error, 1)
	go func() {
		lines := bufio.NewScanner(report)
		for lines.Scan() {
			line := lines.Text()
			if text, ok := strings.CutPrefix(line, msgProgress); ok {
				fmt.Fprintln(c.Progress, text)
			} else if text, ok := strings.CutPrefix(line, msgError); ok {
				result <- errors.New(strings.ReplaceAll(text, "\t", "\n"))
				return
			} else if line == msgReady {
				result <- nil
				return
			}
		}
		result <- fmt.Errorf("the supervisor exited early; its log is %s:\n%s", logPath, lastLines(logPath, 5))
	}()
	select {
	case err = <-result:
	case <-ctx.Done():
		err = fmt.Errorf("stopped: %w", context.Cause(ctx))
	}
	if err == nil {
		if _, err = fmt.Fprintln(consent, msgKeep); err == nil {
			return nil
		}
	}
	// Without consent the supervisor cleans up and exits.
	consent.Close()
	select {
	case <-ended:
	case <-time.After(2 * stopTimeout):
		cmd.Process.Kill()
		<-ended
	}
	err = fmt.Errorf("cluster %s did not start: %w", c.Name, err)
	if ctx.Err() == nil {
		// The logs are kept for diagnosis.
		return errors.Join(err, release(s, c.Name))
	}
	return errors.Join(err, s.remove(c.Name))
}

// List returns the names of all clusters with a state folder, running or not.
func List() ([]string, error) {
	root, err := stateRoot()
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var names []string
	for _, entry := range entries {
		if entry.IsDir() && checkName(entry.Name()) == nil {
			names = append(names, entry.Name())
		}
	}
	return names, nil
}
