package doctor

import (
	"regexp"
	"strings"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// redacted takes the place of what nobody else should see.
const redacted = "(redacted)"

// secretName matches names of variables whose value nobody else should see.
var secretName = regexp.MustCompile(`(?i)key|token|secret|passw|credential|auth|private`)

// secretWord matches the names that stand before a secret in options, addresses and logs. In those, key and secret alone are mostly
// names of objects.
const secretWord = `[\w.-]*(?:token|passw(?:or)?d|credentials?|(?:api|access|job|private|secret)[_-]?key|client[_-]?secret|authorization)`

var (
	// secretOption matches an option whose value is the next argument.
	secretOption = regexp.MustCompile(`(?i)^--?` + secretWord + `$`)
	// secretTexts match secrets within a text. What the first group matches stays.
	secretTexts = []*regexp.Regexp{
		regexp.MustCompile(`(?s)()-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\z)`),
		regexp.MustCompile(`()\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*`), // a JSON web token
		regexp.MustCompile(`(?i)(\b(?:bearer|basic)\s+)[\w.~+/=-]{8,}`),
		regexp.MustCompile(`(?i)(` + secretWord + `\\?["']?\s*[=:]\s*\\?["']?)[^\s"'\\,;&)]+`),
	}
	// addressUser matches the user of an address and who it is: proxies and databases have a password there.
	addressUser = regexp.MustCompile(`([a-zA-Z][a-zA-Z0-9+.-]*://)[^\s/@"']+@`)
)

// redactText removes what looks like a secret from a text.
func redactText(text string) string {
	for _, pattern := range secretTexts {
		text = pattern.ReplaceAllString(text, "${1}"+redacted)
	}
	return addressUser.ReplaceAllString(text, "${1}"+redacted+"@")
}

// redact removes what others wrote about the object, values of variables that look like a secret, and what looks like one in any
// text, wherever they are.
func redact(object map[string]any) {
	if metadata, ok := object["metadata"].(map[string]any); ok {
		delete(metadata, "managedFields")
	}
	redactValue(object)
}

// redactValue redacts what is in the value, and returns what takes its place.
func redactValue(value any) any {
	switch value := value.(type) {
	case string:
		return redactText(value)
	case map[string]any:
		if name, ok := value["name"].(string); ok && secretName.MatchString(name) {
			if _, has := value["value"].(string); has {
				value["value"] = redacted
			}
		}
		for key, inner := range value {
			if annotations, ok := inner.(map[string]any); ok && (key == "annotations" || key == "podAnnotations") {
				redactAnnotations(annotations)
			}
			value[key] = redactValue(inner)
		}
	case []any:
		for i, inner := range value {
			value[i] = redactValue(inner)
			if option, ok := inner.(string); ok && secretOption.MatchString(option) && i+1 < len(value) {
				value[i+1] = redacted
			}
		}
	}
	return value
}

func redactAnnotations(annotations map[string]any) {
	for key := range annotations {
		// The environment of a profile is one of Evenkeel's, and kubectl's last applied configuration has everything again.
		if !strings.HasPrefix(key, "evenkeel.dev/") || key == evenkeel.EnvironmentKey {
			annotations[key] = redacted
		}
	}
}
