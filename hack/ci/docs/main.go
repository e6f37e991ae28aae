// Command docs writes the generated pages of docs/ and builds the book.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// A page is a file of docs/ that is generated from other files of the checkout.
type page struct {
	path     string
	generate func(root string) ([]byte, error)
}

var pages = []page{
	{"docs/reference/crds.md", crdPage},
	{"docs/reference/metrics.md", metricsPage},
	{"docs/pictures/tcp.svg", tcpChart},
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	root := &cobra.Command{
		Use:               "docs",
		Short:             "Write the generated pages, and build the book into dist/docs/",
		Example:           "  go run ./hack/ci/docs\n  go run ./hack/ci/docs generate",
		Args:              cobra.NoArgs,
		SilenceUsage:      true,
		SilenceErrors:     true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		RunE: func(cmd *cobra.Command, _ []string) error {
			root, err := toolbox.Root()
			if err != nil {
				return err
			}
			if err := generate(root); err != nil {
				return err
			}
			return build(cmd.Context(), root, filepath.Join(root, "dist", "docs"))
		},
	}
	root.AddCommand(&cobra.Command{
		Use:   "generate",
		Short: "Write the generated pages only",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			root, err := toolbox.Root()
			if err != nil {
				return err
			}
			return generate(root)
		},
	})
	if err := root.ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "docs:", err)
		os.Exit(1)
	}
}

// generate writes every page whose text has changed.
func generate(root string) error {
	for _, p := range pages {
		text, err := p.generate(root)
		if err != nil {
			return fmt.Errorf("%s: %w", p.path, err)
		}
		path := filepath.Join(root, p.path)
		had, err := os.ReadFile(path)
		if err == nil && string(had) == string(text) {
			continue
		}
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, text, 0o644); err != nil {
			return err
		}
		fmt.Println("wrote", p.path)
	}
	return nil
}
