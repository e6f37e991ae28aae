package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/util/duration"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/controller/nodenetworkhealth"
	"evenkeel.dev/evenkeel/operator/internal/preflight/report"
	"evenkeel.dev/evenkeel/operator/internal/text"
)

func checkStatusCommand(c *connection) *cobra.Command {
	return &cobra.Command{
		Use:   "status [CHECK]",
		Short: "Results of all checks, or of one",
		Long:  "Results of checks. Without a name: the nodes by health, the policies, and the latest checks. With a name: everything about that check.",
		Example: `  kubectl evenkeel check status
  kubectl evenkeel check status nightly-29411`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			cluster, err := c.client()
			if err != nil {
				return err
			}
			if len(args) == 0 {
				return printOverview(cmd.Context(), cluster, c.system(), cmd.OutOrStdout(), time.Now())
			}
			check := &evenkeel.NetworkCheck{}
			if err := cluster.Get(cmd.Context(), client.ObjectKey{Namespace: c.system(), Name: args[0]}, check); err != nil {
				return fmt.Errorf("read the check: %w", err)
			}
			return describeCheck(cmd.OutOrStdout(), check, time.Now())
		},
	}
}

// maxShown is the maximum number of checks listed, the latest first.
const maxShown = 10

// printOverview prints nodes by health, policies and the latest checks.
func printOverview(ctx context.Context, cluster client.Client, namespace string, out io.Writer, now time.Time) error {
	nodes, healths, policies, err := nodenetworkhealth.ListAll(ctx, cluster)
	if err != nil {
		return err
	}
	var checks evenkeel.NetworkCheckList
	if err := cluster.List(ctx, &checks, client.InNamespace(namespace)); err != nil {
		return fmt.Errorf("list checks: %w", err)
	}
	healthy, bad := 0, []string{}
	for i := range nodes {
		switch s := healths[nodes[i].Name]; {
		case s == nil:
		case s.Health == evenkeel.HealthHealthy:
			healthy++
		case s.Health == evenkeel.HealthUnhealthy:
			bad = append(bad, nodes[i].Name)
		}
	}
	slices.Sort(bad)
	unhealthy := fmt.Sprintf("%d unhealthy", len(bad))
	if len(bad) > 0 {
		unhealthy += " (" + text.List(bad, 200) + ")"
	}
	fmt.Fprintf(out, "%d nodes: %d healthy, %s, %d unknown\n", len(nodes), healthy, unhealthy, len(nodes)-healthy-len(bad))
	for _, p := range policies {
		ready, text := meta.FindStatusCondition(p.Status.Conditions, evenkeel.ConditionReady), "the controller has not reconciled it yet"
		if ready != nil {
			text = ready.Message
		}
		if p.Status.RunningCheck != "" {
			text += "; check " + p.Status.RunningCheck + " runs"
		}
		fmt.Fprintf(out, "policy %s: %s\n", p.Name, text)
	}
	if len(policies) == 0 {
		fmt.Fprintln(out, "no NetworkCheckPolicy: nodes are checked only on request (kubectl evenkeel check run)")
	}
	fmt.Fprintln(out)
	if len(checks.Items) == 0 {
		_, err := fmt.Fprintf(out, "no checks in namespace %s\n", namespace)
		return err
	}
	slices.SortFunc(checks.Items, func(a, b evenkeel.NetworkCheck) int {
		return b.CreationTimestamp.Compare(a.CreationTimestamp.Time)
	})
	rows := [][]string{{"CHECK", "VERDICT", "BAD NODES", "NODES", "PASSED", "FAILED", "UNCLEAR", "MEDIAN", "PROGRESS", "AGE"}}
	for i := range checks.Items[:min(len(checks.Items), maxShown)] {
		check := &checks.Items[i]
		s := &check.Status
		count := func(n *int32) string {
			if n == nil {
				return ""
			}
			return fmt.Sprint(*n)
		}
		rows = append(rows, []string{check.Name, string(s.Verdict), s.BadNodes, count(s.Summary.Nodes), count(s.Summary.Passed), count(s.Summary.Failed), count(s.Summary.Inconclusive),
			formatQuantity(s.Summary.MedianBusBandwidth), s.Progress, age(check.CreationTimestamp, now)})
	}
	if err := table(out, "", rows); err != nil {
		return err
	}
	if more := len(checks.Items) - maxShown; more > 0 {
		fmt.Fprintf(out, "and %d older ones\n", more)
	}
	if len(bad) > 0 {
		fmt.Fprintf(out, "\nwhy: kubectl evenkeel check why %s\n", bad[0])
	}
	return nil
}

// describeCheck prints the status of a check.
func describeCheck(out io.Writer, check *evenkeel.NetworkCheck, now time.Time) error {
	s := &check.Status
	if !meta.IsStatusConditionTrue(s.Conditions, evenkeel.ConditionComplete) {
		_, err := fmt.Fprintf(out, "%s: %s, created %s ago\n", check.Name, firstOf(s.Progress, "waiting to start"), age(check.CreationTimestamp, now))
		return err
	}
	took := ""
	if s.StartTime != nil && s.CompletionTime != nil {
		took = " in " + duration.HumanDuration(s.CompletionTime.Sub(s.StartTime.Time))
	}
	fmt.Fprintf(out, "%s: %s%s\n%s\n", check.Name, s.Verdict, took, s.Message)
	if s.Summary.Nodes != nil {
		var carried []string
		for _, n := range s.Networks {
			name := n.Name
			if n.API != nil {
				name += fmt.Sprintf(" (ncclNet v%d)", *n.API)
			}
			carried = append(carried, name)
		}
		fmt.Fprintf(out, "\n%d nodes: %d passed, %d failed, %d inconclusive; %d runs by %s over %s; median %s\n", number(s.Summary.Nodes), number(s.Summary.Passed), number(s.Summary.Failed),
			number(s.Summary.Inconclusive), number(s.Summary.Runs), s.Launcher, firstOf(strings.Join(carried, ", "), "nothing"), firstOf(formatQuantity(s.Summary.MedianBusBandwidth), "not measured"))
	}
	var fabrics [][]string
	for _, f := range s.Fabrics {
		if f.Verdict != evenkeel.VerdictPass {
			fabrics = append(fabrics, []string{strings.Join(f.Pools, ","), string(f.Verdict), f.Reason, formatQuantity(f.MinBusBandwidth), f.Message})
		}
	}
	if len(fabrics) > 0 {
		fmt.Fprintln(out)
		if err := table(out, "", slices.Insert(fabrics, 0, []string{"FABRIC OF POOL", "VERDICT", "REASON", "AT LEAST", "MESSAGE"})); err != nil {
			return err
		}
	}
	if len(s.Findings) > 0 {
		fmt.Fprintln(out)
		rows := [][]string{{"NODE", "VERDICT", "STAGE", "REASON", "BEST", "MESSAGE"}}
		for _, f := range s.Findings {
			rows = append(rows, []string{f.Name, string(f.Verdict), string(f.Stage), f.Reason, formatQuantity(f.BusBandwidth), f.Message})
		}
		if err := table(out, "", rows); err != nil {
			return err
		}
		if not := int(number(s.Summary.Failed) + number(s.Summary.Inconclusive)); not > len(s.Findings) {
			fmt.Fprintf(out, "and %d more\n", not-len(s.Findings))
		}
		fmt.Fprintf(out, "\nwhy:    kubectl evenkeel check why %s\n", s.Findings[0].Name)
	} else {
		fmt.Fprintln(out)
	}
	if s.ReportName != "" {
		fmt.Fprintf(out, "report: kubectl evenkeel report %s%s --svg pairs.svg\n", check.Name, inNamespace(check.Namespace))
	}
	return nil
}

func reportCommand(c *connection) *cobra.Command {
	var svg string
	cmd := &cobra.Command{
		Use:   "report CHECK",
		Short: "Print a check's report, and save the heat map of its pairs",
		Example: `  kubectl evenkeel report nightly-29411
  kubectl evenkeel report nightly-29411 --svg pairs.svg > report.md`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			cluster, err := c.client()
			if err != nil {
				return err
			}
			check := &evenkeel.NetworkCheck{}
			if err := cluster.Get(cmd.Context(), client.ObjectKey{Namespace: c.system(), Name: args[0]}, check); err != nil {
				return fmt.Errorf("read the check: %w", err)
			}
			if check.Status.ReportName == "" {
				return fmt.Errorf("check %s has no report: %s", check.Name, firstOf(check.Status.Message, check.Status.Progress, "it has not started"))
			}
			found, err := report.Read(cmd.Context(), cluster, check.Namespace, check.Status.ReportName)
			if err != nil {
				return err
			}
			if found.Markdown == "" {
				return fmt.Errorf("check %s has no report yet: %s", check.Name, check.Status.Progress)
			}
			if svg != "" {
				if err := os.WriteFile(svg, []byte(found.Pairs), 0o644); err != nil {
					return fmt.Errorf("--svg: %w", err)
				}
				fmt.Fprintf(cmd.ErrOrStderr(), "wrote the heat map to %s\n", svg)
			}
			_, err = fmt.Fprint(cmd.OutOrStdout(), found.Markdown)
			return err
		},
	}
	cmd.Flags().StringVar(&svg, "svg", "", "file to write the heat map of the pairs to")
	return cmd
}
