// Package doctor looks at a cluster before and after Evenkeel is installed, and says what is wrong and what to do. It changes nothing:
// what it creates, to see whether the webhook answers, is a dry run, and its questions about permissions are not kept.
package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/text"
)

// Status is the result of one check.
type Status string

const (
	// OK: nothing to do.
	OK Status = "OK"
	// Note: worth knowing; it need not be wrong.
	Note Status = "Note"
	// Unknown: it cannot be known, or you have no permission to look.
	Unknown Status = "Unknown"
	// Problem: jobs are refused, do not start, or run without the plugin.
	Problem Status = "Problem"
)

// A Finding is one line of the result.
type Finding struct {
	// Check is what was looked at, one word.
	Check   string `json:"check"`
	Status  Status `json:"status"`
	Message string `json:"message"`
	// Do is what helps; empty: nothing is wrong.
	Do string `json:"do,omitempty"`
}

// Doctor looks at one cluster.
type Doctor struct {
	Client    client.Client
	Clientset kubernetes.Interface
	// Namespace is the one that Evenkeel is installed in.
	Namespace string
	Now       time.Time
}

const (
	// maxNamed is the length in bytes of a list of names.
	maxNamed = 160
	// maxMessage is the length in bytes of a message, and of what helps: others have a share in both.
	maxMessage = 512
)

// state is what several checks look at.
type state struct {
	// listed are the kinds that could be listed.
	listed      map[string]bool
	nodes       []corev1.Node // without those that run Windows
	images      images
	profiles    []evenkeel.NetworkProfile
	pods        []corev1.Pod // injected ones, and those that should have been
	deployments []appsv1.Deployment
	installed   bool
}

// when is the time that a check is for.
type when int

const (
	always when = iota
	before      // Evenkeel is installed
	after       // it is
)

// A check is a part of the examination. It returns what it has found, also with an error.
type check struct {
	name string
	when when
	// needs are the kinds without which it would tell nothing, or something wrong.
	needs []string
	run   func(context.Context, *state) ([]Finding, error)
}

func (d *Doctor) checks() []check {
	nodes, profiled, jobs := []string{"nodes"}, []string{"networkprofiles"}, []string{"pods"}
	return []check{
		{"policies", always, nil, d.mutatingPolicies},
		{"permissions", before, nil, d.permissions},
		{"runtime", always, nodes, known(func(s *state) []Finding { return runtimes(s.nodes) })},
		{"processors", always, nodes, known(func(s *state) []Finding { return processors(s.nodes) })},
		{"rdma", always, nodes, known(func(s *state) []Finding { return rdma(s.nodes, s.profiles) })},
		{"rdma", always, nil, d.devicePlugins},
		{"rdma", after, slices.Concat(nodes, profiled), known(func(s *state) []Finding { return gpuDirect(s.nodes, s.profiles) })},
		{"kueue", always, nil, d.kueue},
		{"operator", after, nil, d.deployments},
		{"admission", after, nil, d.admission},
		{"certificate", after, nil, d.certificate},
		{"profiles", after, profiled, known(func(s *state) []Finding { return profiles(s.profiles) })},
		{"registries", before, nodes, known(func(s *state) []Finding { return s.images.registries() })},
		{"registries", after, nil, d.pulls},
		{"registries", after, profiled, d.registries},
		{"security", always, nil, d.constraints},
		{"security", always, nil, d.podSecurity},
		{"plugin", after, jobs, known(func(s *state) []Finding { return plugin(s.pods) })},
		{"versions", after, jobs, known(func(s *state) []Finding { return versions(s.pods) })},
		{"glibc", always, nil, known(func(s *state) []Finding { return glibc(s.pods, s.images.old) })},
	}
}

// known is a check that asks the cluster nothing more.
func known(of func(*state) []Finding) func(context.Context, *state) ([]Finding, error) {
	return func(_ context.Context, s *state) ([]Finding, error) { return of(s), nil }
}

// Examine runs all checks. What you may not see, or does not answer, is a line, and the others go on. An error means that the cluster
// cannot be reached, or that the context has ended: then the findings are incomplete.
func (d *Doctor) Examine(ctx context.Context) ([]Finding, error) {
	var all []Finding
	switch version, err := d.Clientset.Discovery().ServerVersion(); {
	case err == nil:
		all = append(all, kubernetesVersion(version.GitVersion))
	case apierrors.IsForbidden(err):
		all = append(all, unseen("kubernetes", err))
	default:
		return nil, fmt.Errorf("ask the API server for its version: %w", err)
	}
	s := &state{listed: map[string]bool{}, installed: true}
	for _, list := range []struct {
		kind string
		read func(context.Context, *state) ([]Finding, error)
	}{{"nodes", d.nodes}, {"networkprofiles", d.profiles}, {"pods", d.pods}} {
		findings, err := list.read(ctx, s)
		switch {
		case list.kind == "networkprofiles" && meta.IsNoMatchError(err):
			s.installed = false
			all = append(all, Finding{"installation", Note, "Evenkeel is not installed", "kubectl evenkeel doctor checks more once it is: docs/install.md"})
		case err != nil:
			all = append(all, unseen(list.kind, err))
		default:
			s.listed[list.kind] = true
		}
		all = append(all, findings...)
	}
	for _, c := range d.checks() {
		if c.when == before && s.installed || c.when == after && !s.installed || slices.ContainsFunc(c.needs, func(kind string) bool { return !s.listed[kind] }) {
			continue
		}
		findings, err := c.run(ctx, s)
		all = append(all, findings...)
		if err != nil {
			all = append(all, unseen(c.name, err))
		}
	}
	for i := range all {
		all[i].Message, all[i].Do = line(all[i].Message), line(all[i].Do)
	}
	if ctx.Err() != nil {
		return all, fmt.Errorf("the findings are incomplete: %w", context.Cause(ctx))
	}
	return all, nil
}

// unseen is the finding of a check that could not look.
func unseen(check string, err error) Finding {
	switch {
	case apierrors.IsForbidden(err):
		return Finding{check, Unknown, "you may not look: " + err.Error(), "run it as somebody who may; the rest was looked at"}
	case errors.Is(err, context.DeadlineExceeded), apierrors.IsTimeout(err), apierrors.IsServerTimeout(err):
		return Finding{check, Unknown, "the API server took too long: " + err.Error(), "try again when it has less to do"}
	}
	return Finding{check, Unknown, err.Error(), "try again; the rest was looked at"}
}

// line is one line of a bounded length.
func line(s string) string { return text.Clip(strings.Join(strings.Fields(s), " "), maxMessage) }

// Sick reports whether any finding is a problem.
func Sick(findings []Finding) bool {
	for _, f := range findings {
		if f.Status == Problem {
			return true
		}
	}
	return false
}
