package cli

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/controller/networkcheck"
	"evenkeel.dev/evenkeel/operator/internal/controller/nodenetworkhealth"
	"evenkeel.dev/evenkeel/operator/internal/preflight"
	"evenkeel.dev/evenkeel/operator/internal/preflight/health"
	"evenkeel.dev/evenkeel/operator/internal/preflight/pairing"
	"evenkeel.dev/evenkeel/operator/internal/preflight/report"
	"evenkeel.dev/evenkeel/operator/internal/text"
)

func checkWhyCommand(c *connection) *cobra.Command {
	return &cobra.Command{
		Use:   "why NODE",
		Short: "Why a node is healthy or not, and what to do",
		Long:  "Why a node's network is healthy or not: the measured and the required bandwidth, the runs and their partners, since when, and what to do.",
		Example: `  kubectl evenkeel check why gpu-17
  kubectl get nodehealth                # nodes with results`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			cluster, err := c.client()
			if err != nil {
				return err
			}
			facts, err := loadNodeFacts(cmd.Context(), cluster, c.system(), args[0])
			if err != nil {
				return err
			}
			return facts.explain(cmd.OutOrStdout(), time.Now())
		},
	}
}

// nodeFacts is what the cluster has about a node.
type nodeFacts struct {
	node *corev1.Node
	// health is nil if no check ever had a result for the node.
	health *evenkeel.NodeNetworkHealthStatus
	// policy is the node's policy; nil for none.
	policy *evenkeel.NetworkCheckPolicy
	// check decided the node's health. Check and record are nil if they were deleted.
	check  *evenkeel.NetworkCheck
	record *preflight.Record
	// system is Evenkeel's namespace.
	system string
}

func loadNodeFacts(ctx context.Context, cluster client.Client, system, name string) (*nodeFacts, error) {
	nodes, healths, policies, err := nodenetworkhealth.ListAll(ctx, cluster)
	if err != nil {
		return nil, err
	}
	at := slices.IndexFunc(nodes, func(n corev1.Node) bool { return n.Name == name })
	if at < 0 {
		return nil, fmt.Errorf("no node is named %q: kubectl get nodes", name)
	}
	f := &nodeFacts{node: &nodes[at], health: healths[name], policy: health.PolicyByNode(nodes, policies)[name], system: system}
	deciding := f.deciding()
	if deciding == nil {
		return f, nil
	}
	check := &evenkeel.NetworkCheck{}
	err = cluster.Get(ctx, client.ObjectKey{Namespace: system, Name: deciding.Check}, check)
	if apierrors.IsNotFound(err) || err == nil && string(check.UID) != deciding.UID {
		return f, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read check %s: %w", deciding.Check, err)
	}
	found, err := report.Read(ctx, cluster, system, check.Status.ReportName)
	if apierrors.IsNotFound(err) {
		return f, nil
	}
	if err != nil {
		return nil, fmt.Errorf("check %s: %w", check.Name, err)
	}
	f.check, f.record = check, found.Record
	return f, nil
}

// deciding is the result that the node's health follows: the newest conclusive one, else the newest of all.
func (f *nodeFacts) deciding() *evenkeel.HealthResult {
	if f.health == nil || len(f.health.History) == 0 {
		return nil
	}
	for i := range f.health.History {
		if r := &f.health.History[i]; r.Verdict != evenkeel.VerdictInconclusive {
			return r
		}
	}
	return &f.health.History[0]
}

// since is the time of the first of the latest results with the same verdict as the deciding one. It is at least that if older
// results are no longer kept.
func (f *nodeFacts) since(deciding *evenkeel.HealthResult) (since time.Time, atLeast bool) {
	for i := range f.health.History {
		switch r := &f.health.History[i]; r.Verdict {
		case deciding.Verdict:
			since = r.Time.Time
		case evenkeel.VerdictInconclusive:
		default:
			return since, false
		}
	}
	return since, len(f.health.History) == evenkeel.HistoryLength
}

func passedResults(n int32) string {
	if n == 1 {
		return "1 passed result"
	}
	return fmt.Sprintf("%d passed results", n)
}

func (f *nodeFacts) explain(out io.Writer, now time.Time) error {
	deciding := f.deciding()
	if deciding == nil {
		fmt.Fprintf(out, "%s: Unknown: no check of its network has ended yet\n", f.node.Name)
		f.printMarkers(out)
		f.printSuspicions(out, now)
		_, err := fmt.Fprintf(out, "\nWhat to do\n  %s\n", f.advice("", nil))
		return err
	}
	h := f.health
	since, atLeast := f.since(deciding)
	when := "since "
	if atLeast {
		when = "at least since "
	}
	fmt.Fprintf(out, "%s: %s %s%s: %s\n  %s\n\n", f.node.Name, h.Health, when, formatTime(since, now), deciding.Reason, h.Message)

	var result *preflight.NodeResult
	var limit float64
	if f.record != nil {
		result, limit = f.decide()
	}
	rows := [][]string{{"measured", firstOf(formatQuantity(deciding.BusBandwidth), "nothing"), "the best of its runs in check " + deciding.Check}}
	if limit > 0 {
		rows = append(rows, []string{"at least", formatSpeed(limit * 1e9), "the minimum for its pool in that check"})
	}
	if b := h.Baseline; b.Samples != nil {
		rows = append(rows, []string{"usual", firstOf(formatQuantity(b.MedianBusBandwidth), "-"), fmt.Sprintf("the median of its %s, MAD %s", passedResults(*b.Samples), firstOf(formatQuantity(b.MADBusBandwidth), "0"))})
	}
	if err := table(out, "  ", rows); err != nil {
		return err
	}
	f.printMarkers(out)
	f.printSuspicions(out, now)
	var partners []string
	if result != nil {
		fmt.Fprintf(out, "\nIts runs in check %s, which ended at %s\n", deciding.Check, formatTime(deciding.Time.Time, now))
		var err error
		if partners, err = f.runs(out, limit); err != nil {
			return err
		}
	} else {
		fmt.Fprintf(out, "\nCheck %s, which ended at %s, was deleted, and its runs with it.\n", deciding.Check, formatTime(deciding.Time.Time, now))
	}
	fmt.Fprintln(out, "\nIts latest results")
	history := [][]string{{"WHEN", "VERDICT", "REASON", "BEST", "CHECK"}}
	for i := range h.History[:min(len(h.History), 8)] {
		r := &h.History[i]
		history = append(history, []string{r.Time.UTC().Format("2006-01-02 15:04:05"), string(r.Verdict), r.Reason, formatQuantity(r.BusBandwidth), r.Check})
	}
	if err := table(out, "  ", history); err != nil {
		return err
	}
	_, err := fmt.Fprintf(out, "\nWhat to do\n  %s\n", f.advice(deciding.Reason, partners))
	return err
}

// decide returns the check's result for the node, and the minimum of its pool, GB/s; 0: none.
func (f *nodeFacts) decide() (*preflight.NodeResult, float64) {
	d := preflight.Decide(networkcheck.OptionsOf(f.check), f.record)
	for i := range d.Nodes {
		n := &d.Nodes[i]
		if n.Name != f.node.Name {
			continue
		}
		for _, fabric := range d.Fabrics {
			if fabric.MinBusBW > 0 && slices.Contains(fabric.Pools, n.Pool) {
				return n, fabric.MinBusBW
			}
		}
		return n, 0
	}
	return nil, 0
}

// runs prints the node's runs, and returns the partners of good runs.
func (f *nodeFacts) runs(out io.Writer, limit float64) (partners []string, err error) {
	rows := [][]string{{"STAGE", "ROUND", "WITH", "REACHED", "RESULT"}}
	for i := range f.record.Runs {
		run := &f.record.Runs[i]
		var with []string
		mine := false
		for _, at := range run.Nodes {
			if name := f.record.Nodes[at].Name; name == f.node.Name {
				mine = true
			} else {
				with = append(with, name)
			}
		}
		if !mine {
			continue
		}
		var networks []string
		for _, at := range run.Networks {
			network := f.record.Networks[at]
			if network.Transport != "" {
				network.Name += " (" + network.Transport + ")"
			}
			networks = append(networks, network.Name)
		}
		outcome := "good"
		switch {
		case run.Outcome == pairing.Fault:
			outcome = "inconclusive: " + run.Detail
		case run.Outcome == pairing.Broken:
			outcome = "broken: " + run.Detail
		case run.Wrong > 0:
			outcome = fmt.Sprintf("%d wrong elements", run.Wrong)
		case !slices.Contains([]evenkeel.Stage{evenkeel.StageLocal, evenkeel.StageRDMA, evenkeel.StageRails}, run.Stage) && run.BusBW < limit:
			outcome = "too slow"
		default:
			partners = append(partners, with...)
		}
		if len(networks) > 0 {
			outcome += ", over " + strings.Join(networks, " and ")
		}
		rows = append(rows, []string{string(run.Stage), fmt.Sprint(run.Round), text.List(with, 60), formatSpeed(run.BusBW * 1e9), outcome})
	}
	if len(rows) == 1 {
		fmt.Fprintln(out, "  none: it was excluded before the first run")
		return nil, nil
	}
	return partners, table(out, "  ", rows)
}

// printMarkers prints condition, label and taint of the node.
func (f *nodeFacts) printMarkers(out io.Writer) {
	if f.policy == nil {
		fmt.Fprintln(out, "  no NetworkCheckPolicy selects the node, so it has no label and jobs do not avoid it")
		return
	}
	markers := []string{}
	for _, c := range f.node.Status.Conditions {
		if c.Type == evenkeel.ConditionNodeHealthy {
			markers = append(markers, fmt.Sprintf("condition %s=%s", c.Type, c.Status))
		}
	}
	if label := f.node.Labels[evenkeel.HealthKey]; label != "" {
		markers = append(markers, fmt.Sprintf("label %s=%s", evenkeel.HealthKey, label))
	}
	for _, t := range f.node.Spec.Taints {
		if t.Key == evenkeel.HealthKey {
			markers = append(markers, "taint "+t.ToString())
		}
	}
	fmt.Fprintf(out, "  under policy %s it has: %s\n", f.policy.Name, firstOf(strings.Join(markers, ", "), "nothing yet"))
	if f.node.Labels[evenkeel.HealthKey] == evenkeel.UnhealthyValue {
		fmt.Fprintln(out, "  jobs of a NetworkProfile avoid it")
	}
}

// printSuspicions prints what jobs said about the node while they ran, and what becomes of it.
func (f *nodeFacts) printSuspicions(out io.Writer, now time.Time) {
	if f.health == nil {
		return
	}
	for i := range f.health.Suspicions {
		s := &f.health.Suspicions[i]
		then := "the job runs, and when it has ended a check decides"
		switch {
		case s.JobEndTime != nil:
			then = "the job ended at " + formatTime(s.JobEndTime.Time, now) + ", and a check is to decide"
		case s.WithdrawnTime != nil:
			then = "the job no longer says so since " + formatTime(s.WithdrawnTime.Time, now) + ", and when it has ended a check decides"
		}
		fmt.Fprintf(out, "  suspected by %s %s/%s since %s: %s; %s\n", s.Job.Kind, s.Job.Namespace, s.Job.Name, formatTime(s.Since.Time, now), s.Message, then)
	}
}

// advice says what to do about a reason.
func (f *nodeFacts) advice(reason string, partners []string) string {
	partner := "A-HEALTHY-NODE"
	if f.record != nil {
		for _, r := range preflight.Decide(networkcheck.OptionsOf(f.check), f.record).Nodes {
			if r.Verdict == evenkeel.VerdictPass && r.Name != f.node.Name {
				partner = r.Name
				break
			}
		}
	}
	if len(partners) > 0 {
		partner = partners[0]
	}
	again := fmt.Sprintf("kubectl evenkeel check run --nodes %s,%s --wait%s", f.node.Name, partner, inNamespace(f.system))
	then := "\n  Then check it again, with a proven partner: " + again
	switch reason {
	case string(pairing.ReasonProven), preflight.ReasonReady:
		return "Nothing. To check it now: " + again
	case string(pairing.ReasonSlow):
		return "The link is up, but slow with every partner. Check its negotiated speed (ethtool), its error counters (ip -s link, and the switch port's), cable and optics, and other traffic on it." + then
	case string(pairing.ReasonBroken):
		return "Connections to the node break. Check for a flapping link (dmesg), a firewall or NetworkPolicy, and a wrong MTU." + then
	case string(pairing.ReasonWrongData):
		return "Data arrives corrupted. Take the node out of use: its memory, network card or driver is faulty. EVENKEEL_CHECKSUM=1 shows whether the network corrupts it." + then
	case string(pairing.ReasonFallback):
		return "Another network than the plugin carried the run. Check the profile's delivery (kubectl get networkprofiles) and whether the plugin loads on this node (NCCL_DEBUG=INFO)." + then
	case preflight.ReasonLocalBroken:
		return "The benchmark fails inside the node. Check the plugin's delivery, shared memory and, with NCCLTests or RCCLTests, the driver of this node." + then
	case preflight.ReasonPlugin, string(pairing.ReasonFabricSuspect), string(pairing.ReasonNoPairPassed), string(pairing.ReasonMostNodesFailed):
		return "Too many nodes have the same problem for this one to be the cause. Check what they have in common: a switch, the profile, the image, a NetworkPolicy of the checks' namespace. Then check them all: kubectl evenkeel check run --wait" + inNamespace(f.system)
	case preflight.ReasonMissingGPUs:
		return "GPUs of the machine are not offered to pods. Check the device plugin on the node, and nvidia-smi." + then
	case preflight.ReasonGPUsPending:
		return "The node has GPUs and offers none to pods. Check whether its device plugin runs. When it does: " + again
	case preflight.ReasonNotReady, preflight.ReasonCordoned, preflight.ReasonTainted:
		return "Checks skip nodes that pods cannot run on. When it accepts pods again, check it: " + again
	case string(pairing.ReasonInfrastructure):
		return "The runs were inconclusive; the cause is above. Fix it, then: " + again
	case string(pairing.ReasonNothingToCompare):
		return "Nothing says how fast its runs should be. Check it together with three others of its pool, or with --min-bandwidth: " + again
	case string(pairing.ReasonNoPartner), string(pairing.ReasonUnconfirmed), string(pairing.ReasonUnfinished):
		return "A conclusive check needs partners that pass. Check it together with others of its pool: " + again
	}
	return "Check it, together with another node: " + again
}
