package doctor

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"slices"
	"strings"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

const (
	// probeProfile is the name of a profile that does not exist. The webhook refuses jobs that ask for it.
	probeProfile = "doctor-probe-that-does-not-exist"
	// webhookDomain ends the names of Evenkeel's webhooks.
	webhookDomain = ".evenkeel.dev"
	// expiresSoon is less than half of what is left when the operator renews a certificate.
	expiresSoon = 30 * 24 * time.Hour
)

// ofChart reports whether the chart has made what has these labels, by whatever name it was installed.
func ofChart(labels map[string]string) bool {
	return strings.HasPrefix(labels["helm.sh/chart"], "evenkeel-")
}

func (d *Doctor) deployments(ctx context.Context, s *state) ([]Finding, error) {
	var list appsv1.DeploymentList
	if err := d.Client.List(ctx, &list, client.InNamespace(d.Namespace)); err != nil {
		return nil, fmt.Errorf("list Deployments: %w", err)
	}
	list.Items = slices.DeleteFunc(list.Items, func(d appsv1.Deployment) bool { return !ofChart(d.Labels) })
	if len(list.Items) == 0 {
		return []Finding{{"operator", Problem, "namespace " + d.Namespace + " has no Deployment of Evenkeel", "name its namespace with -n, or install the chart"}}, nil
	}
	s.deployments = list.Items
	var all []Finding
	for _, deployment := range list.Items {
		wanted := int32(1)
		if deployment.Spec.Replicas != nil {
			wanted = *deployment.Spec.Replicas
		}
		f := Finding{"operator", OK, fmt.Sprintf("%s: %d of %d replicas are available, with image %s", deployment.Name, deployment.Status.AvailableReplicas, wanted, imageOf(&deployment)), ""}
		describe := fmt.Sprintf("kubectl -n %s describe deployment %s", d.Namespace, deployment.Name)
		switch available := deployment.Status.AvailableReplicas; {
		case available == 0:
			f.Status, f.Do = Problem, describe
		case available < wanted:
			f.Status, f.Do = Note, describe
		}
		for _, c := range deployment.Status.Conditions {
			if c.Type != appsv1.DeploymentReplicaFailure || c.Status != corev1.ConditionTrue || f.Status == OK {
				continue
			}
			f.Message += ", as pods are refused: " + c.Message
			switch {
			case strings.Contains(c.Message, "security context constraint"):
				f.Do = "on OpenShift, install with --set podSecurityContext=null"
			case strings.Contains(c.Message, "violates PodSecurity"):
				f.Do = "webhook.hostNetwork needs a namespace that enforces privileged; without it the chart's pods fit restricted"
			}
		}
		all = append(all, f)
	}
	return all, nil
}

// imageOf returns the image of the Deployment's program.
func imageOf(d *appsv1.Deployment) string {
	if containers := d.Spec.Template.Spec.Containers; len(containers) > 0 {
		return containers[0].Image
	}
	return "none"
}

// admission asks the API server, in a dry run, for a job of a profile that does not exist. A webhook that answers
// refuses it.
func (d *Doctor) admission(ctx context.Context, _ *state) ([]Finding, error) {
	job := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{GenerateName: "evenkeel-doctor-", Namespace: metav1.NamespaceDefault, Annotations: map[string]string{evenkeel.ProfileKey: probeProfile}}}
	job.Spec.Template.Spec = corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, Containers: []corev1.Container{{Name: "probe", Image: "probe"}}}
	err := d.Client.Create(ctx, job, client.DryRunAll)
	if err == nil && job.Spec.Template.Annotations[evenkeel.ProfileKey] == probeProfile { // there is a policy, which looks at pods
		return d.policies(ctx)
	}
	switch {
	case err == nil:
		return []Finding{{"admission", Problem, "no webhook looks at annotated jobs: they run without the plugin", "helm upgrade restores the MutatingWebhookConfiguration"}}, nil
	case strings.Contains(err.Error(), "no NetworkProfile is named"):
		return []Finding{{"admission", OK, "the webhook answers, and the API server trusts its certificate", ""}}, nil
	case strings.Contains(err.Error(), "failed calling webhook") && !strings.Contains(err.Error(), webhookDomain):
		return []Finding{{"admission", Problem, "jobs are refused, and not by Evenkeel: " + err.Error(), "see who runs that webhook"}}, nil
	case apierrors.IsInternalError(err), strings.Contains(err.Error(), "failed calling webhook"):
		return []Finding{{"admission", Problem, "annotated jobs are refused: " + err.Error(), "x509: see the certificate; timeout or refused: does the webhook run, and may the API server reach its port (webhook.hostNetwork, firewall, NetworkPolicy)?"}}, nil
	}
	return []Finding{{"admission", Unknown, "a job could not be tried: " + err.Error(), "run it as somebody who may create jobs in the namespace default"}}, nil
}

// restrictedPod is a pod that fits every standard that a namespace may enforce.
func restrictedPod() corev1.PodSpec {
	yes, no := true, false
	return corev1.PodSpec{
		SecurityContext: &corev1.PodSecurityContext{RunAsNonRoot: &yes, SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}},
		Containers: []corev1.Container{{Name: "probe", Image: "probe", SecurityContext: &corev1.SecurityContext{
			AllowPrivilegeEscalation: &no, Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
		}}},
	}
}

// policies asks the API server, in a dry run, for a pod of a profile that does not exist. The policies refuse it.
func (d *Doctor) policies(ctx context.Context) ([]Finding, error) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{GenerateName: "evenkeel-doctor-", Namespace: metav1.NamespaceDefault, Annotations: map[string]string{evenkeel.ProfileKey: probeProfile}}}
	pod.Spec = restrictedPod()
	err := d.Client.Create(ctx, pod, client.DryRunAll)
	switch {
	case err == nil:
		return []Finding{{"admission", Problem, "no policy looks at annotated pods: they run without the plugin", "helm upgrade restores the MutatingAdmissionPolicies and their bindings"}}, nil
	case strings.Contains(err.Error(), "no NetworkProfile is named"):
		return []Finding{{"admission", OK, "mutating admission policies change pods; there is no webhook", ""}}, nil
	}
	return []Finding{{"admission", Unknown, "a pod could not be tried: " + err.Error(), "run it as somebody who may create pods in the namespace default"}}, nil
}

func (d *Doctor) certificate(ctx context.Context, _ *state) ([]Finding, error) {
	var list admissionregistrationv1.MutatingWebhookConfigurationList
	if err := d.Client.List(ctx, &list); err != nil {
		return nil, fmt.Errorf("list webhook configurations: %w", err)
	}
	var all []Finding
	for _, configuration := range list.Items {
		if !ofChart(configuration.Labels) {
			continue
		}
		for _, w := range configuration.Webhooks {
			until, err := trustedUntil(w.ClientConfig.CABundle)
			f := Finding{"certificate", OK, fmt.Sprintf("%s: its CA is valid until %s", w.Name, until.UTC().Format(time.DateOnly)), ""}
			switch {
			case err != nil:
				f.Status, f.Message, f.Do = Problem, w.Name+": "+err.Error(), "see the log of the Deployment that makes the certificate, or the values webhook.certs"
			case until.Before(d.Now):
				f.Status, f.Do = Problem, "the CA has expired: see who renews it (webhook.certs.source)"
			case until.Before(d.Now.Add(expiresSoon)):
				f.Status, f.Do = Note, "see who renews it (webhook.certs.source)"
			}
			all = append(all, f)
		}
	}
	return all, nil
}

// trustedUntil is when the last certificate of the bundle expires.
func trustedUntil(bundle []byte) (until time.Time, err error) {
	for {
		block, rest := pem.Decode(bundle)
		if block == nil {
			break
		}
		if certificate, err := x509.ParseCertificate(block.Bytes); err == nil && certificate.NotAfter.After(until) {
			until = certificate.NotAfter
		}
		bundle = rest
	}
	if until.IsZero() {
		return until, fmt.Errorf("the API server has no CA to trust its certificate by")
	}
	return until, nil
}
