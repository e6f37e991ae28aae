package local

import "fmt"

// The address plan. All addresses are in the cluster's own network namespaces. So two clusters use the same addresses,
// and the machine's own network has none of them.
const (
	// ControlPlaneIP is where the API server, DNS and the registry listen.
	ControlPlaneIP = "10.88.0.1"
	// Registry is the address of the cluster's image registry.
	Registry = ControlPlaneIP + ":5000"

	apiPort     = 6443
	podCIDR     = "10.244.0.0/16"
	serviceCIDR = "10.96.0.0/16"
	serviceIP   = "10.96.0.1" // of the service "kubernetes"
	dnsDomain   = "cluster.local"
)

// apiServer is the API server's URL inside the cluster's network.
var apiServer = fmt.Sprintf("https://%s:%d", ControlPlaneIP, apiPort)

// A nodePlan has the names and addresses of a node.
type nodePlan struct {
	name    string // n1, n2, ...
	ip      string
	podCIDR string
	netns   string // its network namespace, as ip-netns knows it
	cgroup  string // its folder in each cgroup hierarchy
}

// planNode returns the plan of the i-th node, counting from 1.
func planNode(cluster string, i int) nodePlan {
	name := fmt.Sprintf("n%d", i)
	return nodePlan{
		name:    name,
		ip:      fmt.Sprintf("10.88.0.%d", 10+i),
		podCIDR: fmt.Sprintf("10.244.%d.0/24", i),
		netns:   netnsName(cluster, name),
		cgroup:  netnsName(cluster, name),
	}
}

// plan returns the plans of all nodes of a cluster.
func (c Config) plan() []nodePlan {
	nodes := make([]nodePlan, c.Nodes)
	for i := range nodes {
		nodes[i] = planNode(c.Name, i+1)
	}
	return nodes
}

// netnsName is the name of a cluster's network namespace: "fabric" (the
// bridge), "cp" (the control plane), or a node's.
func netnsName(cluster, part string) string { return "evk-" + cluster + "-" + part }

// allNetns are the names of every network namespace a cluster of this name
// can have, whatever its size.
func allNetns(cluster string) []string {
	names := []string{netnsName(cluster, "fabric"), netnsName(cluster, "cp")}
	for i := 1; i <= MaxNodes; i++ {
		names = append(names, planNode(cluster, i).netns)
	}
	return names
}
