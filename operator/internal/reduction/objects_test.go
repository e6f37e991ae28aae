package reduction

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/inject"
)

func newService(change func(*evenkeel.ReductionServiceSpec)) *evenkeel.ReductionService {
	four := int32(4)
	s := &evenkeel.ReductionService{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "llama-reduce-0", UID: "uid"},
		Spec:       evenkeel.ReductionServiceSpec{Replicas: &four, Image: "servers:1"},
	}
	if change != nil {
		change(&s.Spec)
	}
	return s
}

// object is the one of the type among what the service is made of.
func object[T any](t *testing.T, service *evenkeel.ReductionService, running int32) T {
	t.Helper()
	for _, o := range Objects(service, Run{Servers: running}) {
		if found, ok := o.(T); ok {
			return found
		}
	}
	t.Fatalf("no %T", *new(T))
	panic("unreachable")
}

func TestServerObjectsAreOwned(t *testing.T) {
	service := newService(nil)
	for _, o := range append(Objects(service, Run{Servers: 4}), Key(service, []byte("key"))) {
		owner := metav1.GetControllerOf(o)
		if owner == nil || owner.UID != "uid" || o.GetNamespace() != "team" || o.GetName() != service.Name || o.GetLabels()[evenkeel.ReductionServerKey] != service.Name {
			t.Errorf("%T: %s/%s of %+v, labels %v", o, o.GetNamespace(), o.GetName(), owner, o.GetLabels())
		}
		if o.GetObjectKind().GroupVersionKind().Kind == "" {
			t.Errorf("%T says not what it is: it cannot be applied", o)
		}
	}
}

func TestServerImagePullSecrets(t *testing.T) {
	service := newService(func(s *evenkeel.ReductionServiceSpec) { s.ImagePullSecrets = []string{"a", "b"} })
	set := object[*appsv1.StatefulSet](t, service, 4)
	if diff := cmp.Diff([]corev1.LocalObjectReference{{Name: "a"}, {Name: "b"}}, set.Spec.Template.Spec.ImagePullSecrets); diff != "" {
		t.Error(diff)
	}
}

func TestServerNamesNoUser(t *testing.T) {
	s := object[*appsv1.StatefulSet](t, newService(nil), 4).Spec.Template.Spec
	for _, of := range []any{s.SecurityContext.RunAsUser, s.SecurityContext.RunAsGroup, s.SecurityContext.FSGroup, s.Containers[0].SecurityContext.RunAsUser} {
		if id, ok := of.(*int64); !ok || id != nil {
			t.Errorf("an ID that the cluster may not allow: %+v", s.SecurityContext)
		}
	}
	if !*s.SecurityContext.RunAsNonRoot {
		t.Error("it may run as root")
	}
}

func TestServerNamesMatchEndpoints(t *testing.T) {
	service := newService(nil)
	set, dns := object[*appsv1.StatefulSet](t, service, 4), object[*corev1.Service](t, service, 4)
	if set.Spec.ServiceName != dns.Name || dns.Spec.ClusterIP != corev1.ClusterIPNone || dns.Spec.PublishNotReadyAddresses {
		t.Errorf("StatefulSet of Service %s, which is %+v", set.Spec.ServiceName, dns.Spec)
	}
	labels := set.Spec.Template.Labels
	if diff := cmp.Diff(labels, dns.Spec.Selector); diff != "" {
		t.Error(diff)
	}
	for _, selector := range []*metav1.LabelSelector{set.Spec.Selector, object[*policyv1.PodDisruptionBudget](t, service, 4).Spec.Selector, &object[*networkingv1.NetworkPolicy](t, service, 4).Spec.PodSelector} {
		if diff := cmp.Diff(labels, selector.MatchLabels); diff != "" {
			t.Error(diff)
		}
	}
	if dns.Spec.Ports[0].Port != Port {
		t.Errorf("ports %+v", dns.Spec.Ports)
	}
}

func TestServerNetworkPolicy(t *testing.T) {
	policy := object[*networkingv1.NetworkPolicy](t, newService(nil), 4).Spec
	for _, rule := range policy.Ingress {
		toServers := slices.ContainsFunc(rule.Ports, func(p networkingv1.NetworkPolicyPort) bool { return p.Port.IntVal == Port })
		if len(rule.Ports) != 1 || toServers && (len(rule.From) != 1 || rule.From[0].PodSelector.MatchLabels[evenkeel.ReductionClientKey] != "llama-reduce-0" || rule.From[0].NamespaceSelector != nil) {
			t.Errorf("rule %+v", rule)
		}
	}
	if len(policy.Ingress) != 2 || len(policy.Egress) != 1 || policy.Egress[0].To[0].PodSelector.MatchLabels[evenkeel.ReductionClientKey] == "" || !slices.Contains(policy.PolicyTypes, networkingv1.PolicyTypeEgress) {
		t.Errorf("policy %+v", policy)
	}
}

// No selector of pods matches a pod in the network of its node.
func TestServerNetworkPolicyForHostNetwork(t *testing.T) {
	for _, o := range Objects(newService(nil), Run{Servers: 4, HostNetwork: true}) {
		policy, ok := o.(*networkingv1.NetworkPolicy)
		if !ok {
			continue
		}
		for _, rule := range policy.Spec.Ingress {
			if len(rule.Ports) != 1 || len(rule.From) > 0 {
				t.Errorf("connections may come from %+v to %+v only", rule.From, rule.Ports)
			}
		}
		if len(policy.Spec.Ingress) != 2 || len(policy.Spec.Egress) != 1 || len(policy.Spec.Egress[0].To) > 0 || policy.Spec.PodSelector.MatchLabels[evenkeel.ReductionServerKey] == "" {
			t.Errorf("policy %+v", policy.Spec)
		}
		return
	}
	t.Error("no NetworkPolicy")
}

func TestServerDrainTimeout(t *testing.T) {
	pod := object[*appsv1.StatefulSet](t, newService(nil), 4).Spec.Template.Spec
	if !slices.Contains(pod.Containers[0].Args, "--drain-timeout=30s") || *pod.TerminationGracePeriodSeconds <= 30 {
		t.Errorf("%v, %d seconds", pod.Containers[0].Args, *pod.TerminationGracePeriodSeconds)
	}
}

// The host may have many more cores than a server requests.
func TestServerThreadsMatchCPU(t *testing.T) {
	for cpu, want := range map[string]struct{ threads, workers string }{
		"":     {"--threads=2", "1"},
		"100m": {"--threads=1", "1"},
		"7":    {"--threads=7", "1"},
		"8":    {"--threads=8", "2"},
		"16":   {"--threads=16", "4"},
		"96":   {"--threads=96", "4"},
	} {
		c := object[*appsv1.StatefulSet](t, newService(func(s *evenkeel.ReductionServiceSpec) {
			if cpu != "" {
				s.Server.CPU = new(resource.MustParse(cpu))
			}
		}), 4).Spec.Template.Spec.Containers[0]
		workers := corev1.EnvVar{Name: "EVENKEEL_WORKERS", Value: want.workers}
		if !slices.Contains(c.Args, want.threads) || !slices.Contains(c.Env, workers) {
			t.Errorf("cpu %q: %v, %v; want %+v", cpu, c.Args, c.Env, want)
		}
	}
}

func TestServerKeyFile(t *testing.T) {
	pod := object[*appsv1.StatefulSet](t, newService(nil), 4).Spec.Template.Spec
	if diff := cmp.Diff(corev1.EnvVar{Name: "EVENKEEL_JOB_KEY_FILE", Value: "/var/run/secrets/evenkeel.dev/job-key"}, pod.Containers[0].Env[0]); diff != "" {
		t.Error(diff)
	}
	if pod.Volumes[0].Secret.SecretName != "llama-reduce-0" || Key(newService(nil), []byte("k")).Data[inject.KeyName] == nil {
		t.Errorf("volumes %+v", pod.Volumes)
	}
}

// A server that runs must not be replaced, whatever changes.
func TestServersAreNotUpdatedWhileRunning(t *testing.T) {
	set := object[*appsv1.StatefulSet](t, newService(nil), 4)
	none := object[*policyv1.PodDisruptionBudget](t, newService(nil), 4).Spec.MaxUnavailable
	if set.Spec.UpdateStrategy.Type != appsv1.OnDeleteStatefulSetStrategyType || none.IntVal != 0 || set.Spec.PodManagementPolicy != appsv1.ParallelPodManagement {
		t.Errorf("%+v, %v", set.Spec.UpdateStrategy, none)
	}
	if object[*appsv1.StatefulSet](t, newService(nil), 0).Spec.Replicas == nil {
		t.Error("none is not said")
	}
}

func TestServerPlacement(t *testing.T) {
	for name, test := range map[string]struct {
		placement evenkeel.PlacementSpec
		spread    []string
		near      string
	}{
		"default":                  {evenkeel.PlacementSpec{}, []string{"kubernetes.io/hostname"}, ""},
		"spread over racks":        {evenkeel.PlacementSpec{TopologyKey: "rack"}, []string{"kubernetes.io/hostname", "rack"}, ""},
		"near workers":             {evenkeel.PlacementSpec{Mode: evenkeel.PlacementNearWorkers}, []string{"kubernetes.io/hostname"}, "topology.kubernetes.io/zone"},
		"in the rack of the first": {evenkeel.PlacementSpec{Mode: evenkeel.PlacementNearWorkers, TopologyKey: "rack"}, []string{"kubernetes.io/hostname"}, "rack"},
	} {
		t.Run(name, func(t *testing.T) {
			pod := object[*appsv1.StatefulSet](t, newService(func(s *evenkeel.ReductionServiceSpec) { s.Server.Placement = test.placement }), 4).Spec.Template.Spec
			var spread []string
			for _, c := range pod.TopologySpreadConstraints {
				if c.WhenUnsatisfiable != corev1.ScheduleAnyway {
					t.Errorf("%s is a must", c.TopologyKey)
				}
				spread = append(spread, c.TopologyKey)
			}
			if diff := cmp.Diff(test.spread, spread); diff != "" {
				t.Error(diff)
			}
			near := ""
			if a := pod.Affinity.PodAffinity; a != nil {
				near = a.PreferredDuringSchedulingIgnoredDuringExecution[0].PodAffinityTerm.TopologyKey
			}
			if near != test.near {
				t.Errorf("near %q, want %q", near, test.near)
			}
			apart := pod.Affinity.PodAntiAffinity.PreferredDuringSchedulingIgnoredDuringExecution[0].PodAffinityTerm
			if apart.TopologyKey != "kubernetes.io/hostname" || apart.LabelSelector.MatchLabels[evenkeel.ReductionClientKey] == "" {
				t.Errorf("workers' hosts are as good as others: %+v", apart)
			}
			if pod.Affinity.NodeAffinity == nil {
				t.Error("nodes that failed a check are as good as others")
			}
		})
	}
}
