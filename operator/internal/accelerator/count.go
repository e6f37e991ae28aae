package accelerator

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const (
	gpu = "nvidia.com/gpu"
	// migStrategyLabel is how the device plugin offers GPUs that are divided. With mixed, the count of whole GPUs includes the divided
	// ones, which are offered as other resources.
	migStrategyLabel = "nvidia.com/mig.strategy"
	mixed            = "mixed"
	// migStateLabel is the progress of a change of how GPUs are divided; success when it has ended.
	migStateLabel = "nvidia.com/mig.config.state"
	// Suffixes of the labels of a resource: how many devices there are, and by how many pods each is shared.
	countSuffix, replicasSuffix = ".count", ".replicas"
	// sharedSuffix ends the resource's name where shared devices are offered by another name.
	sharedSuffix = ".shared"

	// draDriver and draType name the DRA driver of GPUs, and the attribute that tells whole ones from parts.
	draDriver, draType = "gpu.nvidia.com", "type"
	// slicesPage is how many ResourceSlices are read at a time.
	slicesPage = 500
)

// A Count says how many devices of a resource the node has, by the GPU feature discovery, and how many of them pods can get. A
// device that several pods share counts that often.
type Count struct {
	Resource          string
	Installed, Usable int64
}

// Counts returns the node's counts, sorted by resource, and whether they can be compared now: while GPUs are divided anew, labels
// and resources are of different times.
func Counts(node *corev1.Node) (counts []Count, settled bool) {
	for label, text := range node.Labels {
		name, found := strings.CutSuffix(label, countSuffix)
		if !found || name != gpu && !strings.HasPrefix(name, migPrefix) || name == gpu && node.Labels[migStrategyLabel] == mixed {
			continue
		}
		installed, err := strconv.ParseInt(text, 10, 64)
		if err != nil || installed <= 0 {
			continue
		}
		if replicas, err := strconv.ParseInt(node.Labels[name+replicasSuffix], 10, 64); err == nil && replicas > 1 {
			installed *= replicas
		}
		whole, shared := node.Status.Allocatable[corev1.ResourceName(name)], node.Status.Allocatable[corev1.ResourceName(name+sharedSuffix)]
		counts = append(counts, Count{Resource: name, Installed: installed, Usable: whole.Value() + shared.Value()})
	}
	slices.SortFunc(counts, func(a, b Count) int { return strings.Compare(a.Resource, b.Resource) })
	state := node.Labels[migStateLabel]
	return counts, state == "" || state == "success"
}

// DRA are the GPUs that a DRA driver offers on a node. Those with a taint are listed and cannot be used.
type DRA struct{ Listed, Usable int64 }

// ListDRA returns the GPUs that DRA offers, by node; none where the cluster does not serve ResourceSlices.
func ListDRA(ctx context.Context, reader client.Reader) (map[string]DRA, error) {
	type pool struct{ node, name string }
	generation := map[pool]int64{}
	offered := map[pool]DRA{}
	var page resourcev1.ResourceSliceList
	for {
		err := reader.List(ctx, &page, client.MatchingFields{resourcev1.ResourceSliceSelectorDriver: draDriver}, client.Limit(slicesPage), client.Continue(page.Continue))
		if meta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
			return nil, nil
		} else if err != nil {
			return nil, fmt.Errorf("list ResourceSlices: %w", err)
		}
		for i := range page.Items {
			spec := &page.Items[i].Spec
			if spec.NodeName == nil {
				continue
			}
			p := pool{*spec.NodeName, spec.Pool.Name}
			if spec.Pool.Generation < generation[p] {
				continue // the driver is about to delete it
			}
			if spec.Pool.Generation > generation[p] {
				generation[p], offered[p] = spec.Pool.Generation, DRA{}
			}
			offered[p] = offered[p].add(spec.Devices)
		}
		if page.Continue == "" {
			break
		}
	}
	byNode := map[string]DRA{}
	for p, o := range offered {
		n := byNode[p.node]
		byNode[p.node] = DRA{n.Listed + o.Listed, n.Usable + o.Usable}
	}
	return byNode, nil
}

// add counts the whole GPUs among the devices.
func (d DRA) add(devices []resourcev1.Device) DRA {
	for i := range devices {
		if kind, found := devices[i].Attributes[draType]; found && kind.StringValue != nil && *kind.StringValue != "gpu" {
			continue
		}
		d.Listed++
		if !slices.ContainsFunc(devices[i].Taints, func(t resourcev1.DeviceTaint) bool {
			return t.Effect == resourcev1.DeviceTaintEffectNoSchedule || t.Effect == resourcev1.DeviceTaintEffectNoExecute
		}) {
			d.Usable++
		}
	}
	return d
}
