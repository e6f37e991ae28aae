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
	gpu = string(NVIDIA)
	// migStrategyLabel is how the device plugin offers GPUs that are divided. With mixed, the count of whole GPUs includes
	// the divided ones, which are offered as other resources.
	migStrategyLabel = "nvidia.com/mig.strategy"
	mixed            = "mixed"
	// migStateLabel is the progress of a change of how GPUs are divided; success when it has ended.
	migStateLabel = "nvidia.com/mig.config.state"
	// Suffixes of the labels of a resource: how many devices there are, and by how many pods each is shared.
	countSuffix, replicasSuffix = ".count", ".replicas"
	// sharedSuffix ends the resource's name where shared devices are offered by another name.
	sharedSuffix = ".shared"

	// slicesPage is how many ResourceSlices are read at a time.
	slicesPage = 500
)

// draType is the attribute by which DRA drivers of GPUs tell whole ones from parts and other devices.
const draType = "type"

// A draDriver publishes GPUs in ResourceSlices.
type draDriver struct {
	name string
	// whole is the type of a whole GPU.
	whole string
	// passing are the keys of taints by which the driver keeps pods off while others use the GPU.
	passing []string
}

// draDrivers are the drivers whose devices count. Names, types and taints come from NVIDIA's k8s-dra-driver-gpu and of
// ROCm's k8s-gpu-dra-driver (docs/driver-attributes.md).
var draDrivers = []draDriver{
	{name: "gpu.nvidia.com", whole: "gpu"},
	{name: "gpu.amd.com", whole: "amdgpu", passing: []string{"gpu.amd.com/memory-partition-conflict"}},
}

// A Count describes how many devices of a resource the node has, by the GPU feature discovery, and how many of them
// pods can get. A device that several pods share counts that often.
type Count struct {
	Resource          string
	Installed, Usable int64
}

// Counts returns the node's counts, sorted by resource, and whether they can be compared now: while GPUs are divided
// anew, labels and resources are of different times.
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

// OffersResource reports whether pods can get accelerators of the node by an extended resource.
func OffersResource(node *corev1.Node) bool {
	for name, count := range node.Status.Allocatable {
		if IsResource(name) && count.Sign() > 0 {
			return true
		}
	}
	return false
}

// DRA are the GPUs that DRA drivers offer on a node. Those with a taint are listed and cannot be used.
type DRA struct{ Listed, Usable int64 }

// ListDRA returns the GPUs that DRA offers, by node; none where the cluster does not serve ResourceSlices.
func ListDRA(ctx context.Context, reader client.Reader) (map[string]DRA, error) {
	byNode := map[string]DRA{}
	for _, driver := range draDrivers {
		if served, err := driver.list(ctx, reader, byNode); err != nil || !served {
			return nil, err
		}
	}
	return byNode, nil
}

// list adds the driver's GPUs.
func (d draDriver) list(ctx context.Context, reader client.Reader, byNode map[string]DRA) (served bool, err error) {
	type pool struct{ node, name string }
	generation := map[pool]int64{}
	offered := map[pool]DRA{}
	var page resourcev1.ResourceSliceList
	for {
		err := reader.List(ctx, &page, client.MatchingFields{resourcev1.ResourceSliceSelectorDriver: d.name}, client.Limit(slicesPage), client.Continue(page.Continue))
		if meta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
			return false, nil
		} else if err != nil {
			return false, fmt.Errorf("list ResourceSlices: %w", err)
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
			offered[p] = offered[p].add(d.count(spec.Devices))
		}
		if page.Continue == "" {
			break
		}
	}
	for p, o := range offered {
		byNode[p.node] = byNode[p.node].add(o)
	}
	return true, nil
}

// count counts the whole GPUs among the devices.
func (d draDriver) count(devices []resourcev1.Device) (found DRA) {
	for i := range devices {
		if kind, has := devices[i].Attributes[draType]; has && kind.StringValue != nil && *kind.StringValue != d.whole {
			continue
		}
		found.Listed++
		if !slices.ContainsFunc(devices[i].Taints, d.excludes) {
			found.Usable++
		}
	}
	return found
}

// excludes reports whether the taint says that the device cannot be used.
func (d draDriver) excludes(t resourcev1.DeviceTaint) bool {
	return !slices.Contains(d.passing, t.Key) && (t.Effect == resourcev1.DeviceTaintEffectNoSchedule || t.Effect == resourcev1.DeviceTaintEffectNoExecute)
}

func (d DRA) add(other DRA) DRA { return DRA{d.Listed + other.Listed, d.Usable + other.Usable} }
