package accelerator

import (
	"testing"

	resourcev1 "k8s.io/api/resource/v1"
)

func TestDRACountsWholeGPUs(t *testing.T) {
	device := func(kind string, taints ...resourcev1.DeviceTaint) resourcev1.Device {
		d := resourcev1.Device{Taints: taints}
		if kind != "" {
			d.Attributes = map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{draType: {StringValue: &kind}}
		}
		return d
	}
	taint := func(key string, effect resourcev1.DeviceTaintEffect) resourcev1.DeviceTaint {
		return resourcev1.DeviceTaint{Key: key, Effect: effect}
	}
	broken := taint("example.com/broken", resourcev1.DeviceTaintEffectNoSchedule)
	partitioned := taint("gpu.amd.com/memory-partition-conflict", resourcev1.DeviceTaintEffectNoExecute)
	for name, test := range map[string]struct {
		driver  string
		devices []resourcev1.Device
		want    DRA
	}{
		"NVIDIA":                   {"gpu.nvidia.com", []resourcev1.Device{device("gpu"), device("gpu", broken), device("mig")}, DRA{2, 1}},
		"without a type":           {"gpu.nvidia.com", []resourcev1.Device{device("")}, DRA{1, 1}},
		"a taint without effect":   {"gpu.nvidia.com", []resourcev1.Device{device("gpu", taint("example.com/note", "None"))}, DRA{1, 1}},
		"AMD":                      {"gpu.amd.com", []resourcev1.Device{device("amdgpu"), device("amdgpu", broken), device("amdgpu-partition"), device("vfio")}, DRA{2, 1}},
		"AMD, partitioned in use":  {"gpu.amd.com", []resourcev1.Device{device("amdgpu", partitioned)}, DRA{1, 1}},
		"AMD's taint of another's": {"gpu.nvidia.com", []resourcev1.Device{device("gpu", partitioned)}, DRA{1, 0}},
	} {
		for _, d := range draDrivers {
			if d.name == test.driver {
				if got := d.count(test.devices); got != test.want {
					t.Errorf("%s: %+v, want %+v", name, got, test.want)
				}
			}
		}
	}
}
