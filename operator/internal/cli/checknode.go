package cli

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// answerTimeout bounds the requests of `check node`. It ends before its callers lose patience: node-problem-detector
// after 5 s, and Slurm with a prolog after 10 s, by default.
const answerTimeout = 4 * time.Second

// nodeAnswer is whether a node's network is proven, and why or why not, in one line. It is an error so that what is
// wrong with the command line is an answer too: the programs that call this take every status that they do not expect
// for a broken node.
type nodeAnswer struct {
	status int
	line   string
}

func (a nodeAnswer) Error() string { return a.line }

func newAnswer(status int, line string) nodeAnswer {
	return nodeAnswer{status, strings.Join(strings.Fields(line), " ")}
}

func unknownNode(why string) nodeAnswer { return newAnswer(ExitNodeUnknown, "unknown: "+why) }

func checkNodeCommand(c *connection) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "node [NODE]",
		Short: "Whether a node's network is proven, in one line, for other programs",
		Long: `Whether a node's network is proven: one line with what was measured, with which nodes and when, or with what is missing. It reads the
node's condition, and runs no check. The exit status is

  0  proven: the node passed a check, not too long ago
  1  failed: a check failed the node, and jobs avoid it
  2  unknown: neither, or there is no answer: no such node, no policy, no cluster, a wrong command line

Slurm's Prolog and HealthCheckProgram and node-problem-detector's custom plugins can call it. Without NODE it is the one that the
environment variable NODE_NAME names, else the one with the host's name. It sends two requests, and takes four seconds at most.`,
		Example: `  kubectl evenkeel check node gpu-17
  kubectl evenkeel check node           # the node that this runs on`,
		Args: func(cmd *cobra.Command, args []string) error {
			if err := cobra.MaximumNArgs(1)(cmd, args); err != nil {
				return unknownNode(err.Error())
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			name, err := thisNode()
			if len(args) > 0 {
				name, err = args[0], nil
			}
			if err != nil {
				return unknownNode(err.Error())
			}
			cluster, err := c.clientOf(nodeKinds())
			if err != nil {
				return unknownNode(err.Error())
			}
			return answerNode(cmd.Context(), cluster, name)
		},
	}
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return unknownNode(err.Error()) })
	return cmd
}

// thisNode is the name of the node that this runs on.
func thisNode() (string, error) {
	if name := os.Getenv("NODE_NAME"); name != "" {
		return name, nil
	}
	name, err := os.Hostname()
	return strings.ToLower(name), err // as the kubelet does
}

// nodeKinds are the kinds that an answer needs. Every node may ask every minute: a client that asks for the cluster's
// kinds first would send three times as many requests.
func nodeKinds() meta.RESTMapper {
	mapper := meta.NewDefaultRESTMapper(nil)
	mapper.Add(corev1.SchemeGroupVersion.WithKind("Node"), meta.RESTScopeRoot)
	mapper.Add(evenkeel.GroupVersion.WithKind("NodeNetworkHealth"), meta.RESTScopeRoot)
	return mapper
}

// answerNode answers by the node's condition. A node that failed and has no label, as too many others failed too, is
// unknown: jobs do not avoid it either, and whoever drains nodes by this answer would drain the cluster.
func answerNode(ctx context.Context, cluster client.Reader, name string) nodeAnswer {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	node := &corev1.Node{}
	err := cluster.Get(ctx, client.ObjectKey{Name: name}, node)
	switch {
	case apierrors.IsNotFound(err):
		return unknownNode(fmt.Sprintf("no node is named %q", name))
	case err != nil:
		return unknownNode(fmt.Sprintf("cannot read node %s: %v", name, explainError(err)))
	}
	at := slices.IndexFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == evenkeel.ConditionNodeHealthy })
	if at < 0 {
		return unknownNode(fmt.Sprintf("node %s has no condition %s, as no NetworkCheckPolicy selects it", name, evenkeel.ConditionNodeHealthy))
	}
	condition := &node.Status.Conditions[at]
	switch {
	case condition.Status == corev1.ConditionTrue:
		return newAnswer(ExitNodeProven, "proven"+measuredAt(ctx, cluster, node, evenkeel.HealthHealthy)+": "+condition.Message)
	case condition.Status == corev1.ConditionFalse && node.Labels[evenkeel.HealthKey] == evenkeel.UnhealthyValue:
		return newAnswer(ExitNodeFailed, "failed"+measuredAt(ctx, cluster, node, evenkeel.HealthUnhealthy)+": "+condition.Reason+": "+condition.Message)
	}
	return unknownNode(condition.Reason + ": " + condition.Message)
}

// measuredAt reports when, and in which check, the node was found to be in that health. It is empty where the account
// may not read that, as a kubelet's: the answer is worth giving without.
func measuredAt(ctx context.Context, cluster client.Reader, node *corev1.Node, health evenkeel.Health) string {
	state := &evenkeel.NodeNetworkHealth{}
	if err := cluster.Get(ctx, client.ObjectKey{Name: node.Name}, state); err != nil || state.Status.Health != health {
		return ""
	}
	// The object may describe an earlier node of the same name.
	if len(state.OwnerReferences) == 0 || state.OwnerReferences[0].UID != node.UID {
		return ""
	}
	deciding := (&nodeFacts{health: &state.Status}).deciding()
	if deciding == nil {
		return ""
	}
	return fmt.Sprintf(" at %s in check %s", deciding.Time.UTC().Format(time.RFC3339), deciding.Check)
}
