// Package defaults applies the NetworkProfile of an installation. Helm cannot create it in the same step as its CRD. The
// controller can, as soon as the API server serves the kind.
package defaults

import (
	"context"
	"fmt"
	"os"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/yaml"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

const fieldOwner = client.FieldOwner("evenkeel-default-profile")

// Profile applies one NetworkProfile while this replica is the leader.
type Profile struct {
	object *unstructured.Unstructured
	client client.Client
	// retry starts with a short interval, for the first seconds of an installation.
	retry wait.Backoff
}

// Load reads the profile in the file. A field that NetworkProfile does not have is an error.
func Load(file string, c client.Client) (*Profile, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("default profile: %w", err)
	}
	profile := &evenkeel.NetworkProfile{}
	if err := yaml.UnmarshalStrict(text, profile); err != nil {
		return nil, fmt.Errorf("default profile %s: %w", file, err)
	}
	if kind := evenkeel.GroupVersion.WithKind("NetworkProfile"); profile.GroupVersionKind() != kind {
		return nil, fmt.Errorf("default profile %s: apiVersion %q, kind %q; want %q, %q", file, profile.APIVersion, profile.Kind, evenkeel.GroupVersion, kind.Kind)
	}
	if profile.Name == "" {
		return nil, fmt.Errorf("default profile %s: metadata.name is missing", file)
	}
	// The file's content is applied as it is. A typed object would add fields.
	object := &unstructured.Unstructured{}
	if err := yaml.Unmarshal(text, &object.Object); err != nil {
		return nil, fmt.Errorf("default profile %s: %w", file, err)
	}
	return &Profile{
		object: object,
		client: c,
		retry:  wait.Backoff{Duration: 500 * time.Millisecond, Factor: 1.5, Jitter: 0.1, Steps: 12, Cap: 30 * time.Second},
	}, nil
}

// NeedLeaderElection keeps an old and a new version from overwriting each other during a rollout.
func (*Profile) NeedLeaderElection() bool { return true }

// Start applies the profile and returns. It waits for the API server to serve the kind; a profile that the API server
// refuses is an error.
func (p *Profile) Start(ctx context.Context) error {
	logger := log.FromContext(ctx).WithValues("profile", p.object.GetName())
	backoff := p.retry
	for {
		err := p.client.Apply(ctx, client.ApplyConfigurationFromUnstructured(p.object.DeepCopy()), fieldOwner, client.ForceOwnership)
		switch {
		case err == nil:
			logger.Info("applied the default profile")
			return nil
		case ctx.Err() != nil:
			return nil
		case apierrors.IsInvalid(err), apierrors.IsBadRequest(err): // another attempt would fail alike
			return fmt.Errorf("default profile %s: %w", p.object.GetName(), err)
		}
		logger.Info("cannot apply the default profile yet", "reason", err.Error())
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(backoff.Step()):
		}
	}
}
