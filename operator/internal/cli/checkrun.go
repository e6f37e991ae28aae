package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

const (
	// followPoll is the interval of reading a check with --wait.
	followPoll = 500 * time.Millisecond
	// startTimeout is far more than a running controller needs to start a check.
	startTimeout = 20 * time.Second
	// maxNodes is the number of nodes for which --wait waits long enough.
	maxNodes = 5000
	// grace is how long --wait waits beyond the check's own timeout.
	grace = 2 * time.Minute
)

// checkFlags are the flags of `check run`.
type checkFlags struct {
	name, selector, profile, runner, launcher, image string
	nodes, stages                                    []string
	gpus, rails, iterations                          int32
	maxBytes, minBandwidth                           string
	timeout                                          time.Duration
	busyNodes                                        string
	wait                                             bool
}

func checkRunCommand(c *connection) *cobra.Command {
	var f checkFlags
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Run a network check over nodes",
		Long: `Run a network check: the benchmark over nodes, through the plugin that jobs get.

With --wait, the exit status is the verdict: 0 Pass, 2 Fail, 3 Inconclusive; 1 is an error of the command itself.
Interrupting the wait does not stop the check.`,
		Example: `  kubectl evenkeel check run --wait                                  # all nodes
  kubectl evenkeel check run --nodes gpu-17,gpu-3 --wait             # a repaired node with a healthy one
  kubectl evenkeel check run --selector pool=h100 --min-bandwidth 340G
  kubectl evenkeel check run --runner NCCLTests --gpus 8 --stage Pairs,Gang`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			check, err := f.check(c.system())
			if err != nil {
				return err
			}
			cluster, err := c.client()
			if err != nil {
				return err
			}
			return f.run(cmd.Context(), cluster, check, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	flags := cmd.Flags()
	flags.StringSliceVar(&f.nodes, "nodes", nil, "names of the nodes, comma-separated (default: all nodes)")
	flags.StringVarP(&f.selector, "selector", "l", "", "label selector of the nodes, such as pool=h100")
	flags.StringSliceVar(&f.stages, "stage", nil, "stages to run: Capacity, Local, RDMA, Pairs, Rails, Gang (default: Capacity,Local,Pairs)")
	flags.StringVar(&f.busyNodes, "busy-nodes", "", "nodes whose accelerators somebody uses: Skip them, or Test them and disturb their users (default: Skip)")
	flags.StringVar(&f.profile, "profile", "", "NetworkProfile whose plugin is tested (default: default)")
	flags.StringVar(&f.runner, "runner", "", "Bench, over host memory, NCCLTests, over NVIDIA's GPUs, or RCCLTests, over AMD's (default: the one for the GPUs that all nodes have, where Evenkeel was installed with an image of it, else Bench)")
	flags.StringVar(&f.launcher, "launcher", "", "Auto, IndexedJob or MPIJob (default: Auto)")
	flags.StringVar(&f.image, "image", "", "image with the benchmark (default: the one for this runner that Evenkeel was installed with)")
	flags.Int32Var(&f.gpus, "gpus", 0, "GPUs of each node, for NCCLTests and RCCLTests")
	flags.Int32Var(&f.rails, "rails", 0, "network devices of each node, for stage Rails")
	flags.StringVar(&f.maxBytes, "max-bytes", "", "largest buffer, such as 1Gi (default: 64Mi)")
	flags.Int32Var(&f.iterations, "iterations", 0, "timed operations of each size (default: 20)")
	flags.StringVar(&f.minBandwidth, "min-bandwidth", "", "minimum bus bandwidth in bytes per second, such as 340G (default: 85% of the median)")
	flags.DurationVar(&f.timeout, "timeout", 0, "timeout of the whole check (default: 1h)")
	flags.StringVar(&f.name, "name", "", "name of the check (default: a new one)")
	flags.BoolVar(&f.wait, "wait", false, "wait for the end, show progress, and exit with the verdict")
	return cmd
}

// check returns the object that the flags describe. The API server validates the rest.
func (f *checkFlags) check(namespace string) (*evenkeel.NetworkCheck, error) {
	check := &evenkeel.NetworkCheck{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: f.name}}
	if f.name == "" {
		check.GenerateName = "check-"
	}
	spec := &check.Spec
	switch {
	case len(f.nodes) > 0 && f.selector != "":
		return nil, errors.New("--nodes and --selector: one of them")
	case len(f.nodes) > 0:
		spec.Nodes.Names = slices.Compact(slices.Sorted(slices.Values(f.nodes)))
	default:
		selector, err := metav1.ParseToLabelSelector(f.selector)
		if err != nil {
			return nil, fmt.Errorf("--selector %q: %w", f.selector, err)
		}
		spec.Nodes.Selector = selector
	}
	for _, text := range f.stages {
		stage, err := oneOf("--stage", text, evenkeel.StageCapacity, evenkeel.StageLocal, evenkeel.StageRDMA, evenkeel.StagePairs, evenkeel.StageRails, evenkeel.StageGang)
		if err != nil {
			return nil, err
		}
		spec.Stages = append(spec.Stages, stage)
	}
	spec.Runner = evenkeel.RunnerSpec{Image: f.image}
	var err error
	if f.runner != "" {
		if spec.Runner.Type, err = oneOf("--runner", f.runner, evenkeel.RunnerBench, evenkeel.RunnerNCCLTests, evenkeel.RunnerRCCLTests); err != nil {
			return nil, err
		}
	}
	spec.ProfileName = f.profile
	if f.busyNodes != "" {
		if spec.BusyNodes, err = oneOf("--busy-nodes", f.busyNodes, evenkeel.BusyNodesSkip, evenkeel.BusyNodesTest); err != nil {
			return nil, err
		}
	}
	if f.launcher != "" {
		if spec.Runner.Launcher, err = oneOf("--launcher", f.launcher, evenkeel.LauncherAuto, evenkeel.LauncherIndexedJob, evenkeel.LauncherMPIJob); err != nil {
			return nil, err
		}
	}
	if f.gpus != 0 {
		spec.Runner.GPUsPerNode = &f.gpus
	}
	if f.rails != 0 {
		spec.Rails = &f.rails
	}
	if f.iterations != 0 {
		spec.Sweep.Iterations = &f.iterations
	}
	if f.maxBytes != "" {
		size, err := quantity("--max-bytes", f.maxBytes)
		if err != nil {
			return nil, err
		}
		bytes := size.Value()
		spec.Sweep.MaxBytes = &bytes
	}
	if f.minBandwidth != "" {
		least, err := quantity("--min-bandwidth", f.minBandwidth)
		if err != nil {
			return nil, err
		}
		spec.Thresholds.MinBusBandwidth = &least
	}
	if f.timeout != 0 {
		seconds := int32(f.timeout / time.Second)
		spec.TimeoutSeconds = &seconds
	}
	if len(spec.Nodes.Names) == 1 && slices.Contains(spec.WithDefaults().Stages, evenkeel.StagePairs) {
		return nil, fmt.Errorf("--nodes %[1]s: stage Pairs needs at least two nodes; add a healthy one, or use --stage Capacity,Local", spec.Nodes.Names[0])
	}
	return check, nil
}

// oneOf parses one of the words, ignoring case.
func oneOf[T ~string](flag, text string, words ...T) (T, error) {
	for _, word := range words {
		if strings.EqualFold(text, string(word)) {
			return word, nil
		}
	}
	var all []string
	for _, word := range words {
		all = append(all, string(word))
	}
	return "", fmt.Errorf("%s %q: want %s", flag, text, strings.Join(all, ", "))
}

func quantity(flag, text string) (resource.Quantity, error) {
	q, err := resource.ParseQuantity(text)
	if err != nil || q.Sign() <= 0 {
		return q, fmt.Errorf("%s %q: want a number above zero with a unit, such as 340G or 64Mi", flag, text)
	}
	return q, nil
}

func (f *checkFlags) run(ctx context.Context, cluster client.Client, check *evenkeel.NetworkCheck, out, progress io.Writer) error {
	if err := cluster.Create(ctx, check); err != nil {
		return fmt.Errorf("create the check: %w", err)
	}
	if !f.wait {
		_, err := fmt.Fprintf(out, "networkcheck %s/%s created\nsee it with: kubectl evenkeel check status %s%s\n", check.Namespace, check.Name, check.Name, inNamespace(check.Namespace))
		return err
	}
	if err := follow(ctx, cluster, check, progress); err != nil {
		return err
	}
	if err := describeCheck(out, check, time.Now()); err != nil {
		return err
	}
	if check.Status.Verdict != evenkeel.VerdictPass {
		return verdictStatus(check.Status.Verdict)
	}
	return nil
}

// inNamespace returns the flag for the namespace; empty for the default one.
func inNamespace(namespace string) string {
	if namespace == systemNamespace {
		return ""
	}
	return " -n " + namespace
}

// follow waits until the check has ended, and shows its progress.
func follow(ctx context.Context, cluster client.Client, check *evenkeel.NetworkCheck, progress io.Writer) error {
	limit := time.Duration(*check.Spec.WithDefaultsFor(maxNodes).TimeoutSeconds)*time.Second + grace
	waiting, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	started, key := time.Now(), client.ObjectKeyFromObject(check)
	p := progressLine{out: progress, terminal: isTerminal(progress)}
	defer p.end()
	warned := false
	err := wait.PollUntilContextCancel(waiting, followPoll, true, func(ctx context.Context) (bool, error) {
		if err := cluster.Get(ctx, key, check); err != nil {
			return false, fmt.Errorf("read the check: %w", err)
		}
		passed := time.Since(started)
		p.show(fmt.Sprintf("%s: %s", key.Name, firstOf(check.Status.Progress, "waiting to start")), passed)
		if check.Status.StartTime == nil && passed > startTimeout && !warned {
			warned = true
			p.end()
			fmt.Fprintf(progress, "the check has not started: does the controller run? kubectl -n %s get deployments,events\n", key.Namespace)
		}
		return meta.IsStatusConditionTrue(check.Status.Conditions, evenkeel.ConditionComplete), nil
	})
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("interrupted; the check continues: kubectl evenkeel check status %s%s", key.Name, inNamespace(key.Namespace))
	case waiting.Err() != nil:
		return fmt.Errorf("check %s has not ended after %s: does the controller run?", key.Name, limit)
	}
	return err
}

func firstOf(texts ...string) string {
	for _, text := range texts {
		if text != "" {
			return text
		}
	}
	return ""
}

// A progressLine is one line that changes on a terminal, and a line for each change elsewhere.
type progressLine struct {
	out      io.Writer
	terminal bool
	last     string
}

func (p *progressLine) show(text string, passed time.Duration) {
	switch {
	case p.terminal:
		fmt.Fprintf(p.out, "\r\x1b[K%s  %s", text, passed.Truncate(time.Second))
	case text != p.last:
		fmt.Fprintln(p.out, text)
	}
	p.last = text
}

func (p *progressLine) end() {
	if p.terminal && p.last != "" {
		fmt.Fprint(p.out, "\r\x1b[K")
	}
	p.last = ""
}

func isTerminal(w io.Writer) bool {
	file, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := file.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}
