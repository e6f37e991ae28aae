// Package doctor looks at a cluster before and after Evenkeel is installed, and says what is wrong and what to do. It changes nothing:
// the one object that it creates, to see whether the webhook answers, is a dry run.
package doctor

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/nodeos"
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
	// maxMessage is the length in bytes of a message that pods have a share in.
	maxMessage = 512
)

// state is what several checks look at.
type state struct {
	nodes     []corev1.Node // without those that run Windows
	profiles  []evenkeel.NetworkProfile
	pods      []corev1.Pod // injected ones, and those that should have been
	installed bool
}

// Examine runs all checks. An error means that the cluster cannot be reached.
func (d *Doctor) Examine(ctx context.Context) ([]Finding, error) {
	version, err := d.Clientset.Discovery().ServerVersion()
	if err != nil {
		return nil, fmt.Errorf("ask the API server for its version: %w", err)
	}
	all := []Finding{kubernetesVersion(version.GitVersion)}
	s := &state{}
	lists := []struct {
		what   string
		list   client.ObjectList
		option []client.ListOption
		needed bool
	}{
		{"nodes", &corev1.NodeList{}, nil, true},
		{"networkprofiles", &evenkeel.NetworkProfileList{}, nil, false},
		{"pods", &corev1.PodList{}, []client.ListOption{client.HasLabels{evenkeel.ProfileKey}}, true},
	}
	for _, l := range lists {
		switch err := d.Client.List(ctx, l.list, l.option...); {
		case meta.IsNoMatchError(err):
			all = append(all, Finding{"installation", Note, "Evenkeel is not installed", "kubectl evenkeel doctor checks more once it is: docs/install.md"})
		case apierrors.IsForbidden(err):
			all = append(all, Finding{l.what, Unknown, "you may not list " + l.what, "run it as somebody who may, or bind the role view"})
		case err != nil:
			return nil, fmt.Errorf("list %s: %w", l.what, err)
		default:
			switch list := l.list.(type) {
			case *corev1.NodeList:
				s.nodes = slices.DeleteFunc(list.Items, func(n corev1.Node) bool { return nodeos.IsWindows(&n) })
			case *evenkeel.NetworkProfileList:
				s.profiles, s.installed = list.Items, true
			case *corev1.PodList:
				s.pods = list.Items
			}
		}
	}
	all = append(all, runtimes(s.nodes)...)
	all = append(all, processors(s.nodes)...)
	all = append(all, rdma(s.nodes, s.profiles)...)
	checks := []func(context.Context, *state) ([]Finding, error){d.mutatingPolicies, d.kueue}
	if s.installed {
		checks = append(checks, d.deployments, d.admission, d.certificate, d.registries, d.namespaces)
		all = append(all, profiles(s.profiles)...)
		all = append(all, gpuDirect(s.nodes, s.profiles)...)
		all = append(all, plugin(s.pods)...)
		all = append(all, versions(s.pods)...)
	}
	for _, check := range checks {
		findings, err := check(ctx, s)
		switch {
		case apierrors.IsForbidden(err):
			all = append(all, Finding{"permissions", Unknown, err.Error(), "run it as somebody who may"})
		case err != nil:
			return nil, err
		}
		all = append(all, findings...)
	}
	return all, nil
}

// Sick reports whether any finding is a problem.
func Sick(findings []Finding) bool {
	for _, f := range findings {
		if f.Status == Problem {
			return true
		}
	}
	return false
}

func namespaceMetadata() *metav1.PartialObjectMetadata {
	ns := &metav1.PartialObjectMetadata{}
	ns.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Namespace"))
	return ns
}
