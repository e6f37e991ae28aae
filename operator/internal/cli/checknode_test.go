package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// nodeAPI serves one node and its NodeNetworkHealth, as an API server does.
type nodeAPI struct {
	node   *corev1.Node
	health *evenkeel.NodeNetworkHealth
	// mute has it never answer, forbidden has it keep NodeNetworkHealths to itself.
	mute, forbidden bool
	asked           []string
}

func (a *nodeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if a.mute {
		<-r.Context().Done()
		return
	}
	a.asked = append(a.asked, r.URL.Path) // the client sends one request after the other
	var answer any
	status, name := http.StatusOK, filepath.Base(r.URL.Path)
	healths := schema.GroupResource{Group: evenkeel.GroupVersion.Group, Resource: "nodenetworkhealths"}
	switch {
	case a.forbidden && strings.Contains(r.URL.Path, healths.Resource):
		answer, status = apierrors.NewForbidden(healths, name, nil).Status(), http.StatusForbidden
	case r.URL.Path == "/api/v1/nodes/gpu-17" && a.node != nil:
		answer = a.node
	case r.URL.Path == "/apis/evenkeel.dev/v1alpha1/nodenetworkhealths/gpu-17" && a.health != nil:
		answer = a.health
	default:
		answer, status = apierrors.NewNotFound(schema.GroupResource{}, name).Status(), http.StatusNotFound
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(answer) // the client notices
}

// serveNode serves the API until the test ends, and returns the path of a kubeconfig for it.
func serveNode(t *testing.T, a *nodeAPI) string {
	t.Helper()
	server := httptest.NewServer(a)
	t.Cleanup(server.Close)
	path := filepath.Join(t.TempDir(), "config")
	text := fmt.Sprintf("apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{name: c, context: {cluster: c}}]\nclusters: [{name: c, cluster: {server: '%s'}}]\n", server.URL)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// judgedNode is a node with the condition, after two results of which the latest is inconclusive.
func judgedNode(status corev1.ConditionStatus, reason, message, label string) *nodeAPI {
	node := &corev1.Node{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}, ObjectMeta: metav1.ObjectMeta{Name: "gpu-17", UID: "1", Labels: map[string]string{}}}
	if label != "" {
		node.Labels[evenkeel.HealthKey] = label
	}
	node.Status.Conditions = []corev1.NodeCondition{
		{Type: corev1.NodeReady, Status: corev1.ConditionTrue},
		{Type: evenkeel.ConditionNodeHealthy, Status: status, Reason: reason, Message: message},
	}
	health := &evenkeel.NodeNetworkHealth{TypeMeta: metav1.TypeMeta{APIVersion: evenkeel.GroupVersion.String(), Kind: "NodeNetworkHealth"}}
	health.Name = "gpu-17"
	health.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "gpu-17", UID: "1"}}
	verdict := evenkeel.VerdictPass
	health.Status.Health = evenkeel.HealthHealthy
	if status == corev1.ConditionFalse {
		verdict, health.Status.Health = evenkeel.VerdictFail, evenkeel.HealthUnhealthy
	}
	health.Status.History = []evenkeel.HealthResult{
		{Check: "later", UID: "3", Time: at(30), Verdict: evenkeel.VerdictInconclusive}, {Check: "nightly-1", UID: "2", Time: at(10), Verdict: verdict},
	}
	return &nodeAPI{node: node, health: health}
}

func TestCheckNodeAnswers(t *testing.T) {
	const (
		pass  = "with gpu-18: 46.1 GB/s, minimum 39.2"
		slow  = "with gpu-18: 9.8 GB/s, minimum 39.2; with gpu-3: 9.9 GB/s, minimum 39.2"
		spare = "not labeled, as more than 20 percent of the nodes would be; " + slow
		when  = " at 2026-11-21T12:10:00Z in check nightly-1"
	)
	proven := func() *nodeAPI { return judgedNode(corev1.ConditionTrue, "Proven", pass, evenkeel.HealthyValue) }
	for name, test := range map[string]struct {
		api    *nodeAPI
		change func(*nodeAPI)
		status int
		line   string
	}{
		"proven":                           {proven(), nil, 0, "proven" + when + ": " + pass},
		"failed":                           {judgedNode(corev1.ConditionFalse, "TooSlow", slow, evenkeel.UnhealthyValue), nil, 1, "failed" + when + ": TooSlow: " + slow},
		"failed, as too many others":       {judgedNode(corev1.ConditionFalse, "TooSlow", spare, ""), nil, 2, "unknown: TooSlow: " + spare},
		"passed long ago":                  {judgedNode(corev1.ConditionUnknown, "Stale", "the node passed, but that was at 12", ""), nil, 2, "unknown: Stale: the node passed, but that was at 12"},
		"under no policy":                  {proven(), func(a *nodeAPI) { a.node.Status.Conditions = a.node.Status.Conditions[:1] }, 2, "unknown: node gpu-17 has no condition EvenkeelNetworkHealthy, as no NetworkCheckPolicy selects it"},
		"gone":                             {proven(), func(a *nodeAPI) { a.node = nil }, 2, `unknown: no node is named "gpu-17"`},
		"its health may not be read":       {proven(), func(a *nodeAPI) { a.forbidden = true }, 0, "proven: " + pass},
		"its health was deleted":           {proven(), func(a *nodeAPI) { a.health = nil }, 0, "proven: " + pass},
		"its health is an earlier node's":  {proven(), func(a *nodeAPI) { a.health.OwnerReferences[0].UID = "0" }, 0, "proven: " + pass},
		"its health is newer":              {proven(), func(a *nodeAPI) { a.health.Status.Health = evenkeel.HealthUnhealthy }, 0, "proven: " + pass},
		"its health has no history":        {proven(), func(a *nodeAPI) { a.health.Status.History = nil }, 0, "proven: " + pass},
		"a message of several lines":       {proven(), func(a *nodeAPI) { a.node.Status.Conditions[1].Message = "with a:\n1 GB/s" }, 0, "proven" + when + ": with a: 1 GB/s"},
		"its condition is of another kind": {proven(), func(a *nodeAPI) { a.node.Status.Conditions[1].Status = "Maybe" }, 2, "unknown: Proven: " + pass},
	} {
		if test.change != nil {
			test.change(test.api)
		}
		config := serveNode(t, test.api)
		var out, errs bytes.Buffer
		status := Run(t.Context(), []string{"check", "node", "gpu-17", "--kubeconfig", config}, &out, &errs)
		if status != test.status || out.String() != test.line+"\n" || errs.Len() > 0 {
			t.Errorf("%s: exit status %d, %q, %q; want %d and %q", name, status, out.String(), errs.String(), test.status, test.line)
		}
	}
}

// Thousands of nodes ask every minute.
func TestCheckNodeSendsTwoRequests(t *testing.T) {
	t.Setenv("NODE_NAME", "gpu-17")
	api := judgedNode(corev1.ConditionTrue, "Proven", "with gpu-18: 46.1 GB/s", evenkeel.HealthyValue)
	var out bytes.Buffer
	status := Run(t.Context(), []string{"check", "node", "--kubeconfig", serveNode(t, api)}, &out, &out)
	want := []string{"/api/v1/nodes/gpu-17", "/apis/evenkeel.dev/v1alpha1/nodenetworkhealths/gpu-17"}
	if status != ExitNodeProven || !slices.Equal(api.asked, want) {
		t.Errorf("%d, %s: it asked for %v, want %v", status, out.String(), api.asked, want)
	}
}

// Slurm drains a node for every status but 0, and a script of ours for 1: what says nothing about the node has to be 2.
func TestCheckNodeWithoutAnswerIsUnknown(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	t.Setenv("HOME", t.TempDir())
	served := serveNode(t, &nodeAPI{})
	silent := serveNode(t, &nodeAPI{mute: true})
	for args, want := range map[string]string{
		"check node gpu-17":                                                "no cluster configured",
		"check node gpu-17 --kubeconfig=/nowhere":                          "/nowhere",
		"check node a b --kubeconfig=" + served:                            "accepts at most 1 arg(s)",
		"check node gpu-17 --fast":                                         "--fast",
		"check node gpu-17 --insecure-skip-tls-verify=x":                   "insecure-skip-tls-verify",
		"check node gpu-18 --kubeconfig=" + served:                         `no node is named "gpu-18"`,
		"check node ../gpu-17 --kubeconfig=" + served:                      "../gpu-17",
		"check node gpu-17 --request-timeout=100ms --kubeconfig=" + silent: "cannot read node gpu-17",
	} {
		var out, errs bytes.Buffer
		status := Run(t.Context(), strings.Fields(args), &out, &errs)
		line, one := strings.CutSuffix(out.String(), "\n")
		if status != ExitNodeUnknown || !one || strings.Contains(line, "\n") || !strings.HasPrefix(line, "unknown: ") || !strings.Contains(line, want) || errs.Len() > 0 {
			t.Errorf("%s: exit status %d, %q, %q; want 2 and one line with %s", args, status, out.String(), errs.String(), want)
		}
	}
}

// deadlineReader notes how long a request may take.
type deadlineReader struct {
	client.Reader
	left time.Duration
}

func (r *deadlineReader) Get(ctx context.Context, _ client.ObjectKey, _ client.Object, _ ...client.GetOption) error {
	deadline, _ := ctx.Deadline()
	r.left = time.Until(deadline)
	return context.DeadlineExceeded
}

func TestCheckNodeAnswersInTime(t *testing.T) {
	r := &deadlineReader{}
	if answer := answerNode(t.Context(), r, "gpu-17"); answer.status != ExitNodeUnknown || r.left <= 0 || r.left > answerTimeout {
		t.Errorf("%+v: a request may take %s, want at most %s", answer, r.left, answerTimeout)
	}
}
