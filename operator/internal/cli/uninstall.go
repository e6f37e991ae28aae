package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/operator/internal/kube/sweep"
	"evenkeel.dev/evenkeel/operator/internal/uninstall"
)

// ExitRefused is the exit status of an uninstall that would stop queues of Kueue.
const ExitRefused = 2

// maxNamed is the number of things that a dry run names of each step.
const maxNamed = 5

// queuesRefusal names the ClusterQueues that would admit nothing any more. They are printed already.
type queuesRefusal struct{}

func (queuesRefusal) Error() string { return "ClusterQueues name Evenkeel's AdmissionChecks" }

type uninstaller struct {
	release        uninstall.Release
	dryRun         bool
	detach, delete bool
	timeout        time.Duration
}

func uninstallCommand(c *connection) *cobra.Command {
	var u uninstaller
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Remove Evenkeel from the cluster, so that nothing waits for it",
		Long: `Does what helm uninstall does, with your permissions and without a pod in the cluster: for a cluster where helm uninstall failed
or was interrupted, or from which only the namespace was deleted. It deletes the webhooks and deployments, starts all jobs that
wait for their nodes to be proven, removes condition, label and taint from all nodes, and deletes what else the chart installed.
The CRDs stay, and with them profiles and results, unless --crds is given; they serve v1alpha1 alone then. Jobs that run are not touched.

It may be interrupted at any time, and continues when it is started again. The exit status is 0 if nothing is left, 1 if
something could not be removed, and 2 if it did nothing because ClusterQueues of Kueue name AdmissionChecks of Evenkeel's:
such queues would admit nothing any more.`,
		Example: `  kubectl evenkeel uninstall --dry-run         # what would it do?
  kubectl evenkeel uninstall
  kubectl evenkeel uninstall --detach-queues   # and remove Evenkeel's AdmissionChecks from Kueue's ClusterQueues`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cluster, err := c.client()
			if err != nil {
				return err
			}
			u.release.Namespace = c.system()
			ctx, cancel := context.WithTimeoutCause(cmd.Context(), u.timeout, fmt.Errorf("timed out after %s (--timeout); rerun to continue", u.timeout))
			defer cancel()
			err = u.run(ctx, cluster, cmd.OutOrStdout())
			if err != nil && ctx.Err() != nil {
				return fmt.Errorf("%w (%w)", context.Cause(ctx), err)
			}
			return err
		},
	}
	cmd.Flags().StringVar(&u.release.Name, "release", "evenkeel", "name of the Helm release")
	cmd.Flags().BoolVar(&u.dryRun, "dry-run", false, "say what would be done, and change nothing")
	cmd.Flags().BoolVar(&u.detach, "detach-queues", false, "remove Evenkeel's AdmissionChecks from the ClusterQueues of Kueue that name them")
	cmd.Flags().BoolVar(&u.delete, "crds", false, "delete the CRDs too, and with them all profiles, policies and results; reduction servers of running jobs end")
	cmd.Flags().DurationVar(&u.timeout, "timeout", 10*time.Minute, "maximum time")
	return cmd
}

func (u *uninstaller) run(ctx context.Context, c client.Client, out io.Writer) error {
	now := clock.RealClock{}
	queues := uninstall.Queues(c)
	named, err := queues.List(ctx)
	if err != nil {
		return err
	}
	refused := len(named) > 0 && !u.detach
	if refused {
		fmt.Fprintln(out, "these would admit nothing without Evenkeel; remove the checks from them, or add --detach-queues:")
		list(out, named, len(named))
	}
	var first, steps []uninstall.Step
	if u.detach {
		first = append(first, queues)
	}
	steps = append(steps, u.release.Stop(c)...)
	steps = append(steps, u.release.Conversion(c))
	steps = append(steps, uninstall.Gates(c, now)...)
	steps = append(steps, uninstall.Leftovers(c, now)...)
	steps = append(steps, u.release.Checks(c), u.release.Delete(c))
	if u.delete {
		steps = append(steps, u.release.DeleteDefinitions(c))
	}
	switch {
	case u.dryRun:
		if err := describe(ctx, out, append(first, steps...)); err != nil {
			return err
		}
	case !refused:
		// A queue that still names a check would stop, so nothing else is done before.
		if err := uninstall.Run(ctx, out, now, first...); err != nil {
			return err
		}
		if err := uninstall.Run(ctx, out, now, steps...); err != nil {
			return fmt.Errorf("not everything could be removed; rerun to continue: %w", err)
		}
		if err := u.recordHint(ctx, c, out); err != nil {
			return err
		}
	}
	if refused {
		return queuesRefusal{}
	}
	return nil
}

// describe says what the steps would do.
func describe(ctx context.Context, out io.Writer, steps []uninstall.Step) error {
	var all []error
	for _, step := range steps {
		items, err := step.List(ctx)
		all = append(all, err)
		fmt.Fprintf(out, "%s: %d\n", step.About, len(items))
		list(out, items, maxNamed)
	}
	return errors.Join(all...)
}

func list(out io.Writer, items []sweep.Item, most int) {
	for _, item := range items[:min(most, len(items))] {
		fmt.Fprintf(out, "  %s\n", item.Name)
	}
	if more := len(items) - most; more > 0 {
		fmt.Fprintf(out, "  and %d more\n", more)
	}
}

// recordHint says how to remove Helm's own record of the release, if there is one.
func (u *uninstaller) recordHint(ctx context.Context, c client.Client, out io.Writer) error {
	var records corev1.SecretList
	if err := c.List(ctx, &records, client.InNamespace(u.release.Namespace), client.MatchingLabels{"owner": "helm", "name": u.release.Name}, client.Limit(1)); err != nil {
		return fmt.Errorf("list Helm's records: %w", err)
	}
	fmt.Fprintln(out, "nothing waits for Evenkeel any more")
	if len(records.Items) > 0 {
		fmt.Fprintf(out, "Helm still lists the release: helm uninstall %s -n %s --no-hooks\n", u.release.Name, u.release.Namespace)
	}
	return nil
}
