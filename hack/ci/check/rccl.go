package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	rcclLab "evenkeel.dev/evenkeel/hack/lab/rccl"
)

// rccl runs RCCL over the plugin. If the machine cannot have it, that counts as one skipped test.
func rccl(ctx context.Context, root string) (counts, error) {
	lab, err := rcclLab.New(ctx, os.Stderr)
	if missing := (rcclLab.Missing{}); errors.As(err, &missing) {
		fmt.Printf("skipped: no RCCL on this machine: %s\n", missing.What)
		return counts{skipped: 1}, nil
	}
	if err != nil {
		return counts{}, err
	}
	if err := lab.Close(); err != nil {
		return counts{}, err
	}
	return goTest(ctx, root, nil, "-tags", "e2e", "-timeout", "10m", "./hack/lab/rccl/...")
}
