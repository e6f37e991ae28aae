package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/env"
	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

const (
	// Links are limited so that they, and not this machine's processors, are what is measured.
	usualRate = "400mbit"
	slowRate  = "40mbit"
	// leastBandwidth lies well between the two. Three nodes are tested together at first, and so are no measure for each other.
	leastBandwidth = "20M"
	// slowNode is the one whose link is slowed.
	slowNode = "n3"

	checkTimeout = 5 * time.Minute
	markTimeout  = time.Minute
	// exitFail is the exit status of a check with the verdict Fail.
	exitFail = 2
)

// An act is the second one: `kubectl evenkeel` on a cluster in which a link is slowed and restored.
type act struct {
	cluster *env.Cluster
	// out gets the page, progress what happens meanwhile.
	out, progress io.Writer
	// plugin is kubectl-evenkeel.
	plugin string
}

// newAct builds kubectl's plugin into the user's cache, where it stays to be tried.
func newAct(ctx context.Context, cluster *env.Cluster, out, progress io.Writer) (*act, error) {
	root, err := toolbox.Root()
	if err != nil {
		return nil, err
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return nil, fmt.Errorf("no folder for kubectl's plugin: %w", err)
	}
	a := &act{cluster: cluster, out: out, progress: progress, plugin: filepath.Join(cache, "evenkeel", "bin", "kubectl-evenkeel")}
	cmd := exec.CommandContext(ctx, "go", "build", "-o", a.plugin, "./operator/cmd/kubectl-evenkeel")
	cmd.Dir = root
	if text, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build kubectl's plugin: %w: %s", err, bytes.TrimSpace(text))
	}
	return a, nil
}

// run plays the act. Links are as they were when it returns, whatever happens.
func (a *act) run(ctx context.Context, job func(context.Context) (*jobResult, error)) (err error) {
	if a.cluster.Local == nil {
		return a.checkOnly(ctx)
	}
	defer func() {
		free, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		for _, node := range a.cluster.Local.Nodes() {
			err = errors.Join(err, a.cluster.Local.LimitLink(free, node, ""))
		}
	}()
	for _, node := range a.cluster.Local.Nodes() {
		if err := a.cluster.Local.LimitLink(ctx, node, usualRate); err != nil {
			return err
		}
	}
	if err := a.prepare(ctx); err != nil {
		return err
	}

	a.say("5. Before a job: is the network fine? (every link limited to " + usualRate + " for this)")
	if err := a.check(ctx, "demo-before", 0); err != nil {
		return err
	}
	a.say("6. The link of " + slowNode + " is slowed to " + slowRate + ": the check names the node")
	if err := a.cluster.Local.LimitLink(ctx, slowNode, slowRate); err != nil {
		return err
	}
	if err := a.check(ctx, "demo-slow", exitFail); err != nil {
		return err
	}
	if err := a.marked(ctx, evenkeel.UnhealthyValue); err != nil {
		return err
	}
	if err := a.show(ctx, 0, "check", "why", slowNode); err != nil {
		return err
	}

	a.say("7. The next job keeps off it")
	result, err := job(ctx)
	if err != nil {
		return err
	}
	for _, pod := range []*corev1.Pod{result.master.pod, result.worker.pod} {
		if pod.Spec.NodeName == slowNode {
			return fmt.Errorf("pod %s ran on %s, which had failed its check", pod.Name, slowNode)
		}
	}
	if err := a.show(ctx, 0, "why", "pytorchjob/"+result.written.GetName(), "-n", namespace); err != nil {
		return err
	}

	a.say("8. The link is restored: the next check clears the node")
	if err := a.cluster.Local.LimitLink(ctx, slowNode, usualRate); err != nil {
		return err
	}
	if err := a.check(ctx, "demo-after", 0); err != nil {
		return err
	}
	if err := a.marked(ctx, evenkeel.HealthyValue); err != nil {
		return err
	}
	return a.show(ctx, 0, "check", "status")
}

// checkOnly is for a user's own cluster: nothing is slowed there, and only two nodes are tried.
func (a *act) checkOnly(ctx context.Context) error {
	a.say("5. Before a job: is the network fine?")
	var nodes corev1.NodeList
	if err := a.cluster.Client.List(ctx, &nodes); err != nil {
		return fmt.Errorf("list nodes: %w", err)
	}
	var names []string
	for i := range nodes.Items {
		// One that is not ready, or cordoned, has a taint that says so.
		if !slices.ContainsFunc(nodes.Items[i].Spec.Taints, keepsPodsOff) {
			names = append(names, nodes.Items[i].Name)
		}
	}
	if len(names) < 2 {
		fmt.Fprintf(a.out, "a check takes two nodes that pods can run on, and the cluster has %d\n", len(names))
		return nil
	}
	// Whatever the verdict: it is the user's network.
	return a.show(ctx, -1, "check", "run", "--nodes", names[0]+","+names[1], "--wait")
}

// keepsPodsOff reports whether pods that do not know the taint keep off its node.
func keepsPodsOff(t corev1.Taint) bool { return t.Effect != corev1.TaintEffectPreferNoSchedule }

// prepare removes what an earlier run left, and has nodes marked by what checks find.
func (a *act) prepare(ctx context.Context) error {
	policy := &evenkeel.NetworkCheckPolicy{ObjectMeta: metav1.ObjectMeta{Name: "demo"}}
	policy.Spec.Triggers.NewNodes = evenkeel.SwitchDisabled // this demo says itself when
	policy.Spec.Check.Runner.Type = evenkeel.RunnerBench
	for _, object := range []client.Object{policy.DeepCopy(),
		&evenkeel.NetworkCheck{ObjectMeta: metav1.ObjectMeta{Namespace: env.Namespace, Name: "demo-before"}},
		&evenkeel.NetworkCheck{ObjectMeta: metav1.ObjectMeta{Namespace: env.Namespace, Name: "demo-slow"}},
		&evenkeel.NetworkCheck{ObjectMeta: metav1.ObjectMeta{Namespace: env.Namespace, Name: "demo-after"}},
	} {
		if err := a.cluster.Client.Delete(ctx, object); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete what an earlier demo left: %w", err)
		}
	}
	if err := a.cluster.Client.DeleteAllOf(ctx, &evenkeel.NodeNetworkHealth{}); err != nil {
		return fmt.Errorf("forget what earlier checks found: %w", err)
	}
	err := wait.PollUntilContextTimeout(ctx, 250*time.Millisecond, markTimeout, true, func(ctx context.Context) (bool, error) {
		err := a.cluster.Client.Create(ctx, policy.DeepCopy())
		return err == nil, ignoreAlreadyExists(err) // the earlier one may be going still
	})
	if err != nil {
		return fmt.Errorf("create the NetworkCheckPolicy: %w", err)
	}
	return nil
}

func ignoreAlreadyExists(err error) error {
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

func (a *act) say(title string) { fmt.Fprintf(a.out, "\n%s\n", rule(title)) }

// check runs a check over all nodes. Small buffers do: the links are slow.
func (a *act) check(ctx context.Context, name string, status int) error {
	if err := a.show(ctx, status, "check", "run", "--name", name, "--min-bandwidth", leastBandwidth, "--max-bytes", "2Mi", "--iterations", "5", "--wait"); err != nil {
		return err
	}
	check := &evenkeel.NetworkCheck{}
	if err := a.cluster.Client.Get(ctx, client.ObjectKey{Namespace: env.Namespace, Name: name}, check); err != nil {
		return fmt.Errorf("read the check: %w", err)
	}
	bad := ""
	if status == exitFail {
		bad = slowNode
	}
	if !meta.IsStatusConditionTrue(check.Status.Conditions, evenkeel.ConditionComplete) || check.Status.BadNodes != bad {
		return fmt.Errorf("check %s blames %q, not %q: %s", name, check.Status.BadNodes, bad, check.Status.Message)
	}
	return nil
}

// show runs `kubectl evenkeel` and prints the command and what it says. A negative status accepts any verdict.
func (a *act) show(ctx context.Context, status int, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	fmt.Fprintf(a.out, "\n$ kubectl evenkeel %s\n", strings.Join(args, " "))
	cmd := exec.CommandContext(ctx, a.plugin, args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+a.cluster.Kubeconfig)
	var errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = a.out, io.MultiWriter(&errs, a.progress)
	err := cmd.Run()
	code := cmd.ProcessState.ExitCode()
	if err == nil && status <= 0 || code > 0 && (code == status || status < 0 && code != 1) {
		return nil
	}
	return fmt.Errorf("kubectl evenkeel %s: exit status %d: %s", strings.Join(args, " "), code, bytes.TrimSpace(errs.Bytes()))
}

// marked waits until the slow node's label is as it should be.
func (a *act) marked(ctx context.Context, label string) error {
	node := &corev1.Node{}
	err := wait.PollUntilContextTimeout(ctx, 250*time.Millisecond, markTimeout, true, func(ctx context.Context) (bool, error) {
		err := a.cluster.Client.Get(ctx, client.ObjectKey{Name: slowNode}, node)
		return node.Labels[evenkeel.HealthKey] == label, err
	})
	if err != nil {
		return fmt.Errorf("wait until node %s is labelled %s: %w", slowNode, label, err)
	}
	fmt.Fprintf(a.out, "\nnode %s now has the label %s=%s\n", slowNode, evenkeel.HealthKey, label)
	return nil
}
