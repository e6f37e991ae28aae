package inject

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

const (
	// JobEnv is the variable with the job's name for the metrics and log lines of its servers.
	JobEnv = "EVENKEEL_JOB"

	maxJobName = 63 // the plugin accepts no longer name
	serversEnv = "EVENKEEL_REDUCTION_SERVERS"
)

// Reduction is how a job's containers reach its reduction servers.
type Reduction struct {
	// Service is the ReductionService's name, and that of the Secret with the job's key, unless its user brought one.
	Service string
	// Servers are their addresses, host:port.
	Servers []string
}

// JobName is a job's value of JobEnv. A name that is too long is cut, and ends in a hash of the whole.
func JobName(namespace, name string) string {
	whole := namespace + "/" + name
	if len(whole) <= maxJobName {
		return whole
	}
	sum := sha256.Sum256([]byte(whole))
	digits := "-" + hex.EncodeToString(sum[:4])
	return whole[:maxJobName-len(digits)] + digits
}

// reductionFromPod reads and checks what Labels and Annotations wrote. Nil: the job has no servers.
func reductionFromPod(labels, annotations map[string]string) (*Reduction, error) {
	service, servers := labels[evenkeel.ReductionClientKey], annotations[evenkeel.ReductionServersKey]
	if service == "" && servers == "" {
		return nil, nil
	}
	if service == "" || servers == "" {
		return nil, fmt.Errorf("label %s and annotation %s go together: put the annotation %s on the job instead",
			evenkeel.ReductionClientKey, evenkeel.ReductionServersKey, evenkeel.ReductionKey)
	}
	if errs := validation.IsDNS1123Label(service); errs != nil {
		return nil, fmt.Errorf("label %s is %q: the name of a ReductionService", evenkeel.ReductionClientKey, service)
	}
	r := &Reduction{Service: service, Servers: strings.Split(servers, ",")}
	for _, server := range r.Servers {
		if host, port, err := net.SplitHostPort(server); err != nil || host == "" || port == "" {
			return nil, fmt.Errorf("annotation %s has %q: want host:port,host:port and so on", evenkeel.ReductionServersKey, server)
		}
	}
	return r, nil
}

// addReduction adds what containers with the job's key need to use its reduction servers: the addresses and NCCL's switch.
func addReduction(in *injection) error {
	r := in.resolved.Reduction
	if r == nil {
		return nil
	}
	for _, t := range in.targets {
		if !t.hasJobKey {
			continue
		}
		t.usesServers = true
		t.Env = append(t.Env, corev1.EnvVar{Name: serversEnv, Value: strings.Join(r.Servers, ",")})
		t.setEnv(collNetEnv, "1", false)
	}
	return nil
}
