package inject

import (
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

const (
	// pythonPathEnv has the folders in which Python looks for packages first.
	pythonPathEnv = "PYTHONPATH"
	// pythonFolder is the folder of the Python package beside the libraries.
	pythonFolder = "python"
)

// addPython appends the folder of the Python package to the containers' PYTHONPATH, so that what the container or the profile has there
// is found first. It goes after the environment, which may have that variable. One from envFrom stays as it is.
func addPython(in *injection) error {
	if !in.resolved.Python {
		return nil
	}
	folder := path.Join(path.Dir(libraryPath(in.resolved)), pythonFolder)
	for _, t := range in.targets {
		if !t.excluded {
			t.appendPath(pythonPathEnv, folder)
		}
	}
	return nil
}

// appendPath appends a folder to a variable with a list of folders, unless it is there.
func (t *target) appendPath(name, folder string) {
	found := false
	fromEnvFrom := t.envFromVariables(name)
	for i := range t.Env {
		e := &t.Env[i]
		if e.Name != name || containsVariable(fromEnvFrom, *e) {
			continue
		}
		found = true
		switch {
		case e.ValueFrom != nil:
			t.skip("takes %s from elsewhere", name)
		case e.Value == "":
			e.Value = folder
		case !slices.Contains(strings.Split(e.Value, ":"), folder):
			e.Value += ":" + folder
		}
	}
	if !found {
		t.addEnv(corev1.EnvVar{Name: name, Value: folder})
	}
}
