// Package uninstall removes what Evenkeel left in a cluster, and opens all gates, so that nothing waits for what is gone. It needs
// nothing of Evenkeel's in the cluster, and may be interrupted and started again at any time.
package uninstall

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/operator/internal/controller/jobgate/kueue"
	"evenkeel.dev/evenkeel/operator/internal/controller/jobgate/suspend"
	"evenkeel.dev/evenkeel/operator/internal/controller/nodenetworkhealth"
	"evenkeel.dev/evenkeel/operator/internal/kube/sweep"
)

// progressInterval is the time between two lines about the progress of a step.
const progressInterval = 2 * time.Second

// A Step is one part of the work. Steps do not depend on each other's success.
type Step struct {
	// About is what the step does, for people.
	About string
	List  func(context.Context) ([]sweep.Item, error)
}

// Gates are the steps after which no job waits for Evenkeel any more. The client reads without a cache.
func Gates(c client.Client, now clock.PassiveClock) []Step {
	return []Step{
		{"open the gates of jobs and pods", func(ctx context.Context) ([]sweep.Item, error) { return suspend.ListGated(ctx, c) }},
		{"answer Kueue's workloads that wait", func(ctx context.Context) ([]sweep.Item, error) { return kueue.ListPending(ctx, c, now) }},
	}
}

// WebhookConfiguration is the step after which jobs and pods are created without the webhook.
func WebhookConfiguration(c client.Client, name string) Step {
	return Step{"delete the webhook configurations", func(ctx context.Context) ([]sweep.Item, error) {
		var items []sweep.Item
		for kind, configuration := range map[string]client.Object{
			"MutatingWebhookConfiguration":   &admissionregistrationv1.MutatingWebhookConfiguration{},
			"ValidatingWebhookConfiguration": &admissionregistrationv1.ValidatingWebhookConfiguration{},
		} {
			err := c.Get(ctx, client.ObjectKey{Name: name}, configuration)
			if err == nil {
				items = append(items, deletion(c, configuration, kind))
			} else if !apierrors.IsNotFound(err) {
				return nil, fmt.Errorf("read the %s %s: %w", kind, name, err)
			}
		}
		return items, nil
	}}
}

// GateBinding is the step after which no pod is gated any more.
func GateBinding(c client.Client, name string) Step {
	return Step{"unbind the policy that gates pods", func(ctx context.Context) ([]sweep.Item, error) {
		binding := &admissionregistrationv1.MutatingAdmissionPolicyBinding{}
		err := c.Get(ctx, client.ObjectKey{Name: name}, binding)
		if apierrors.IsNotFound(err) {
			return nil, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read the MutatingAdmissionPolicyBinding %s: %w", name, err)
		}
		return []sweep.Item{deletion(c, binding, "MutatingAdmissionPolicyBinding")}, nil
	}}
}

// Leftovers are the steps that remove what Evenkeel put on objects of others.
func Leftovers(c client.Client, now clock.PassiveClock) []Step {
	return []Step{
		{"say on Kueue's AdmissionChecks that nobody decides them", func(ctx context.Context) ([]sweep.Item, error) { return kueue.ListActive(ctx, c, now) }},
		{"remove condition, label and taint from nodes", func(ctx context.Context) ([]sweep.Item, error) { return nodenetworkhealth.ListMarked(ctx, c) }},
	}
}

// Queues finds the ClusterQueues of Kueue that name an AdmissionCheck of Evenkeel's. They admit nothing while nobody decides it.
func Queues(c client.Client) Step {
	return Step{"remove Evenkeel's AdmissionChecks from Kueue's ClusterQueues", func(ctx context.Context) ([]sweep.Item, error) { return kueue.ListQueues(ctx, c) }}
}

// Run takes the steps one after the other. It reports to out what it does. All steps are taken, whatever became of the others.
func Run(ctx context.Context, out io.Writer, c clock.Clock, steps ...Step) error {
	var all []error
	for _, step := range steps {
		p := &progress{out: out, about: step.About, clock: c}
		removed, err := sweep.Sweep{List: step.List, Progress: p.report, Clock: c}.Run(ctx)
		if err != nil {
			err = fmt.Errorf("%s: %w", step.About, err)
			all = append(all, err)
		}
		if removed > 0 || err != nil {
			fmt.Fprintf(out, "%s: %d done\n", step.About, removed)
		}
	}
	return errors.Join(all...)
}

// A progress writes a line from time to time.
type progress struct {
	out   io.Writer
	about string
	clock clock.Clock

	mu   sync.Mutex
	last time.Time
}

func (p *progress) report(done, of int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.clock.Now()
	if p.last.IsZero() {
		p.last = now
	}
	if now.Sub(p.last) >= progressInterval {
		p.last = now
		fmt.Fprintf(p.out, "%s: %d of %d\n", p.about, done, of)
	}
}
