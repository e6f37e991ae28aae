//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"evenkeel.dev/evenkeel/e2e/setup"
)

// The file's name puts these last: the second one takes Evenkeel away from the cluster.

func TestChartUpgradeKeepsWorking(t *testing.T) {
	ctx, ns := testContext(t), newNamespace(t)
	if err := env.InstallChart(ctx, "--set", "webhook.replicas=1", "--set", "defaultProfile.spec.transport.tcp.flowsPerPeer=2"); err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, "the new controller leads and has applied the new default profile", func(ctx context.Context) (bool, error) {
		flows, err := env.Kubectl(ctx, "get", "networkprofile", "default", "-o", "jsonpath={.spec.transport.tcp.flowsPerPeer}")
		return flows == "2", err
	})
	trainingJob{profile: "default", script: "exit 0"}.create(ctx, t, ns)
	waitJob(ctx, t, ns, "Succeeded")
	if got := variable(pod(ctx, t, ns, "train-master-0"), "EVENKEEL_FLOWS"); got != "2" {
		t.Errorf("EVENKEEL_FLOWS is %q after the upgrade, want 2", got)
	}
}

func TestChartUninstallLeavesNothing(t *testing.T) {
	ctx := testContext(t)
	if _, err := env.Helm(ctx, "uninstall", setup.Release, "--namespace", setup.Namespace, "--wait", "--timeout", "2m"); err != nil {
		t.Fatal(err)
	}
	kinds, err := env.Kubectl(ctx, "api-resources", "--verbs=list", "-o", "name")
	if err != nil {
		t.Fatal(err)
	}
	// Helm waits for what it made, not for what that made: pods take a moment to end.
	var left []string
	defer func() {
		if t.Failed() {
			t.Log("left behind:", left)
		}
	}()
	eventually(ctx, t, "nothing of Evenkeel is left but its namespace", func(ctx context.Context) (bool, error) {
		left = nil
		for kind := range strings.FieldsSeq(kinds) {
			if strings.HasPrefix(kind, "events") || kind == "componentstatuses" {
				continue // events expire by themselves
			}
			out, err := env.Kubectl(ctx, "get", kind, "-A", "-o", "name", "--ignore-not-found")
			if err != nil {
				return false, fmt.Errorf("list %s: %w", kind, err)
			}
			for name := range strings.FieldsSeq(out) {
				if strings.Contains(name, "evenkeel") && name != "namespace/"+setup.Namespace {
					left = append(left, name)
				}
			}
		}
		return len(left) == 0, nil
	})
}
