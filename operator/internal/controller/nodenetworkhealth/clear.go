package nodenetworkhealth

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/kube/sweep"
)

// ListMarked lists the nodes with condition, label or taint. To remove one is to remove these, as if no policy existed. The client
// reads without a cache.
func ListMarked(ctx context.Context, c client.Client) ([]sweep.Item, error) {
	var items []sweep.Item
	var nodes corev1.NodeList
	err := sweep.Pages(ctx, c, &nodes, func() error {
		for i := range nodes.Items {
			if m := markedNodeOf(&nodes.Items[i]); m.labeled || m.tainted || m.conditioned {
				items = append(items, sweep.Item{Name: "node " + m.name, Remove: func(ctx context.Context) error { return m.clear(ctx, c) }})
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	return items, nil
}

// A markedNode is what has to be known of a node to remove its markers: a list of whole nodes is long.
type markedNode struct {
	name, version                 string
	uid                           types.UID
	labeled, tainted, conditioned bool
	// others are the taints of others.
	others []corev1.Taint
}

func markedNodeOf(node *corev1.Node) markedNode {
	m := markedNode{name: node.Name, version: node.ResourceVersion, uid: node.UID, conditioned: healthCondition(node) != nil}
	_, m.labeled = node.Labels[evenkeel.HealthKey]
	m.tainted = slices.ContainsFunc(node.Spec.Taints, isOurTaint)
	if m.tainted {
		m.others = slices.DeleteFunc(slices.Clone(node.Spec.Taints), isOurTaint)
	}
	return m
}

// clear removes label and taint, and the condition. The patches name what they remove, so that others may change the node meanwhile.
// Taints are one list: if somebody changed a tainted node, it is left for another time.
func (m markedNode) clear(ctx context.Context, c client.Client) error {
	node := &corev1.Node{}
	node.Name = m.name
	if m.labeled || m.tainted {
		metadata := map[string]any{"uid": m.uid, "labels": map[string]any{evenkeel.HealthKey: nil}}
		patch := map[string]any{"metadata": metadata}
		if m.tainted {
			metadata["resourceVersion"] = m.version
			patch["spec"] = map[string]any{"taints": m.others}
		}
		if err := strategicPatch(ctx, c, node, patch); err != nil {
			return fmt.Errorf("remove its label and taint: %w", err)
		}
	}
	if m.conditioned {
		patch := map[string]any{
			"metadata": map[string]any{"uid": m.uid},
			"status":   map[string]any{"conditions": []any{map[string]any{"$patch": "delete", "type": evenkeel.ConditionNodeHealthy}}},
		}
		if err := strategicPatch(ctx, c.Status(), node, patch); err != nil {
			return fmt.Errorf("remove its condition: %w", err)
		}
	}
	return nil
}

// patcher is a client, or one for the status.
type patcher[O any] interface {
	Patch(ctx context.Context, object client.Object, patch client.Patch, options ...O) error
}

func strategicPatch[O any](ctx context.Context, c patcher[O], node *corev1.Node, patch map[string]any) error {
	text, err := json.Marshal(patch)
	if err != nil {
		return err
	}
	return ignoreGone(c.Patch(ctx, node.DeepCopy(), client.RawPatch(types.StrategicMergePatchType, text)))
}
