package integration

import (
	"context"
	"strings"
	"testing"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/controller/jobgate/suspend"
	"evenkeel.dev/evenkeel/operator/internal/workload"
	"evenkeel.dev/evenkeel/operator/test/apiserver"
)

// gatedJobs makes a job of each kind, gated.
func gatedJobs(t *testing.T, namespace string, pool map[string]string) []*unstructured.Unstructured {
	t.Helper()
	var jobs []*unstructured.Unstructured
	for _, kind := range []string{"Job", "PyTorchJob"} {
		job := heldJob(t, kind, namespace, pool)
		createJob(t, job)
		isStateOf(t, job, "suspended, gated true")
		jobs = append(jobs, job)
	}
	return jobs
}

// patchAs patches a job as somebody, and returns the warnings of the API server.
func patchAs(t *testing.T, manager string, job *unstructured.Unstructured, patch string) (warned string) {
	t.Helper()
	var warnings recordedWarnings
	as := rest.CopyConfig(config)
	as.WarningHandler = &warnings
	c, err := client.New(as, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Patch(t.Context(), job.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(patch)), client.FieldOwner(manager)); err != nil {
		t.Fatal(err)
	}
	return strings.Join(warnings.list, " ")
}

type recordedWarnings struct{ list []string }

func (w *recordedWarnings) HandleWarningHeader(_ int, _, text string) { w.list = append(w.list, text) }

// resume is the patch that starts a job of the kind.
func resume(job *unstructured.Unstructured) string {
	if job.GetKind() == "Job" {
		return `{"spec": {"suspend": false}}`
	}
	return `{"spec": {"runPolicy": {"suspend": false}}}`
}

// GitOps sets suspend to what Git has. The gate stays closed, and whoever means it says so.
func TestGateStaysClosedForGitOps(t *testing.T) {
	policy, pool, ns := newGate(t, "gitops", waitRegardless)
	jobs := gatedJobs(t, ns, pool)
	for _, job := range jobs {
		if said := patchAs(t, "argocd-controller", job, resume(job)); !strings.Contains(said, "stays suspended") {
			t.Errorf("the %s: warned %q", job.GetKind(), said)
		}
		if got, err := stateOf(t.Context(), job); err != nil || got != "suspended, gated true" {
			t.Errorf("the %s is %s, %v", job.GetKind(), got, err)
		}
	}
	off := `{"metadata": {"annotations": {"evenkeel.dev/gate": "Disabled"}}}`
	patchAs(t, "kubectl-annotate", jobs[0], off)
	isStateOf(t, jobs[0], "runs")
	if said := said(t, jobs[0], "EvenkeelGateDisabled"); said == "" {
		t.Error("no Event says that its user turned the gate off")
	}

	// Where the gate is mandatory, neither that nor a job that its user suspended gets around it.
	if err := admin.Patch(t.Context(), policy, client.RawPatch(types.MergePatchType, []byte(`{"spec": {"gate": {"optOut": "Forbidden"}}}`))); err != nil {
		t.Fatal(err)
	}
	without := heldJob(t, "Job", ns, pool)
	without.SetName("without")
	without.SetAnnotations(map[string]string{evenkeel.ProfileKey: "default", evenkeel.GateKey: evenkeel.GateDisabled})
	eventually(t, "a job without the gate is refused", func(ctx context.Context) (bool, error) {
		err := dryRun(ctx, without.DeepCopy())
		return err != nil && strings.Contains(err.Error(), "NetworkCheckPolicy gitops gates every job of the profile"), nil
	})
	mine := heldJob(t, "Job", ns, pool)
	mine.SetName("mine")
	if err := workload.Suspend(mine, true); err != nil {
		t.Fatal(err)
	}
	createJob(t, mine)
	isStateOf(t, mine, "suspended, gated suspended")
	if said := patchAs(t, "kubectl", mine, resume(mine)); !strings.Contains(said, "mandatory") {
		t.Errorf("warned %q", said)
	}
	isStateOf(t, mine, "suspended, gated true")
	patchAs(t, "kubectl-annotate", jobs[1], off)
	patchAs(t, "kubectl", jobs[1], resume(jobs[1]))
	isStateOf(t, jobs[1], "suspended, gated true")

	if err := admin.Delete(t.Context(), policy); err != nil {
		t.Fatal(err)
	}
	isStateOf(t, mine, "runs")
	isStateOf(t, jobs[1], "runs")
}

// While no webhook answers, nothing keeps the gate closed. What opened it is said.
func TestGateOpenedWithoutWebhookIsSaid(t *testing.T) {
	_, pool, ns := newGate(t, "unwatched", waitRegardless)
	jobs := gatedJobs(t, ns, pool)
	stopWebhook(t)
	for _, job := range jobs {
		patchAs(t, "argocd-controller", job, resume(job))
		isStateOf(t, job, "runs")
		message := ""
		eventually(t, "an Event says who started the job", func(context.Context) (bool, error) {
			message = said(t, job, suspend.ReasonOpenedManually)
			return message != "", nil
		})
		if !strings.Contains(message, "started by argocd-controller before its nodes were proven") {
			t.Errorf("the Event is %q", message)
		}
	}
}

// The controller starts gated jobs as ever while no webhook answers.
func TestGateOpensWithoutWebhook(t *testing.T) {
	policy, pool, ns := newGate(t, "unanswered", waitRegardless)
	jobs := gatedJobs(t, ns, pool)
	stopWebhook(t)
	if err := admin.Patch(t.Context(), policy, client.RawPatch(types.MergePatchType, []byte(`{"spec": {"gate": {"onTimeout": "Start"}}}`))); err != nil {
		t.Fatal(err)
	}
	for _, job := range jobs {
		isStateOf(t, job, "runs")
	}
}

// Without the configuration of the webhooks, gated jobs start as ever, and new jobs get neither gate nor plugin.
func TestWebhookConfigurationDeleted(t *testing.T) {
	policy, pool, ns := newGate(t, "unhooked", waitRegardless)
	jobs := gatedJobs(t, ns, pool)
	if err := admin.Delete(t.Context(), &admissionregistrationv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "evenkeel"}}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { restoreWebhooks(t) })
	eventually(t, "a new job is not gated", func(ctx context.Context) (bool, error) {
		job := heldJob(t, "Job", ns, pool)
		job.SetName("new")
		err := dryRun(ctx, job)
		suspended, _ := workload.Suspended(job)
		return !suspended, err
	})
	if err := admin.Patch(t.Context(), policy, client.RawPatch(types.MergePatchType, []byte(`{"spec": {"gate": {"onTimeout": "Start"}}}`))); err != nil {
		t.Fatal(err)
	}
	for _, job := range jobs {
		isStateOf(t, job, "runs")
	}
}

// The label alone does not make the controller start a job that somebody else has suspended.
func TestGateLabelAloneStartsNothing(t *testing.T) {
	ns := newNamespace(t, nil)
	job, _ := newJob("Job", ns, "")
	job.SetLabels(map[string]string{evenkeel.GatedKey: evenkeel.GatedValue})
	if err := workload.Suspend(job, true); err != nil {
		t.Fatal(err)
	}
	createJob(t, job)
	isStateOf(t, job, "suspended")
}

// A controller whose namespace is being deleted is the last one: it opens all gates before it ends. Nobody answers for the webhook
// then, so it deletes its configuration: else the jobs would get no pods.
func TestControllerOpensGatesWhenItsNamespaceIsDeleted(t *testing.T) {
	_, pool, ns := newGate(t, "orphaned", waitRegardless)
	jobs := gatedJobs(t, ns, pool)
	leaving := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "leaving-system"}}
	if err := admin.Create(t.Context(), leaving); err != nil {
		t.Fatal(err)
	}
	// The chart gives the controller permissions in one namespace, which has to live on.
	everything := &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: leaving.Name, Name: "everything"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: systemNamespace, Name: "evenkeel-controller"}},
	}
	if err := admin.Create(t.Context(), everything); err != nil {
		t.Fatal(err)
	}
	configuration := &admissionregistrationv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "leaving"}}
	validating := &admissionregistrationv1.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "leaving"}}
	gates := &admissionregistrationv1.MutatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: "leaving"}, Spec: admissionregistrationv1.MutatingAdmissionPolicyBindingSpec{PolicyName: "leaving"}}
	cleaner := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "leaving"}, Rules: []rbacv1.PolicyRule{{
		APIGroups: []string{admissionregistrationv1.GroupName}, Resources: []string{"mutatingwebhookconfigurations", "validatingwebhookconfigurations", "mutatingadmissionpolicybindings"}, ResourceNames: []string{"leaving"}, Verbs: []string{"get", "delete"},
	}}}
	binding := &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "leaving"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "leaving"}, Subjects: everything.Subjects}
	objects, flags := []client.Object{configuration, validating, cleaner, binding}, []string{"controller", "--namespace=leaving-system", "--webhook-config=leaving"}
	policies := apiserver.AtLeast(t, mutatingPolicies)
	if policies {
		objects, flags = append(objects, gates), append(flags, "--gate-binding=leaving")
	}
	for _, object := range objects {
		if err := admin.Create(t.Context(), object); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := admin.Delete(context.Background(), object); client.IgnoreNotFound(err) != nil {
				t.Error(err)
			}
		})
	}
	kubeconfig, err := install.kubeconfig("evenkeel-controller")
	if err != nil {
		t.Fatal(err)
	}
	for _, deleted := range []bool{false, true} {
		last, err := launch(install.binary, kubeconfig, flags)
		if err != nil {
			t.Fatal(err)
		}
		if deleted {
			if err := admin.Delete(t.Context(), leaving); err != nil {
				t.Fatal(err)
			}
		}
		if err := last.stop(); err != nil {
			t.Fatal(err)
		}
		for _, job := range jobs {
			want := "suspended, gated true"
			if deleted {
				want = "runs"
			}
			if got, err := stateOf(t.Context(), job); err != nil || got != want {
				t.Errorf("deleted %t: the %s is %s, %v", deleted, job.GetKind(), got, err)
			}
		}
		if err := admin.Get(t.Context(), client.ObjectKeyFromObject(configuration), configuration); apierrors.IsNotFound(err) != deleted {
			t.Errorf("deleted %t: the webhook configuration: %v", deleted, err)
		}
		if err := admin.Get(t.Context(), client.ObjectKeyFromObject(validating), validating); apierrors.IsNotFound(err) != deleted {
			t.Errorf("deleted %t: the validating webhook configuration: %v", deleted, err)
		}
		if err := admin.Get(t.Context(), client.ObjectKeyFromObject(gates), gates); policies && apierrors.IsNotFound(err) != deleted {
			t.Errorf("deleted %t: the binding of the policy that gates pods: %v", deleted, err)
		}
	}
}
