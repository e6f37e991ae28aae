package toolbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

const keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"

// A Suite is a suite of Debian, such as trixie, whose packages can be unpacked without being installed. apt has a state
// of its own for it, so that the machine's sources are not changed, and checks the signatures.
type Suite struct {
	state   string
	options []string
}

// OpenSuite reads the package lists of a suite from this machine's mirror of Debian. The folder state is apt's; it can
// be removed once nothing more is needed from the suite.
func OpenSuite(ctx context.Context, suite, state string) (*Suite, error) {
	mirror, err := debianMirror(ctx)
	if err != nil {
		return nil, err
	}
	for _, d := range []string{"lists/partial", "archives/partial", "debs"} {
		if err := os.MkdirAll(filepath.Join(state, d), 0o755); err != nil {
			return nil, err
		}
	}
	source := fmt.Sprintf("deb [signed-by=%s arch=amd64] %s %s main\n", keyring, mirror, suite)
	if err := os.WriteFile(filepath.Join(state, "sources.list"), []byte(source), 0o644); err != nil {
		return nil, err
	}
	s := &Suite{state: state, options: []string{"-q"}}
	for _, o := range []string{
		"Dir::Etc::sourcelist=" + filepath.Join(state, "sources.list"), "Dir::Etc::sourceparts=/dev/null",
		"Dir::State::lists=" + filepath.Join(state, "lists"), "Dir::State::status=/dev/null", "Dir::Cache=" + state,
		"APT::Sandbox::User=root", "Acquire::Languages=none",
	} {
		s.options = append(s.options, "-o", o)
	}
	_, err = s.apt(ctx, "apt-get", "update", "--error-on=any")
	return s, err
}

// Depends is what apt-cache says that a package depends on.
func (s *Suite) Depends(ctx context.Context, name string) (string, error) {
	return s.apt(ctx, "apt-cache", "depends", name)
}

// Unpack downloads packages, each "name" or "name=version", and unpacks them into dir.
func (s *Suite) Unpack(ctx context.Context, dir string, packages ...string) error {
	if _, err := s.apt(ctx, "apt-get", append([]string{"download"}, packages...)...); err != nil {
		return err
	}
	debs, err := filepath.Glob(filepath.Join(s.state, "debs", "*.deb"))
	if err != nil {
		return err
	}
	for _, deb := range debs {
		if _, err := programOutput(ctx, dir, "dpkg-deb", "-x", deb, dir); err != nil {
			return err
		}
		if err := os.Remove(deb); err != nil {
			return err
		}
	}
	return nil
}

func (s *Suite) apt(ctx context.Context, program string, args ...string) (string, error) {
	return programOutput(ctx, filepath.Join(s.state, "debs"), program, slices.Concat(s.options, args)...)
}

// debianMirror is this machine's mirror of Debian.
func debianMirror(ctx context.Context) (string, error) {
	list, err := programOutput(ctx, "/", "apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages")
	if err != nil {
		return "", err
	}
	for uri := range strings.FieldsSeq(list) {
		if strings.HasSuffix(strings.TrimRight(uri, "/"), "/debian") {
			return uri, nil
		}
	}
	return "", errors.New("none of apt's sources on this machine is a mirror of Debian")
}

// programOutput runs a program and returns its standard output; the error has the end of its standard error.
func programOutput(ctx context.Context, dir, program string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive")
	cmd.WaitDelay = 10 * time.Second
	var complaint strings.Builder
	cmd.Stderr = &complaint
	text, err := cmd.Output()
	if ctx.Err() != nil {
		return "", context.Cause(ctx)
	}
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", program, err, lastLines(complaint.String(), 5))
	}
	return string(text), nil
}
