package local

import (
	"fmt"
	"path/filepath"
)

// Configuration of the cluster's programs. These folders are mounts in the node's own mount namespace.
const (
	nodeView       = "/run/evenkeel/node" // the node's state folder
	kubernetesView = "/run/evenkeel/kubernetes"
	containerdView = "/run/evenkeel/containerd"
	logsView       = "/run/evenkeel/logs"
	programView    = "/run/evenkeel/bin/cluster"
	sharedView     = "/run/evenkeel/shared"
	cniPrograms    = "/usr/lib/cni" // where Debian has them
	sandboxImage   = "localhost/evenkeel-pause:v1"
	containerdSock = "/run/containerd/containerd.sock"
)

// controlPlane lists the control plane's processes, in the order they start.
func controlPlane(s state, t tools, kubernetes string) (etcd, apiserver service, rest []service) {
	pki := func(name string) string { return s.path("pki", name) }
	program := func(name string, args ...string) service {
		return service{name: name, argv: append([]string{filepath.Join(kubernetes, name)}, args...)}
	}
	etcd = service{name: "etcd", argv: []string{
		filepath.Join(t.Etcd, "etcd"), "--data-dir=" + s.path("etcd"),
		"--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
		"--listen-peer-urls=http://127.0.0.1:2380",
		"--unsafe-no-fsync", // the data does not outlive the cluster
	}}
	apiserver = program("kube-apiserver",
		"--etcd-servers=http://127.0.0.1:2379",
		"--bind-address=0.0.0.0", "--advertise-address="+ControlPlaneIP, fmt.Sprintf("--secure-port=%d", apiPort),
		"--service-cluster-ip-range="+serviceCIDR,
		"--tls-cert-file="+pki("apiserver.crt"), "--tls-private-key-file="+pki("apiserver.key"),
		"--client-ca-file="+pki("ca.crt"),
		"--service-account-key-file="+pki("sa.pub"), "--service-account-signing-key-file="+pki("sa.key"),
		"--service-account-issuer=https://kubernetes.default.svc."+dnsDomain,
		"--kubelet-client-certificate="+pki("kubelet-client.crt"), "--kubelet-client-key="+pki("kubelet-client.key"),
		"--kubelet-preferred-address-types=InternalIP", // node names are in no DNS
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
		"--enable-aggregator-routing=true", // reach webhook pods without kube-proxy, which runs on nodes only
		"--endpoint-reconciler-type=lease",
	)
	rest = []service{
		program("kube-controller-manager",
			"--kubeconfig="+pki("controller-manager.kubeconfig"),
			"--service-account-private-key-file="+pki("sa.key"), "--root-ca-file="+pki("ca.crt"),
			"--cluster-signing-cert-file="+pki("ca.crt"), "--cluster-signing-key-file="+pki("ca.key"),
			"--use-service-account-credentials", "--leader-elect=false", "--bind-address=127.0.0.1",
			"--node-monitor-grace-period=20s",
			"--flex-volume-plugin-dir="+s.path("volume-plugins"), // it makes the folder; the default is in /usr
		),
		program("kube-scheduler", "--kubeconfig="+pki("scheduler.kubeconfig"), "--leader-elect=false", "--bind-address=127.0.0.1"),
		{name: "coredns", argv: []string{filepath.Join(t.CoreDNS, "coredns"), "-conf", s.path("Corefile")}},
		{name: "registry", argv: []string{"docker-registry", "serve", s.path("registry.yaml")}},
	}
	return etcd, apiserver, rest
}

func corefile(kubeconfig string) string {
	return fmt.Sprintf(`.:53 {
  bind %s
  errors
  kubernetes %s in-addr.arpa {
    kubeconfig %s
    pods insecure
    ttl 5
  }
  cache 5
}
`, ControlPlaneIP, dnsDomain, kubeconfig)
}

func registryConfig(folder string) string {
	return fmt.Sprintf(`version: 0.1
log: {level: warn}
storage:
  filesystem: {rootdirectory: %q}
  delete: {enabled: true}
http: {addr: %q}
`, folder, Registry)
}

// registryHosts is containerd's configuration of the registry, which has no TLS.
func registryHosts() string {
	return fmt.Sprintf("server = \"http://%[1]s\"\n[host.\"http://%[1]s\"]\n  capabilities = [\"pull\", \"resolve\"]\n", Registry)
}

// containerdConfig is containerd 2's configuration. keepOOMScore is for a machine where not even root may lower a
// process's out-of-memory score: containerd then does not change it, where it would fail every pod.
func containerdConfig(keepOOMScore bool) string {
	return fmt.Sprintf(`version = 3
[plugins.'io.containerd.internal.v1.opt']
  path = "/var/lib/containerd/opt"
[plugins.'io.containerd.nri.v1.nri']
  disable = true
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = %q
  [plugins.'io.containerd.cri.v1.images'.registry]
    config_path = %q
[plugins.'io.containerd.cri.v1.runtime']
  disable_apparmor = true
  restrict_oom_score_adj = %t
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = [%q]
    conf_dir = %q
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      SystemdCgroup = false
`, sandboxImage, nodeView+"/registries", keepOOMScore, cniPrograms, nodeView+"/cni")
}

func cniConfig(podCIDR string) string {
	return fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "evenkeel", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true, "ipMasq": false,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": %q}]], "routes": [{"dst": "0.0.0.0/0"}], "dataDir": "/run/cni-ipam"}},
  {"type": "portmap", "capabilities": {"portMappings": true}}
]}
`, podCIDR)
}

// kubeletConfig has eviction limits for memory only, as the disk is the machine's. Volumes of Secrets follow within 5
// seconds. With the usual minute, a controller that makes its own certificate is ready a minute later.
func kubeletConfig() string {
	return fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: %[1]s/ca.crt}}
authorization: {mode: Webhook}
cgroupDriver: cgroupfs
failCgroupV1: false
failSwapOn: false
clusterDNS: [%[2]s]
clusterDomain: %[3]s
containerRuntimeEndpoint: unix://%[4]s
resolvConf: /run/evenkeel/resolv.conf
volumePluginDir: /var/lib/kubelet/volume-plugins
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: 100Mi, nodefs.available: "0%%", imagefs.available: "0%%", nodefs.inodesFree: "0%%", imagefs.inodesFree: "0%%"}
nodeStatusUpdateFrequency: 4s
syncFrequency: 5s
`, nodeView, ControlPlaneIP, dnsDomain, containerdSock)
}

// proxyConfig does not change the limits of connection tracking, which are machine-wide.
func proxyConfig(node string) string {
	return fmt.Sprintf(`apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clientConnection: {kubeconfig: %s/proxy.kubeconfig}
mode: nftables
clusterCIDR: %s
hostnameOverride: %s
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
`, nodeView, podCIDR, node)
}
