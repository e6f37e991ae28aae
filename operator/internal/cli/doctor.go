package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"

	"evenkeel.dev/evenkeel/operator/internal/doctor"
)

// examineTimeout bounds the examination, which reads all nodes and the pods with a profile, page by page. bundleTimeout bounds the
// bundle, so that a slow cluster has one all the same.
const (
	examineTimeout = 5 * time.Minute
	bundleTimeout  = 5 * time.Minute
)

// problemsFound ends the program with ExitFail. The findings are printed.
type problemsFound struct{}

func (problemsFound) Error() string { return "there are problems" }

func doctorCommand(c *connection) *cobra.Command {
	var output, bundle string
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "What is wrong with the cluster or the installation, and what to do",
		Long: `Looks at the cluster, before and after Evenkeel is installed: versions, container runtimes, your permissions, RDMA devices, Kueue,
the webhook and its certificate, profiles, registries and their Secrets, Pod Security, images with an old glibc, and in which pods
NCCL uses the plugin. One line each. What you may not see is a line too.

It changes nothing. To see whether the webhook answers, it asks for a Job in a dry run. The exit status is 0 if there is no
problem, 2 if there is one, and 1 if the cluster cannot be reached or the examination did not end in time.

--bundle writes a file for a maintainer: the findings, Evenkeel's objects, a summary of the nodes, and the logs of Evenkeel's own
pods. No Secret is in it, and it drops what looks like one: values of variables and options, users of addresses, tokens, private keys.
Look into it before you send it.`,
		Example: `  kubectl evenkeel doctor
  kubectl evenkeel doctor -o json
  kubectl evenkeel doctor --bundle evenkeel-bundle.tar.gz`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "" && output != "json" {
				return fmt.Errorf("--output %q: want json, or nothing", output)
			}
			cluster, err := c.client()
			if err != nil {
				return err
			}
			config, err := c.config().ClientConfig()
			if err != nil {
				return err
			}
			clientset, err := kubernetes.NewForConfig(config)
			if err != nil {
				return fmt.Errorf("connect to %s: %w", config.Host, err)
			}
			d := &doctor.Doctor{Client: cluster, Clientset: clientset, Namespace: c.system(), Now: time.Now()}
			findings, err := examine(cmd.Context(), d)
			if len(findings) > 0 {
				err = errors.Join(printFindings(cmd.OutOrStdout(), findings, output), err)
			}
			if bundle != "" && len(findings) > 0 {
				if failed := writeBundle(cmd.Context(), d, bundle, findings); failed != nil {
					return errors.Join(err, failed)
				}
				fmt.Fprintln(cmd.ErrOrStderr(), "wrote", bundle)
			}
			if err != nil {
				return err
			}
			if doctor.Sick(findings) {
				return problemsFound{}
			}
			return nil
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "", "json, or a line for each finding")
	cmd.Flags().StringVar(&bundle, "bundle", "", "write a support bundle (tar.gz) to this file")
	return cmd
}

func examine(ctx context.Context, d *doctor.Doctor) ([]doctor.Finding, error) {
	ctx, cancel := context.WithTimeout(ctx, examineTimeout)
	defer cancel()
	return d.Examine(ctx)
}

func printFindings(out io.Writer, findings []doctor.Finding, output string) error {
	if output == "json" {
		encoder := json.NewEncoder(out)
		encoder.SetIndent("", "  ")
		return encoder.Encode(findings)
	}
	for _, f := range findings {
		line := fmt.Sprintf("%-8s %-12s %s", f.Status, f.Check, f.Message)
		if f.Do != "" {
			line += "; do: " + f.Do
		}
		if _, err := fmt.Fprintln(out, line); err != nil {
			return err
		}
	}
	return nil
}

// writeBundle writes the file for its owner only, also if it is there already.
func writeBundle(ctx context.Context, d *doctor.Doctor, path string, findings []doctor.Finding) (err error) {
	ctx, cancel := context.WithTimeout(ctx, bundleTimeout)
	defer cancel()
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return fmt.Errorf("--bundle: %w", err)
	}
	defer func() {
		if closed := file.Close(); err == nil && closed != nil {
			err = fmt.Errorf("--bundle: %w", closed)
		}
	}()
	info, err := file.Stat()
	if err == nil && info.Mode().IsRegular() { // not a pipe or a device, which are everybody's
		err = file.Chmod(0o600)
	}
	if err != nil {
		return fmt.Errorf("--bundle: %w", err)
	}
	return d.WriteBundle(ctx, file, findings)
}
