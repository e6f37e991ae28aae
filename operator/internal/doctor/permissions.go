package doctor

import (
	"context"
	"fmt"

	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"evenkeel.dev/evenkeel/operator/internal/text"
)

// installs are what the chart creates outside its namespace.
var installs = []schema.GroupResource{
	{Resource: "namespaces"},
	{Group: "apiextensions.k8s.io", Resource: "customresourcedefinitions"},
	{Group: "rbac.authorization.k8s.io", Resource: "clusterroles"},
	{Group: "rbac.authorization.k8s.io", Resource: "clusterrolebindings"},
	{Group: "admissionregistration.k8s.io", Resource: "mutatingwebhookconfigurations"},
	{Group: "admissionregistration.k8s.io", Resource: "validatingwebhookconfigurations"},
	{Group: "admissionregistration.k8s.io", Resource: "validatingadmissionpolicies"},
	{Group: "admissionregistration.k8s.io", Resource: "validatingadmissionpolicybindings"},
	{Group: "scheduling.k8s.io", Resource: "priorityclasses"},
}

// permissions reports whether you may install the chart, as far as the API server tells in advance.
func (d *Doctor) permissions(ctx context.Context, _ *state) ([]Finding, error) {
	var lacking []string
	for _, of := range installs {
		review := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
			ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: "create", Group: of.Group, Resource: of.Resource},
		}}
		answer, err := d.Clientset.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
		if err != nil {
			return nil, fmt.Errorf("ask what you may do: %w", err)
		}
		if !answer.Status.Allowed {
			lacking = append(lacking, of.Resource)
		}
	}
	if len(lacking) > 0 {
		return []Finding{{"permissions", Note, "you may not create these, which the chart has: " + text.List(lacking, maxNamed), "have somebody install it who may: docs/threat-model.md"}}, nil
	}
	return []Finding{{"permissions", OK, "you may create all that the chart has outside its namespace", ""}}, nil
}
