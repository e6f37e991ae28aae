// Package events writes Events idempotently. An Event's name is a hash of its content, so neither a restart nor another
// reconciliation repeats it. The recorder of client-go would count repetitions instead.
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
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/operator/internal/text"
)

// maxMessage is the API's limit for an Event's message.
const maxMessage = 1024

// New returns an Event about an object. For a cluster-scoped object it is in the namespace default. Severity is
// corev1.EventTypeNormal or corev1.EventTypeWarning.
func New(about corev1.ObjectReference, severity, reason, message string, now time.Time) *corev1.Event {
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
		FirstTimestamp: metav1.NewTime(now), LastTimestamp: metav1.NewTime(now), Count: 1,
	}
}

// Again is New for what can happen again in the same words: since tells one time from another, as an existing Event would stay as it
// is.
func Again(about corev1.ObjectReference, severity, reason, message string, since, now time.Time) *corev1.Event {
	e := New(about, severity, reason, message, now)
	e.Name += "-" + strconv.FormatInt(since.Unix(), 16)
	return e
}

// Write creates those Events that do not exist yet. In a terminating namespace nothing happens.
func Write(ctx context.Context, c client.Writer, list ...*corev1.Event) error {
	for _, e := range list {
		err := c.Create(ctx, e)
		switch {
		case err == nil, apierrors.IsAlreadyExists(err), apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		default:
			return fmt.Errorf("write Event %s about %s %s/%s: %w", e.Reason, e.InvolvedObject.Kind, e.Namespace, e.InvolvedObject.Name, err)
		}
	}
	return nil
}
