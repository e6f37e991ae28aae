// Package events writes Events idempotently. An Event's name is a hash of its content, so neither a restart nor another
// reconciliation repeats it. What happens again later is counted, by the time that it is said to have happened. The recorder of
// client-go forgets with the process what it has written.
package events

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/operator/internal/text"
)

const (
	// maxMessage is the API's limit for an Event's message.
	maxMessage = 1024
	// countInterval bounds how often one Event is counted, whatever its number of pods.
	countInterval = time.Minute
	// writeTimeout bounds the time of one Event. Clusters may keep Events in a storage of their own, and what they tell of goes on when
	// that is down.
	writeTimeout = 10 * time.Second
)

// New returns an Event about an object, of something that happened at a time. For a cluster-scoped object it is in the namespace default. Severity is
// corev1.EventTypeNormal or corev1.EventTypeWarning.
func New(about corev1.ObjectReference, severity, reason, message string, at time.Time) *corev1.Event {
	message = text.Clip(message, maxMessage)
	namespace := about.Namespace
	if namespace == "" {
		namespace = metav1.NamespaceDefault
	}
	sum := sha256.Sum256([]byte(string(about.UID) + reason + message))
	return &corev1.Event{
		// An object's name may be as long as an Event's, so it is cut to leave room for the hash.
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: strings.TrimRight(about.Name[:min(len(about.Name), 200)], "-.") + ".evenkeel-" + hex.EncodeToString(sum[:8]),
		},
		InvolvedObject: about,
		Type:           severity, Reason: reason, Message: message,
		Source:         corev1.EventSource{Component: "evenkeel"},
		FirstTimestamp: metav1.NewTime(at), LastTimestamp: metav1.NewTime(at), Count: 1,
	}
}

// Again is New for what has an Event of its own each time, in the same words: since tells one time from another.
func Again(about corev1.ObjectReference, severity, reason, message string, since, now time.Time) *corev1.Event {
	e := New(about, severity, reason, message, now)
	e.Name += "-" + strconv.FormatInt(since.Unix(), 16)
	return e
}

// Once is New for what is said in other words each time, such as with figures: events of one key are the same.
func Once(about corev1.ObjectReference, severity, reason, message, key string, at time.Time) *corev1.Event {
	e := New(about, severity, reason, key, at)
	e.Message = text.Clip(message, maxMessage)
	return e
}

// Write creates the Events, and counts those that exist already and have happened again since. In a terminating namespace nothing
// happens.
func Write(ctx context.Context, c client.Writer, list ...*corev1.Event) error {
	for _, e := range list {
		err := writeOne(ctx, c, e)
		if err != nil && !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			return fmt.Errorf("write Event %s about %s %s/%s: %w", e.Reason, e.InvolvedObject.Kind, e.Namespace, e.InvolvedObject.Name, err)
		}
	}
	return nil
}

func writeOne(ctx context.Context, c client.Writer, e *corev1.Event) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	err := c.Create(ctx, e)
	if apierrors.IsAlreadyExists(err) {
		err = countAgain(ctx, c, e)
	}
	return err
}

// countAgain counts an Event that exists, unless it was counted within the interval or has expired meanwhile.
func countAgain(ctx context.Context, c client.Writer, e *corev1.Event) error {
	existing := &corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: e.Namespace, Name: e.Name}}
	// A patch of nothing reads the Event, without the permission to read all others. The API server writes nothing then.
	if err := c.Patch(ctx, existing, client.RawPatch(types.MergePatchType, []byte("{}"))); err != nil {
		return client.IgnoreNotFound(err)
	}
	if e.LastTimestamp.Sub(existing.LastTimestamp.Time) < countInterval {
		return nil
	}
	before := existing.DeepCopy()
	existing.Count, existing.LastTimestamp = existing.Count+1, e.LastTimestamp
	err := c.Patch(ctx, existing, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	if apierrors.IsConflict(err) {
		return nil // somebody else has counted it
	}
	return client.IgnoreNotFound(err)
}
