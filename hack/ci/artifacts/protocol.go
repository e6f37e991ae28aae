package artifacts

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
)

// protocolLabel is the label of images of the plugin and of the reduction servers that says which protocols they speak.
// Tags end with the same after -p, so that the operator can compare images without reading a registry.
const protocolLabel = "evenkeel.dev/protocol"

// Protocol is the protocols that the plugin of a checkout speaks, such as 7.2: the version among peers, and that with
// reduction servers.
func Protocol(root string) (string, error) {
	peers, err := constant(filepath.Join(root, "plugin", "crates", "protocol", "src", "handshake", "hello.rs"), "PROTOCOL_VERSION")
	if err != nil {
		return "", err
	}
	servers, err := constant(filepath.Join(root, "plugin", "crates", "reduction", "src", "protocol", "packet.rs"), "VERSION")
	if err != nil {
		return "", err
	}
	return peers + "." + servers, nil
}

// constant is the value of a constant of type u16 in a Rust file.
func constant(path, name string) (string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("version of a protocol: %w", err)
	}
	found := regexp.MustCompile(`(?m)^(?:pub )?const ` + name + `: u16 = ([0-9]+);$`).FindSubmatch(text)
	if found == nil {
		return "", fmt.Errorf("version of a protocol: %s has no constant %s: u16", path, name)
	}
	return string(found[1]), nil
}
