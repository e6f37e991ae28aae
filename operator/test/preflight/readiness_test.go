package preflight

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/cli"
)

// readinessRule has the fields that the shipped NodeReadinessRule uses.
type readinessRule struct {
	metav1.TypeMeta `json:",inline"`
	Metadata        struct {
		Name string `json:"name"`
	} `json:"metadata"`
	Spec struct {
		NodeSelector metav1.LabelSelector `json:"nodeSelector"`
		Conditions   []struct {
			Type           corev1.NodeConditionType `json:"type"`
			RequiredStatus corev1.ConditionStatus   `json:"requiredStatus"`
		} `json:"conditions"`
		Taint           corev1.Taint `json:"taint"`
		EnforcementMode string       `json:"enforcementMode"`
	} `json:"spec"`
}

// met reports whether the rule's conditions hold for the node, so that the Node Readiness Controller takes the taint away.
func (r *readinessRule) met(node *corev1.Node) bool {
	for _, required := range r.Spec.Conditions {
		has := false
		for _, c := range node.Status.Conditions {
			has = has || c.Type == required.Type && c.Status == required.RequiredStatus
		}
		if !has {
			return false
		}
	}
	return true
}

func readSample(t *testing.T, name string, into any) {
	t.Helper()
	root, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(root, "config", "samples", name))
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.UnmarshalStrict(text, into); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
}

// TestReadinessRuleIsMetByNodesThatPass does what the Node Readiness Controller does before a node is proven: it puts the rule's taint
// on it. Checks have to run there all the same.
func TestReadinessRuleIsMetByNodesThatPass(t *testing.T) {
	var rule readinessRule
	readSample(t, "nodereadinessrule.yaml", &rule)
	policy := &evenkeel.NetworkCheckPolicy{}
	readSample(t, "networkcheckpolicy.yaml", policy)
	if rule.Spec.Taint.Key != evenkeel.ReadinessTaintKey || len(rule.Spec.Conditions) != 1 || !equality.Semantic.DeepEqual(&rule.Spec.NodeSelector, policy.Spec.NodeSelector) {
		t.Fatalf("%+v is not a rule for the nodes of the policy %+v", rule, policy.Spec.NodeSelector)
	}

	f := newFleet(t, links(map[string]float64{"readiness-1": 0.1}))
	start(t, f, &clock{}, &clock{})
	names := newNodes(t, "readiness", 4)
	patch, err := json.Marshal(map[string]any{"spec": map[string]any{"taints": []corev1.Taint{rule.Spec.Taint}}})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if err := admin.Patch(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, client.RawPatch(types.MergePatchType, patch)); err != nil {
			t.Fatal(err)
		}
	}
	newPolicy(t, "readiness", nil)
	for _, name := range names {
		want := "True Proven|healthy|"
		if name == "readiness-1" {
			want = "False TooSlow|unhealthy|"
		}
		carries(t, name, want)
		node := &corev1.Node{}
		if err := admin.Get(t.Context(), client.ObjectKey{Name: name}, node); err != nil {
			t.Fatal(err)
		}
		if rule.met(node) != (name != "readiness-1") {
			t.Errorf("%s: the rule is met: %t; %+v", name, rule.met(node), node.Status.Conditions)
		}
		if len(node.Spec.Taints) != 1 || !node.Spec.Taints[0].MatchTaint(&rule.Spec.Taint) {
			t.Errorf("%s: the taint of another controller was changed: %+v", name, node.Spec.Taints)
		}
	}
}

func TestKubectlPluginCheckNode(t *testing.T) {
	f := newFleet(t, links(map[string]float64{"answer-1": 0.1}))
	start(t, f, &clock{}, &clock{})
	newNodes(t, "answer", 4)
	newNode(t, "alone", "alone")
	newPolicy(t, "answer", nil)
	carries(t, "answer-0", "True Proven|healthy|")
	carries(t, "answer-1", "False TooSlow|unhealthy|")
	config := kubeconfig(t)
	plugin(t, config, cli.ExitNodeProven, "check node answer-0", "proven at 20", " in check ", ": with answer-", "1 GB/s, minimum ")
	plugin(t, config, cli.ExitNodeFailed, "check node answer-1", "failed at 20", "TooSlow: with answer-", "0.1 GB/s, minimum ")
	plugin(t, config, cli.ExitNodeUnknown, "check node alone", "unknown: ", "no NetworkCheckPolicy selects it")
	plugin(t, config, cli.ExitNodeUnknown, "check node nowhere", `no node is named "nowhere"`)
	// An account that may read nodes and no more, as a kubelet its own.
	plugin(t, config, cli.ExitNodeUnknown, "check node answer-0 --as reader", "unknown: cannot read node answer-0", "forbidden")
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "answer-reader"}, Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get"}}}}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: role.ObjectMeta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "reader"}},
	}
	for _, object := range []client.Object{role, binding} {
		if err := admin.Create(t.Context(), object); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := admin.Delete(context.Background(), object); err != nil {
				t.Error(err)
			}
		})
	}
	var out bytes.Buffer
	eventually(t, "the API server knows what the account may", func(ctx context.Context) (bool, error) {
		out.Reset()
		return cli.Run(ctx, []string{"check", "node", "answer-0", "--as", "reader", "--kubeconfig", config}, &out, &out) == cli.ExitNodeProven, nil
	})
	if !strings.HasPrefix(out.String(), "proven: with answer-") {
		t.Errorf("%q", out.String())
	}
}
