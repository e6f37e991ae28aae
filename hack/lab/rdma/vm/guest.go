package vm

import (
	"embed"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

//go:embed guest/*.sh
var scripts embed.FS

// initramfs creates the archive that a machine boots from: the programs that mount the root, and in lab/ those that run
// there.
func (l *Lab) initramfs(c Config) ([]byte, error) {
	var a archive
	for _, name := range []string{"bin", "dev", "proc", "sys", "below", "above", "new", "modules", "lab"} {
		a.folder(name)
	}
	box, err := os.ReadFile(busybox)
	if err != nil {
		return nil, err
	}
	a.file("bin/busybox", box)
	modules, err := os.ReadDir(filepath.Join(l.kernel.dir, "boot"))
	if err != nil {
		return nil, err
	}
	for _, m := range modules {
		content, err := os.ReadFile(filepath.Join(l.kernel.dir, "boot", m.Name()))
		if err != nil {
			return nil, err
		}
		a.file("modules/"+m.Name(), content)
	}
	for name, script := range map[string]string{"init": "boot.sh", "lab/main.sh": "main.sh", "lab/prepare.sh": "prepare.sh"} {
		content, err := scripts.ReadFile("guest/" + script)
		if err != nil {
			return nil, err
		}
		a.file(name, content)
	}
	a.file("lab/share", []byte(c.Share))
	a.file("lab/kernel", []byte(l.kernel.dir))
	a.file("lab/topology", []byte(c.Topology))
	a.file("lab/command.sh", []byte(commandScript(c)))
	return a.bytes(), nil
}

// commandScript is the command with its environment and working folder, for bash.
func commandScript(c Config) string {
	words := []string{"exec", "env", "-i", "--"}
	for _, entry := range append(slices.Clone(c.Env), TopologyVariable+"="+string(c.Topology)) {
		words = append(words, quote(entry))
	}
	// env would treat a program with "=" in its name as a variable; a shell does not.
	words = append(words, "bash", "-c", quote(`exec "$0" "$@"`))
	for _, argument := range c.Command {
		words = append(words, quote(argument))
	}
	return fmt.Sprintf("cd %s || exit 125\n%s\n", quote(c.Dir), strings.Join(words, " "))
}

// quote makes one shell word of any text.
func quote(text string) string {
	return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'"
}
