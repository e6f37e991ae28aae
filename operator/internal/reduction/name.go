package reduction

import (
	"fmt"

	"k8s.io/apimachinery/pkg/types"

	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// Port accepts connections of ranks. MetricsPort serves metrics and probes.
const (
	Port        = 7470
	MetricsPort = 9470
)

// Name returns the name of the servers of a job that is being created, by the job's name and the UID of the request. So a job
// that is deleted and created again at once gets servers of another name, with another key.
func Name(job string, creation types.UID) string { return workload.ObjectName(job, "reduce", creation) }

// Endpoints returns the addresses of the servers, host:port.
func Endpoints(name, namespace string, servers int) []string {
	var list []string
	for i := range servers {
		list = append(list, fmt.Sprintf("%s.%s.%s.svc:%d", Pod(name, i), name, namespace, Port))
	}
	return list
}

// Pod returns the name of a server's pod.
func Pod(name string, server int) string { return fmt.Sprintf("%s-%d", name, server) }
