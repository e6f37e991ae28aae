// Package defaults applies the NetworkProfile of an installation. Helm cannot create it in the same step as its CRD.
// The controller can, as soon as the API server serves the kind.
package defaults

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/yaml"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/kube/events"
	"evenkeel.dev/evenkeel/operator/internal/text"
)

const (
	fieldOwner = client.FieldOwner("evenkeel-default-profile")
	// eventInvalid is the reason of the Event about a profile that is invalid.
	eventInvalid = "EvenkeelDefaultProfileInvalid"
	maxMessage   = 1024
)

// Reasons of the condition DefaultApplied.
const (
	reasonApplied = "Applied"
	reasonInvalid = "Invalid"
)

// Profile applies one NetworkProfile while this replica is the leader.
type Profile struct {
	object *unstructured.Unstructured
	// problem is what is wrong with the file.
	problem error
	client  client.Client
	// retry starts with a short interval, for the first seconds of an installation.
	retry wait.Backoff
}

// Load reads the profile in the file. A file that has no valid profile is no error here: Start reports it.
func Load(file string, c client.Client) (*Profile, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("default profile: %w", err)
	}
	p := &Profile{
		object: &unstructured.Unstructured{},
		client: c,
		retry:  wait.Backoff{Duration: 500 * time.Millisecond, Factor: 1.5, Jitter: 0.1, Steps: 12, Cap: 30 * time.Second},
	}
	// The file's content is applied as it is. A typed object would add fields.
	if err := yaml.Unmarshal(content, &p.object.Object); err != nil {
		p.problem = fmt.Errorf("%s: %w", file, err)
	} else if err := check(content); err != nil {
		p.problem = fmt.Errorf("%s: %w", file, err)
	}
	return p, nil
}

// check is an error if the content is not a NetworkProfile, or has a field that NetworkProfile does not have.
func check(content []byte) error {
	profile := &evenkeel.NetworkProfile{}
	if err := yaml.UnmarshalStrict(content, profile); err != nil {
		return err
	}
	if kind := evenkeel.GroupVersion.WithKind("NetworkProfile"); profile.GroupVersionKind() != kind {
		return fmt.Errorf("apiVersion %q, kind %q; want %q, %q", profile.APIVersion, profile.Kind, evenkeel.GroupVersion, kind.Kind)
	}
	if profile.Name == "" {
		return errors.New("metadata.name is missing")
	}
	return nil
}

// NeedLeaderElection keeps an old and a new version from overwriting each other during a rollout.
func (*Profile) NeedLeaderElection() bool { return true }

// Start applies the profile and returns. It waits for the API server to serve the kind. A profile that is invalid is a
// condition and an Event, and does not end the controller, which everything else depends on. It is applied again from
// time to time: a later version of the CRD may accept it.
func (p *Profile) Start(ctx context.Context) error {
	logger := log.FromContext(ctx).WithValues("profile", p.object.GetName())
	backoff := p.retry
	for {
		generation, err := p.apply(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			if err = p.report(ctx, generation, metav1.ConditionTrue, reasonApplied, "the profile is as the chart's values have it"); err == nil {
				logger.Info("applied the default profile")
				return nil
			}
		case p.problem != nil, apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
			logger.Error(err, "the default profile is invalid")
			err = p.report(ctx, generation, metav1.ConditionFalse, reasonInvalid, "the profile of the chart's values is invalid and was not applied: "+err.Error())
			if err == nil && p.problem != nil {
				return nil // the file does not change while this process lives
			}
		}
		if err != nil {
			logger.Info("cannot apply the default profile yet", "reason", err.Error())
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(backoff.Step()):
		}
	}
}

// apply applies the profile. It returns the generation of the one that there is then, also if it was not applied, or 0
// if there is none.
func (p *Profile) apply(ctx context.Context) (generation int64, err error) {
	applied := p.object.DeepCopy()
	if err = p.problem; err == nil {
		if err = p.client.Apply(ctx, client.ApplyConfigurationFromUnstructured(applied), fieldOwner, client.ForceOwnership); err == nil {
			return applied.GetGeneration(), nil
		}
	}
	existing := &evenkeel.NetworkProfile{}
	if gone := p.client.Get(ctx, client.ObjectKey{Name: p.object.GetName()}, existing); gone != nil {
		return 0, err
	}
	return existing.Generation, err
}

// report writes the condition of the profile of this name, if there is one, and an Event if something is wrong.
func (p *Profile) report(ctx context.Context, generation int64, status metav1.ConditionStatus, reason, message string) error {
	name := p.object.GetName()
	if name == "" {
		return nil // it is logged
	}
	now := metav1.Now()
	if status != metav1.ConditionTrue {
		about := corev1.ObjectReference{APIVersion: evenkeel.GroupVersion.String(), Kind: "NetworkProfile", Name: name}
		if err := events.Write(ctx, p.client, events.New(about, corev1.EventTypeWarning, eventInvalid, message, now.Time)); err != nil {
			return err
		}
	}
	condition, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&metav1.Condition{
		Type: evenkeel.ConditionDefaultApplied, Status: status, Reason: reason, Message: text.Clip(message, maxMessage), LastTransitionTime: now, ObservedGeneration: generation,
	})
	if err != nil {
		return err
	}
	object := &unstructured.Unstructured{Object: map[string]any{"status": map[string]any{"conditions": []any{condition}}}}
	object.SetGroupVersionKind(evenkeel.GroupVersion.WithKind("NetworkProfile"))
	object.SetName(name)
	err = p.client.Status().Apply(ctx, client.ApplyConfigurationFromUnstructured(object), fieldOwner, client.ForceOwnership)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("write the condition of NetworkProfile %s: %w", name, err)
	}
	return nil
}
