// Command audit checks what Evenkeel is built from: licences, known vulnerabilities, and where dependencies come from.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/ci/artifacts"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

const denyVersion = "0.20.2"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var offline bool
	cmd := &cobra.Command{
		Use: "audit", Short: "Check licences, known vulnerabilities and sources of all dependencies", Args: cobra.NoArgs,
		Long: `Check licences, known vulnerabilities and sources of all dependencies, by cargo-deny, govulncheck and syft at pinned versions.

The databases of vulnerabilities are fetched: RustSec's from a git host, Go's from vuln.go.dev. Where they cannot be reached,
the audit says so and fails. With --offline it says so, and the result is that of the other checks.`,
		Example:      "  go run ./hack/ci/audit\n  go run ./hack/ci/audit --offline",
		SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error { return audit(cmd.Context(), offline) },
	}
	cmd.Flags().BoolVar(&offline, "offline", false, "leave out what needs a database from the network")
	if err := cmd.ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "audit:", err)
		os.Exit(1)
	}
}

// errNotChecked is that of a check which could not be done.
var errNotChecked = errors.New("NOT CHECKED")

// audit does every check, even after one has failed, and prints a line for each.
func audit(ctx context.Context, offline bool) error {
	root, err := toolbox.Root()
	if err != nil {
		return err
	}
	box, err := toolbox.New(os.Stderr)
	if err != nil {
		return err
	}
	deny, err := toolbox.CargoTool(ctx, os.Stderr, "cargo-deny", denyVersion)
	if err != nil {
		return err
	}
	online := func(check func() error) func() error {
		if offline {
			return func() error { return fmt.Errorf("%w: --offline", errNotChecked) }
		}
		return check
	}
	var failed []string
	for _, c := range []struct {
		name string
		do   func() error
	}{
		{"Rust: licences, duplicates, sources", func() error { return cargoDeny(ctx, root, deny, "plugin", "licenses", "bans", "sources") }},
		{"Rust: the same of the fuzz targets", func() error { return cargoDeny(ctx, root, deny, "plugin/fuzz", "licenses", "bans", "sources") }},
		{"Rust: known vulnerabilities (RustSec)", online(func() error { return cargoDeny(ctx, root, deny, "plugin", "advisories") })},
		{"Go: licences", func() error { return goLicences(ctx, root, box) }},
		{"Go: known vulnerabilities (vuln.go.dev)", online(func() error { return govulncheck(ctx, root, box) })},
	} {
		result := "ok"
		if err := c.do(); err != nil {
			result = err.Error()
			if !offline || !errors.Is(err, errNotChecked) {
				failed = append(failed, c.name)
			}
		}
		fmt.Printf("%-40s %s\n", c.name, result)
	}
	if len(failed) > 0 {
		return errors.New(strings.Join(failed, "; "))
	}
	return nil
}

// cargoDeny runs checks of plugin/deny.toml, which is found from any folder in it, on the workspace in a folder.
func cargoDeny(ctx context.Context, root, deny, folder string, checks ...string) error {
	cmd := exec.CommandContext(ctx, deny, append([]string{"--color", "never", "--locked", "check", "--hide-inclusion-graph"}, checks...)...)
	cmd.Dir = filepath.Join(root, folder)
	return outcome(cmd, "failed to fetch advisory database", "failed to acquire advisory database")
}

// govulncheck reports vulnerabilities in functions that are called.
func govulncheck(ctx context.Context, root string, box *toolbox.Toolbox) error {
	program, err := box.Path(ctx, "govulncheck")
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, program, "./...")
	cmd.Dir = root
	return outcome(cmd, "fetching vulnerabilities:")
}

// outcome runs a check. Output with one of the messages means that its database could not be had.
func outcome(cmd *exec.Cmd, unreachable ...string) error {
	out, err := cmd.CombinedOutput()
	if err == nil {
		return nil
	}
	text := string(bytes.TrimSpace(out))
	for _, message := range unreachable {
		if at := strings.Index(text, message); at >= 0 {
			line, _, _ := strings.Cut(text[at:], "\n")
			return fmt.Errorf("%w: the database cannot be reached: %s", errNotChecked, line)
		}
	}
	return fmt.Errorf("%w\n%s", err, text)
}

// goLicences checks the modules in the programs that are shipped.
func goLicences(ctx context.Context, root string, box *toolbox.Toolbox) error {
	syft, err := box.Path(ctx, "syft")
	if err != nil {
		return err
	}
	work, err := os.MkdirTemp("", "evenkeel-audit-")
	if err != nil {
		return fmt.Errorf("folder for programs: %w", err)
	}
	defer os.RemoveAll(work)
	builder := artifacts.Builder{Progress: os.Stderr}
	if err := builder.Go(ctx, root, "linux", "amd64", work+"/", "./operator/cmd/..."); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, syft, "scan", "dir:"+work, "--output", "syft-json", "--quiet")
	// The texts of licences are where go keeps modules.
	cmd.Env = append(os.Environ(), "SYFT_CHECK_FOR_APP_UPDATE=false", "SYFT_GOLANG_SEARCH_LOCAL_MOD_CACHE_LICENSES=true")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("syft: %w", err)
	}
	return checkLicences(out)
}
