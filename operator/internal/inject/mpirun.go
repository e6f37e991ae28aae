package inject

import (
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// openMPI is the value of an MPIJob's spec.mpiImplementation for Open MPI, the default. Others pass all variables on.
const openMPI = "OpenMPI"

// MPIRunOptions are the options with which mpirun passes the job's variables to the ranks that it starts over ssh, which lack those of
// their pods. Empty: the job is no MPIJob, its MPI passes all of them, or its launcher names some already.
func (r Resolved) MPIRunOptions(job *unstructured.Unstructured) string {
	implementation, found, err := unstructured.NestedString(job.Object, "spec", "mpiImplementation")
	if job.GetKind() != "MPIJob" || err != nil || found && implementation != openMPI {
		return ""
	}
	launcher, _, err := unstructured.NestedMap(job.Object, "spec", "mpiReplicaSpecs", "Launcher")
	if err != nil || names(launcher, pluginEnv) {
		return ""
	}
	variables := append([]string{pluginEnv, refCountEnv}, r.Variables()...)
	if r.JobKey != nil || r.Reduction != nil {
		variables = append(variables, KeyFileEnv)
	}
	if r.Reduction != nil {
		variables = append(variables, serversEnv, collNetEnv)
	}
	slices.Sort(variables)
	return "-x " + strings.Join(slices.Compact(variables), " -x ")
}

// names says whether a string somewhere in a value has the word.
func names(value any, word string) bool {
	switch value := value.(type) {
	case string:
		return strings.Contains(value, word)
	case []any:
		return slices.ContainsFunc(value, func(item any) bool { return names(item, word) })
	case map[string]any:
		for _, item := range value {
			if names(item, word) {
				return true
			}
		}
	}
	return false
}
