package integration

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/test/apiserver"
)

// newCheck is a good one.
func newCheck(change func(*evenkeel.NetworkCheckSpec)) *evenkeel.NetworkCheck {
	c := &evenkeel.NetworkCheck{ObjectMeta: metav1.ObjectMeta{GenerateName: "check-", Namespace: "default"}}
	c.Spec.Nodes.Selector = &metav1.LabelSelector{}
	c.Spec.Runner.Type = evenkeel.RunnerBench
	if change != nil {
		change(&c.Spec)
	}
	return c
}

func TestCheckValidation(t *testing.T) {
	two, large, small := int32(2), int64(1<<20), int64(4096)
	for want, change := range map[string]func(*evenkeel.NetworkCheckSpec){
		"selector":          func(s *evenkeel.NetworkCheckSpec) { s.Nodes.Names = []string{"a"} },
		"needs rails":       func(s *evenkeel.NetworkCheckSpec) { s.Stages = []evenkeel.Stage{"Pairs", "Rails"} },
		"name Pairs too":    func(s *evenkeel.NetworkCheckSpec) { s.Stages = []evenkeel.Stage{"Gang"} },
		"Unsupported value": func(s *evenkeel.NetworkCheckSpec) { s.Stages = []evenkeel.Stage{"Guess"} },
		"stage RDMA needs the runner Bench": func(s *evenkeel.NetworkCheckSpec) {
			s.Stages = []evenkeel.Stage{"RDMA"}
			s.Runner = evenkeel.RunnerSpec{Type: "NCCLTests", Image: "x", GPUsPerNode: &two}
		},
		"needs gpusPerNode":    func(s *evenkeel.NetworkCheckSpec) { s.Runner.Type = evenkeel.RunnerNCCLTests },
		"uses no GPU":          func(s *evenkeel.NetworkCheckSpec) { s.Runner.GPUsPerNode = &two },
		"goes with the runner": func(s *evenkeel.NetworkCheckSpec) { s.Runner.Type, s.Runner.GPUsPerNode = "", &two },
		"name the runner NCCLTests": func(s *evenkeel.NetworkCheckSpec) {
			s.Runner.Type, s.Sweep.Collective = "", evenkeel.CollectiveBroadcast
		},
		"has the collective AllReduce": func(s *evenkeel.NetworkCheckSpec) { s.Sweep.Collective = evenkeel.CollectiveBroadcast },
		"minBytes is larger":           func(s *evenkeel.NetworkCheckSpec) { s.Sweep.MinBytes, s.Sweep.MaxBytes = &large, &small },
		"Evenkeel's own": func(s *evenkeel.NetworkCheckSpec) {
			s.Runner.PodLabels = map[string]evenkeel.LabelValue{"app.kubernetes.io/component": "webhook"}
		},
		"spec.runner.podLabels.mesh": func(s *evenkeel.NetworkCheckSpec) {
			s.Runner.PodLabels = map[string]evenkeel.LabelValue{"mesh": "not a value"}
		},
		"spec.maxConcurrentNodes": func(s *evenkeel.NetworkCheckSpec) { one := int32(1); s.MaxConcurrentNodes = &one },
	} {
		t.Run(want, func(t *testing.T) { refused(t, dryRun(t.Context(), newCheck(change)), want) })
	}
	installed := newCheck(func(s *evenkeel.NetworkCheckSpec) {
		s.Runner = evenkeel.RunnerSpec{Type: "NCCLTests", GPUsPerNode: &two} // the image is that of the installation
	})
	if err := dryRun(t.Context(), installed); err != nil {
		t.Errorf("NCCLTests without an image: %v", err)
	}
	withoutMPIRun := newCheck(func(s *evenkeel.NetworkCheckSpec) {
		s.Runner = evenkeel.RunnerSpec{Type: "NCCLTests", Launcher: "IndexedJob", Image: "x", GPUsPerNode: &two}
	})
	if err := dryRun(t.Context(), withoutMPIRun); err != nil {
		t.Errorf("NCCLTests in an Indexed Job: %v", err)
	}
	long := newCheck(nil)
	long.Name = "a-name-that-is-longer-than-what-a-label-takes-which-is-63-characters"
	refused(t, dryRun(t.Context(), long), "at most 63")
}

func TestCheckIsImmutable(t *testing.T) {
	c := newCheck(func(s *evenkeel.NetworkCheckSpec) {
		least := resource.MustParse("340G")
		s.Thresholds.MinBusBandwidth = &least
	})
	if err := admin.Create(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	remove(t, c)
	refused(t, admin.Patch(t.Context(), c.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(`{"spec": {"profileName": "another"}}`))), "create another")
	if err := admin.Patch(t.Context(), c, client.RawPatch("application/merge-patch+json", []byte(`{"metadata": {"labels": {"mine": "kept"}}}`))); err != nil {
		t.Errorf("labels are not the spec: %v", err)
	}
}

func TestPolicyValidation(t *testing.T) {
	policy := func(change func(*evenkeel.NetworkCheckPolicySpec)) *evenkeel.NetworkCheckPolicy {
		p := &evenkeel.NetworkCheckPolicy{ObjectMeta: metav1.ObjectMeta{GenerateName: "policy-"}}
		p.Spec.Check.Runner.Type = evenkeel.RunnerBench
		change(&p.Spec)
		return p
	}
	for want, change := range map[string]func(*evenkeel.NetworkCheckPolicySpec){
		"timeZone goes with schedule": func(s *evenkeel.NetworkCheckPolicySpec) { s.Triggers.TimeZone = "Etc/UTC" },
		"a field of its own":          func(s *evenkeel.NetworkCheckPolicySpec) { s.Triggers.Schedule = "TZ=Etc/UTC 0 3 * * *" },
		"spec.onFail.taint":           func(s *evenkeel.NetworkCheckPolicySpec) { s.OnFail.Taint = "Perhaps" },
		"spec.triggers.jobStart":      func(s *evenkeel.NetworkCheckPolicySpec) { s.Triggers.JobStart = "Perhaps" },
		"spec.gate.onTimeout":         func(s *evenkeel.NetworkCheckPolicySpec) { s.Gate.OnTimeout = "Fail" },
		"spec.gate.timeoutSeconds":    func(s *evenkeel.NetworkCheckPolicySpec) { zero := int32(0); s.Gate.TimeoutSeconds = &zero },
		"spec.freshnessSeconds":       func(s *evenkeel.NetworkCheckPolicySpec) { zero := int32(0); s.FreshnessSeconds = &zero },
		"needs rails":                 func(s *evenkeel.NetworkCheckPolicySpec) { s.Check.Stages = []evenkeel.Stage{"Pairs", "Rails"} },
	} {
		t.Run(want, func(t *testing.T) { refused(t, dryRun(t.Context(), policy(change)), want) })
	}
}

func TestSampleChecksAndPolicies(t *testing.T) {
	for _, name := range []string{"networkcheck.yaml", "networkcheckpolicy.yaml"} {
		text, err := os.ReadFile(filepath.Join("..", "..", "..", "config", "samples", name))
		if err != nil {
			t.Fatal(err)
		}
		object := &unstructured.Unstructured{}
		if err := yaml.UnmarshalStrict(text, &object.Object); err != nil {
			t.Fatal(err)
		}
		// A field that the kind does not have is an error, not a warning.
		if err := admin.Create(t.Context(), object, client.DryRunAll, client.FieldValidation("Strict")); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestChecksAfterMPIOperator has a check whose runs are MPIJobs, and one that begins after the mpi-operator and its kind were removed.
// The controller has learned of the kind by then.
func TestChecksAfterMPIOperator(t *testing.T) {
	uninstall := installKinds(t, mpiJobSource)
	newReadyNode(t, "mpi-0", nil)
	newReadyNode(t, "mpi-1", nil)
	create := func(launcher evenkeel.Launcher, changes ...func(*evenkeel.RunnerSpec)) *evenkeel.NetworkCheck {
		t.Helper()
		check := newCheck(func(s *evenkeel.NetworkCheckSpec) {
			s.Nodes, s.Runner.Image, s.Runner.Launcher = evenkeel.NodeSet{Names: []string{"mpi-0", "mpi-1"}}, "bench:1", launcher
			s.Stages = []evenkeel.Stage{"Pairs"}
			for _, change := range changes {
				change(&s.Runner)
			}
		})
		check.Namespace = systemNamespace
		if err := admin.Create(t.Context(), check); err != nil {
			t.Fatal(err)
		}
		remove(t, check)
		return check
	}
	running := create(evenkeel.LauncherMPIJob)
	runs := func(ctx context.Context) (int, error) {
		list := &unstructured.UnstructuredList{}
		list.SetAPIVersion("kubeflow.org/v2beta1")
		list.SetKind("MPIJobList")
		err := admin.List(ctx, list, client.InNamespace(systemNamespace))
		return len(list.Items), err
	}
	eventually(t, "the check runs an MPIJob", func(ctx context.Context) (bool, error) {
		n, err := runs(ctx)
		return n > 0, client.IgnoreNotFound(err)
	})
	uninstall()
	eventually(t, "MPIJobs are not served", func(ctx context.Context) (bool, error) {
		_, err := runs(ctx)
		return err != nil, nil
	})
	one := int32(1)
	others := create(evenkeel.LauncherAuto, func(r *evenkeel.RunnerSpec) {
		// Linked with an MPI that needs mpirun, for all that is known.
		r.Type, r.Image, r.GPUsPerNode = evenkeel.RunnerNCCLTests, "others:1", &one
	})
	for check, want := range map[*evenkeel.NetworkCheck]string{running: "", create(evenkeel.LauncherMPIJob): "NoMPIJob", others: "NoMPIJob"} {
		eventually(t, "the check ends", func(ctx context.Context) (bool, error) {
			err := admin.Get(ctx, client.ObjectKeyFromObject(check), check)
			complete := meta.FindStatusCondition(check.Status.Conditions, evenkeel.ConditionComplete)
			return complete != nil && complete.Status == metav1.ConditionTrue && (want == "" || complete.Reason == want), err
		})
	}
	withoutMPIRun := func(r *evenkeel.RunnerSpec) {
		r.Type, r.Image, r.GPUsPerNode = evenkeel.RunnerNCCLTests, ncclTestsImage, &one
	}
	installed := func(r *evenkeel.RunnerSpec) {
		r.Type, r.Image, r.GPUsPerNode = evenkeel.RunnerNCCLTests, "", &one
	}
	for _, check := range []*evenkeel.NetworkCheck{create(evenkeel.LauncherAuto), create(evenkeel.LauncherAuto, withoutMPIRun), create(evenkeel.LauncherAuto, installed)} {
		eventually(t, "another check runs a Job", func(ctx context.Context) (bool, error) {
			var list batchv1.JobList
			err := admin.List(ctx, &list, client.InNamespace(systemNamespace), client.MatchingLabels{evenkeel.CheckKey: check.Name})
			return len(list.Items) > 0, err
		})
	}
}

// TestCheckChoosesRunner has checks and a policy that name no runner. What a check begins with, it goes on with, whatever becomes of the
// nodes.
func TestCheckChoosesRunner(t *testing.T) {
	pool := map[string]string{"pool": "choice"}
	const nvidia, amd = "nvidia.com/gpu", "amd.com/gpu"
	offer := func(name, kind, gpus string) {
		t.Helper()
		patch := fmt.Sprintf(`{"status": {"allocatable": {%[1]q: %[2]q}, "capacity": {%[1]q: %[2]q}}}`, kind, gpus)
		if err := admin.Status().Patch(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, client.RawPatch(types.StrategicMergePatchType, []byte(patch))); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"choice-0", "choice-1", "choice-2"} {
		newReadyNode(t, name, pool)
	}
	newProfile(t, "choice", evenkeel.NetworkProfileSpec{Check: evenkeel.ProfileCheckSpec{Image: "bench:1"}})
	offer("choice-0", nvidia, "8")
	offer("choice-1", nvidia, "4")
	create := func(nodes ...string) *evenkeel.NetworkCheck {
		t.Helper()
		check := newCheck(func(s *evenkeel.NetworkCheckSpec) {
			s.Nodes, s.Runner, s.Stages, s.ProfileName = evenkeel.NodeSet{Names: nodes}, evenkeel.RunnerSpec{}, []evenkeel.Stage{"Pairs"}, "choice"
		})
		check.Namespace = systemNamespace
		if err := admin.Create(t.Context(), check); err != nil {
			t.Fatal(err)
		}
		remove(t, check)
		return check
	}
	// The pods of a check's run: image and GPUs of a kind.
	runs := func(check *evenkeel.NetworkCheck, kind corev1.ResourceName) (image, gpus string) {
		t.Helper()
		eventually(t, "the check runs a Job", func(ctx context.Context) (bool, error) {
			var list batchv1.JobList
			err := admin.List(ctx, &list, client.InNamespace(systemNamespace), client.MatchingLabels{evenkeel.CheckKey: check.Name})
			if err != nil || len(list.Items) == 0 {
				return false, err
			}
			c := list.Items[0].Spec.Template.Spec.Containers[0]
			limit := c.Resources.Limits[kind]
			image, gpus = c.Image, limit.String()
			return true, admin.Get(ctx, client.ObjectKeyFromObject(check), check)
		})
		return image, gpus
	}
	status := func(check *evenkeel.NetworkCheck, want evenkeel.RunnerType) {
		t.Helper()
		eventually(t, "the status names the runner", func(ctx context.Context) (bool, error) {
			err := admin.Get(ctx, client.ObjectKeyFromObject(check), check)
			return check.Status.Runner == want, err
		})
	}
	onGPUs := create("choice-0", "choice-1")
	if image, gpus := runs(onGPUs, nvidia); image != ncclTestsImage || gpus != "4" {
		t.Errorf("on nodes with GPUs: %s with %s GPUs", image, gpus)
	}
	status(onGPUs, evenkeel.RunnerNCCLTests)
	if image, gpus := runs(create("choice-1", "choice-2"), nvidia); image != "bench:1" || gpus != "0" {
		t.Errorf("with a node without GPUs: %s with %s GPUs", image, gpus)
	}
	for _, name := range []string{"choice-5", "choice-6"} {
		newReadyNode(t, name, pool)
		offer(name, amd, "8")
	}
	onAMD := create("choice-5", "choice-6")
	if image, gpus := runs(onAMD, amd); image != rcclTestsImage || gpus != "8" {
		t.Errorf("on nodes with AMD's GPUs: %s with %s of them", image, gpus)
	}
	status(onAMD, evenkeel.RunnerRCCLTests)
	if image, _ := runs(create("choice-1", "choice-5"), amd); image != "bench:1" {
		t.Errorf("on nodes with GPUs of both: %s", image)
	}
	// The nodes lose their GPUs, the controller its memory, and the check its Job.
	offer("choice-0", nvidia, "0")
	offer("choice-1", nvidia, "0")
	if err := install.controller.stop(); err != nil {
		t.Fatal(err)
	}
	if err := admin.DeleteAllOf(t.Context(), &batchv1.Job{}, client.InNamespace(systemNamespace), client.MatchingLabels{evenkeel.CheckKey: onGPUs.Name}, client.PropagationPolicy(metav1.DeletePropagationBackground)); err != nil {
		t.Fatal(err)
	}
	var err error
	if install.controller, err = install.startController(); err != nil {
		t.Fatal(err)
	}
	if image, gpus := runs(onGPUs, nvidia); image != ncclTestsImage || gpus != "4" {
		t.Errorf("after a restart: %s with %s GPUs", image, gpus)
	}
	status(onGPUs, evenkeel.RunnerNCCLTests)

	others := map[string]string{"pool": "choice-of-policy"}
	newReadyNode(t, "choice-3", others)
	newReadyNode(t, "choice-4", others)
	policy := &evenkeel.NetworkCheckPolicy{ObjectMeta: metav1.ObjectMeta{Name: "choice"}}
	policy.Spec.NodeSelector, policy.Spec.Check.ProfileName = &metav1.LabelSelector{MatchLabels: others}, "choice"
	if err := admin.Create(t.Context(), policy); err != nil {
		t.Fatal(err)
	}
	remove(t, policy)
	eventually(t, "the policy's check has chosen", func(ctx context.Context) (bool, error) {
		var list evenkeel.NetworkCheckList
		err := admin.List(ctx, &list, client.InNamespace(systemNamespace), client.MatchingLabels{evenkeel.PolicyKey: policy.Name})
		if err != nil || len(list.Items) == 0 {
			return false, err
		}
		return list.Items[0].Spec.Runner.Type == "" && list.Items[0].Status.Runner == evenkeel.RunnerBench, nil
	})
}

// TestCapacityOfDRA has a node whose GPUs are offered by ResourceSlices only.
func TestCapacityOfDRA(t *testing.T) {
	apiserver.Needs(t, "1.34", "resource.k8s.io/v1")
	newReadyNode(t, "dra", map[string]string{"nvidia.com/gpu.count": "2"})
	verdict := func() (string, evenkeel.Verdict) {
		t.Helper()
		check := newCheck(func(s *evenkeel.NetworkCheckSpec) {
			s.Nodes, s.Runner.Image = evenkeel.NodeSet{Names: []string{"dra"}}, "bench:1"
			s.Stages = []evenkeel.Stage{"Capacity"}
		})
		check.Namespace = systemNamespace
		if err := admin.Create(t.Context(), check); err != nil {
			t.Fatal(err)
		}
		remove(t, check)
		eventually(t, "the check is complete", func(ctx context.Context) (bool, error) {
			err := admin.Get(ctx, client.ObjectKeyFromObject(check), check)
			return meta.IsStatusConditionTrue(check.Status.Conditions, evenkeel.ConditionComplete), err
		})
		health := &evenkeel.NodeNetworkHealth{}
		eventually(t, "the node has the result", func(ctx context.Context) (bool, error) {
			err := admin.Get(ctx, client.ObjectKey{Name: "dra"}, health)
			return err == nil && slices.ContainsFunc(health.Status.History, func(r evenkeel.HealthResult) bool { return r.UID == string(check.UID) }), client.IgnoreNotFound(err)
		})
		for _, r := range health.Status.History {
			if r.UID == string(check.UID) {
				return r.Reason, r.Verdict
			}
		}
		return "", ""
	}
	if reason, v := verdict(); v != evenkeel.VerdictInconclusive || reason != "GPUsPending" {
		t.Errorf("%s %s: nothing offers the GPUs yet", v, reason)
	}
	name := "dra"
	slice := func(generation int64, devices ...resourcev1.Device) {
		t.Helper()
		object := &resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{GenerateName: "dra-"}, Spec: resourcev1.ResourceSliceSpec{
			Driver: "gpu.nvidia.com", NodeName: &name, Devices: devices,
			Pool: resourcev1.ResourcePool{Name: "dra", Generation: generation, ResourceSliceCount: 1},
		}}
		if err := admin.Create(t.Context(), object); err != nil {
			t.Fatal(err)
		}
		remove(t, object)
	}
	gpu := "gpu"
	whole := func(name string) resourcev1.Device {
		return resourcev1.Device{Name: name, Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{"type": {StringValue: &gpu}}}
	}
	slice(1, whole("gpu-0"))
	if reason, v := verdict(); v != evenkeel.VerdictFail || reason != "MissingGPUs" {
		t.Errorf("%s %s: one of two GPUs is offered", v, reason)
	}
	slice(2, whole("gpu-0"), whole("gpu-1")) // the driver deletes the older one later
	if reason, v := verdict(); v == evenkeel.VerdictFail || reason == "GPUsPending" {
		t.Errorf("%s %s: both are offered", v, reason)
	}

	// Without the label, the driver's list says how many there are.
	if err := admin.Patch(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "dra"}}, client.RawPatch(types.MergePatchType, []byte(`{"metadata": {"labels": {"nvidia.com/gpu.count": null}}}`))); err != nil {
		t.Fatal(err)
	}
	broken := whole("gpu-1")
	broken.Taints = []resourcev1.DeviceTaint{{Key: "example.com/broken", Effect: resourcev1.DeviceTaintEffectNoSchedule}}
	slice(3, whole("gpu-0"), broken)
	if reason, v := verdict(); v != evenkeel.VerdictFail || reason != "MissingGPUs" {
		t.Errorf("%s %s: one of two GPUs has a taint, and no label counts them", v, reason)
	}
}
