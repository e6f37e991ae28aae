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
	// The links are limited, so that they are the limit and not this machine's processors.
	usualRate = "400mbit"
	slowRate  = "40mbit"
	// minBandwidth is well between the two. The first round tests three nodes together, so it has no other reference.
	minBandwidth = "20M"
	// slowNode is the node whose link is slowed.
	slowNode = "n3"

	checkTimeout = 5 * time.Minute
	markTimeout  = time.Minute
	// exitFail is the exit status of a check with the verdict Fail.
	exitFail = 2
)

// preflight runs `kubectl evenkeel` on a cluster in which a link is slowed and restored.
type preflight struct {
	cluster *env.Cluster
	// out receives the page, progress the lines about current work.
	out, progress io.Writer
	// plugin is kubectl-evenkeel.
	plugin string
}

// newPreflight builds kubectl's plugin into the user's cache, where the user can try it afterwards.
func newPreflight(ctx context.Context, cluster *env.Cluster, out, progress io.Writer) (*preflight, error) {
	root, err := toolbox.Root()
	if err != nil {
		return nil, err
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return nil, fmt.Errorf("no folder for kubectl's plugin: %w", err)
	}
	p := &preflight{cluster: cluster, out: out, progress: progress, plugin: filepath.Join(cache, "evenkeel", "bin", "kubectl-evenkeel")}
	cmd := exec.CommandContext(ctx, "go", "build", "-o", p.plugin, "./operator/cmd/kubectl-evenkeel")
	cmd.Dir = root
	if text, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build kubectl's plugin: %w: %s", err, bytes.TrimSpace(text))
	}
	return p, nil
}

// run runs all steps. It restores the links, also after an error.
func (p *preflight) run(ctx context.Context, job func(context.Context) (*jobResult, error)) (err error) {
	if p.cluster.Local == nil {
		return p.checkOnly(ctx)
	}
	defer func() {
		cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		for _, node := range p.cluster.Local.Nodes() {
			err = errors.Join(err, p.cluster.Local.LimitLink(cleanup, node, ""))
		}
	}()
	for _, node := range p.cluster.Local.Nodes() {
		if err := p.cluster.Local.LimitLink(ctx, node, usualRate); err != nil {
			return err
		}
	}
	if err := p.prepare(ctx); err != nil {
		return err
	}

	p.heading("5. Before a job: a check of the network (every link limited to " + usualRate + " for this)")
	if err := p.check(ctx, "demo-before", 0); err != nil {
		return err
	}
	p.heading("6. The link of " + slowNode + " is slowed to " + slowRate + ": the check names the node")
	if err := p.cluster.Local.LimitLink(ctx, slowNode, slowRate); err != nil {
		return err
	}
	if err := p.check(ctx, "demo-slow", exitFail); err != nil {
		return err
	}
	if err := p.awaitLabel(ctx, evenkeel.UnhealthyValue); err != nil {
		return err
	}
	if err := p.show(ctx, 0, "check", "why", slowNode); err != nil {
		return err
	}

	p.heading("7. The next job avoids it")
	result, err := job(ctx)
	if err != nil {
		return err
	}
	for _, pod := range []*corev1.Pod{result.master.pod, result.worker.pod} {
		if pod.Spec.NodeName == slowNode {
			return fmt.Errorf("pod %s ran on %s, which had failed its check", pod.Name, slowNode)
		}
	}
	if err := p.show(ctx, 0, "why", "pytorchjob/"+result.written.GetName(), "-n", namespace); err != nil {
		return err
	}

	p.heading("8. The link is restored: the next check clears the node")
	if err := p.cluster.Local.LimitLink(ctx, slowNode, usualRate); err != nil {
		return err
	}
	if err := p.check(ctx, "demo-after", 0); err != nil {
		return err
	}
	if err := p.awaitLabel(ctx, evenkeel.HealthyValue); err != nil {
		return err
	}
	return p.show(ctx, 0, "check", "status")
}

// checkOnly is for a user's own cluster: no link is slowed there, and only a few nodes are checked.
func (p *preflight) checkOnly(ctx context.Context) error {
	p.heading("5. Before a job: a check of the network")
	var nodes corev1.NodeList
	if err := p.cluster.Client.List(ctx, &nodes); err != nil {
		return fmt.Errorf("list nodes: %w", err)
	}
	var names []string
	for i := range nodes.Items {
		// A node that is not ready, or cordoned, has a taint.
		if !slices.ContainsFunc(nodes.Items[i].Spec.Taints, repelsPods) {
			names = append(names, nodes.Items[i].Name)
		}
	}
	if len(names) < 2 {
		fmt.Fprintf(p.out, "a check needs two nodes that pods can run on, and the cluster has %d\n", len(names))
		return nil
	}
	// Any verdict is accepted: it is the user's network.
	const few = 4 // so many can be compared with each other
	return p.show(ctx, -1, "check", "run", "--nodes", strings.Join(names[:min(few, len(names))], ","), "--wait")
}

// repelsPods reports whether pods without a toleration avoid the taint's node.
func repelsPods(t corev1.Taint) bool { return t.Effect != corev1.TaintEffectPreferNoSchedule }

// prepare deletes the objects of an earlier run, and creates a policy that marks nodes by their checks.
func (p *preflight) prepare(ctx context.Context) error {
	policy := &evenkeel.NetworkCheckPolicy{ObjectMeta: metav1.ObjectMeta{Name: "demo"}}
	policy.Spec.Triggers.NewNodes = evenkeel.SwitchDisabled // this demo starts its checks itself
	policy.Spec.Check.Runner.Type = evenkeel.RunnerBench
	for _, object := range []client.Object{policy.DeepCopy(),
		&evenkeel.NetworkCheck{ObjectMeta: metav1.ObjectMeta{Namespace: env.Namespace, Name: "demo-before"}},
		&evenkeel.NetworkCheck{ObjectMeta: metav1.ObjectMeta{Namespace: env.Namespace, Name: "demo-slow"}},
		&evenkeel.NetworkCheck{ObjectMeta: metav1.ObjectMeta{Namespace: env.Namespace, Name: "demo-after"}},
	} {
		if err := p.cluster.Client.Delete(ctx, object); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete the objects of an earlier demo: %w", err)
		}
	}
	if err := p.cluster.Client.DeleteAllOf(ctx, &evenkeel.NodeNetworkHealth{}); err != nil {
		return fmt.Errorf("delete the results of earlier checks: %w", err)
	}
	err := wait.PollUntilContextTimeout(ctx, 250*time.Millisecond, markTimeout, true, func(ctx context.Context) (bool, error) {
		err := p.cluster.Client.Create(ctx, policy.DeepCopy())
		return err == nil, ignoreAlreadyExists(err) // the earlier one may still be terminating
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

func (p *preflight) heading(title string) { fmt.Fprintf(p.out, "\n%s\n", rule(title)) }

// check runs a check over all nodes. Small buffers suffice, as the links are slow.
func (p *preflight) check(ctx context.Context, name string, status int) error {
	if err := p.show(ctx, status, "check", "run", "--name", name, "--min-bandwidth", minBandwidth, "--max-bytes", "2Mi", "--iterations", "5", "--wait"); err != nil {
		return err
	}
	check := &evenkeel.NetworkCheck{}
	if err := p.cluster.Client.Get(ctx, client.ObjectKey{Namespace: env.Namespace, Name: name}, check); err != nil {
		return fmt.Errorf("read the check: %w", err)
	}
	bad := ""
	if status == exitFail {
		bad = slowNode
	}
	if !meta.IsStatusConditionTrue(check.Status.Conditions, evenkeel.ConditionComplete) || check.Status.BadNodes != bad {
		return fmt.Errorf("check %s names %q, not %q: %s", name, check.Status.BadNodes, bad, check.Status.Message)
	}
	return nil
}

// show runs `kubectl evenkeel` and prints the command and its output. A negative status accepts any verdict.
func (p *preflight) show(ctx context.Context, status int, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	fmt.Fprintf(p.out, "\n$ kubectl evenkeel %s\n", strings.Join(args, " "))
	cmd := exec.CommandContext(ctx, p.plugin, args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+p.cluster.Kubeconfig)
	var errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = p.out, io.MultiWriter(&errs, p.progress)
	err := cmd.Run()
	code := cmd.ProcessState.ExitCode()
	if err == nil && status <= 0 || code > 0 && (code == status || status < 0 && code != 1) {
		return nil
	}
	return fmt.Errorf("kubectl evenkeel %s: exit status %d: %s", strings.Join(args, " "), code, bytes.TrimSpace(errs.Bytes()))
}

// awaitLabel waits until the slow node's label has a value.
func (p *preflight) awaitLabel(ctx context.Context, label string) error {
	node := &corev1.Node{}
	err := wait.PollUntilContextTimeout(ctx, 250*time.Millisecond, markTimeout, true, func(ctx context.Context) (bool, error) {
		err := p.cluster.Client.Get(ctx, client.ObjectKey{Name: slowNode}, node)
		return node.Labels[evenkeel.HealthKey] == label, err
	})
	if err != nil {
		return fmt.Errorf("wait until node %s is labelled %s: %w", slowNode, label, err)
	}
	fmt.Fprintf(p.out, "\nnode %s now has the label %s=%s\n", slowNode, evenkeel.HealthKey, label)
	return nil
}
