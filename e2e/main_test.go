//go:build e2e

// Package e2e tests Evenkeel on a real cluster: real kubelets and containers, the real training-operator and
// mpi-operator, the chart as users install it.
package e2e

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"testing"
	"time"

	"evenkeel.dev/evenkeel/hack/cluster/local"
	"evenkeel.dev/evenkeel/hack/env"
)

// cluster is shared by all tests of this package.
var cluster *env.Cluster

// withKueue installs Kueue too, withKinds the controllers of further kinds of jobs, and withTorch makes the image with
// PyTorch. Tests with build tags of their own set them.
var withKueue, withKinds, withTorch bool

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	const name = "e2e"
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := local.Down(ctx, name); err != nil {
			fmt.Fprintln(os.Stderr, "e2e: take the cluster down:", err)
		}
	}()
	var err error
	cluster, err = env.Start(ctx, env.Config{
		Progress: os.Stderr, MPIOperator: true, Kueue: withKueue, Kinds: withKinds, Torch: withTorch,
		// The links are slow, so that they are the limit and not the processors.
		Cluster: local.Config{Name: name, Nodes: 4, LinkRate: "400mbit", Progress: os.Stderr},
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		return 1
	}
	return m.Run()
}
