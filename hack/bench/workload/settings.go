package workload

import (
	"bytes"
	"fmt"
	"os"
	"strings"
)

// known checks that a library has the settings of an environment. One without a setting would ignore it, and its
// results would be shown under the wrong name.
func known(library string, environment []string) error {
	content, err := os.ReadFile(library)
	if err != nil {
		return fmt.Errorf("the plugin: %w", err)
	}
	for _, variable := range environment {
		name, _, _ := strings.Cut(variable, "=")
		if strings.HasPrefix(name, "EVENKEEL_") && !bytes.Contains(content, []byte(name)) {
			return fmt.Errorf("the plugin %s has no setting %s", library, name)
		}
	}
	return nil
}
