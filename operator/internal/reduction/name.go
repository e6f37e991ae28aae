package reduction

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

// Port is where servers take connections, MetricsPort where they serve metrics and answer probes.
const (
	Port        = 7470
	MetricsPort = 9470
)

// maxStem is how much of the job's name fits before "-reduce-" and eight digits: a StatefulSet's name may have 52 characters.
const maxStem = 36

// Name names the servers of a job that is being created, given the job's name and the creation's UID. A job that is deleted
// and created anew at once gets new servers, and a key that the old ones do not have, under a name that the old ones do
// not have.
func Name(job string, creation types.UID) string {
	job = strings.ReplaceAll(job, ".", "-")
	if job == "" || job[0] < 'a' {
		job = "j" + job // host names begin with a letter
	}
	sum := sha256.Sum256([]byte(creation))
	return strings.TrimRight(job[:min(len(job), maxStem)], "-") + "-reduce-" + hex.EncodeToString(sum[:4])
}

// Endpoints are the servers' addresses, host:port.
func Endpoints(name, namespace string, servers int) []string {
	var list []string
	for i := range servers {
		list = append(list, fmt.Sprintf("%s.%s.%s.svc:%d", Pod(name, i), name, namespace, Port))
	}
	return list
}

// Pod names a server's pod.
func Pod(name string, server int) string { return fmt.Sprintf("%s-%d", name, server) }
