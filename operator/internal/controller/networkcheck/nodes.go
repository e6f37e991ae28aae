package networkcheck

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/kube/sweep"
)

const (
	// nodePage is the number of nodes that are read at a time. Each may have fifty images, and the managed fields of many writers.
	nodePage = 100
	// maxNamedReads is the number of named nodes above which pages of all nodes take fewer requests.
	maxNamedReads = 100
)

// readNodes reads the selected nodes from the API server, with what of each a check looks at.
func (c *Reconciler) readNodes(ctx context.Context, selected evenkeel.NodeSet) ([]corev1.Node, error) {
	var nodes []corev1.Node
	if len(selected.Names) > 0 && len(selected.Names) <= maxNamedReads {
		for _, name := range selected.Names {
			node := &corev1.Node{}
			switch err := c.live.Get(ctx, client.ObjectKey{Name: name}, node); {
			case err == nil:
				nodes = append(nodes, slimNode(node))
			case client.IgnoreNotFound(err) != nil:
				return nil, fmt.Errorf("read node %s: %w", name, err)
			}
		}
		return nodes, nil
	}
	wanted := map[string]bool{}
	for _, name := range selected.Names {
		wanted[name] = true
	}
	selector := labels.Nothing()
	if selected.Names != nil {
		selector = labels.Everything()
	} else if selected.Selector != nil {
		var err error
		if selector, err = metav1.LabelSelectorAsSelector(selected.Selector); err != nil {
			return nil, reconcile.TerminalError(fmt.Errorf("spec.nodes.selector: %w", err))
		}
	}
	var page corev1.NodeList
	err := sweep.Pages(ctx, c.live, &page, func() error {
		for i := range page.Items {
			if selected.Names == nil || wanted[page.Items[i].Name] {
				nodes = append(nodes, slimNode(&page.Items[i]))
			}
		}
		return nil
	}, client.MatchingLabelsSelector{Selector: selector}, client.Limit(nodePage))
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	return nodes, nil
}

// slimNode is the node without what takes most of its memory: images, managed fields, annotations.
func slimNode(node *corev1.Node) corev1.Node {
	kept := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node.Name, UID: node.UID, Labels: node.Labels}}
	kept.Spec.Unschedulable, kept.Spec.Taints = node.Spec.Unschedulable, node.Spec.Taints
	kept.Status.Conditions, kept.Status.Capacity, kept.Status.Allocatable = node.Status.Conditions, node.Status.Capacity, node.Status.Allocatable
	return kept
}
