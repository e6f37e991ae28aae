package reduction

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

// Port accepts connections of ranks. MetricsPort serves metrics and probes.
const (
	Port        = 7470
	MetricsPort = 9470
)

// maxStem is the part of the job's name that fits before "-reduce-" and eight digits: a StatefulSet's name has at most 52
// characters.
const maxStem = 36

// Name returns the name of the servers of a job that is being created, by the job's name and the UID of the request. So a job
// that is deleted and created again at once gets servers of another name, with another key.
func Name(job string, creation types.UID) string {
	job = strings.ReplaceAll(job, ".", "-")
	if job == "" || job[0] < 'a' {
		job = "j" + job // host names begin with a letter
	}
	sum := sha256.Sum256([]byte(creation))
	return strings.TrimRight(job[:min(len(job), maxStem)], "-") + "-reduce-" + hex.EncodeToString(sum[:4])
}

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
