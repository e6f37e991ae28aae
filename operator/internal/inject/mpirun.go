package inject

import (
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// openMPI is the value of an MPIJob's spec.mpiImplementation for Open MPI, the default. Others pass all variables on.
const openMPI = "OpenMPI"

// pluginName finds the variable of the plugin's name in a command. Other variables begin with the same letters.
var pluginName = regexp.MustCompile(`\b` + pluginEnv + `\b`)

// MPIRunOptions are the options with which mpirun passes the job's variables to the ranks that it starts over ssh, which lack those of
// their pods. Empty: the job is no MPIJob, its MPI passes all of them, or its launcher names some already.
func (r Resolved) MPIRunOptions(job *unstructured.Unstructured) string {
	implementation, found, err := unstructured.NestedString(job.Object, "spec", "mpiImplementation")
	if job.GetKind() != "MPIJob" || err != nil || found && implementation != openMPI {
		return ""
	}
	launcher, _, err := unstructured.NestedMap(job.Object, "spec", "mpiReplicaSpecs", "Launcher")
	if err != nil || names(launcher, pluginName) {
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

// names says whether a string somewhere in a value has the word. The name of a variable of the launcher itself does not count: such a
// variable reaches no rank.
func names(value any, word *regexp.Regexp) bool {
	switch value := value.(type) {
	case string:
		return word.MatchString(value)
	case []any:
		return slices.ContainsFunc(value, func(item any) bool { return names(item, word) })
	case map[string]any:
		for key, item := range value {
			if key != "name" && names(item, word) {
				return true
			}
		}
	}
	return false
}
