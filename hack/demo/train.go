package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/hack/env"
)

// weightTolerance is how far a weight of 64 bits may be from that of one process: sums of gradients are rounded in
// another order.
const weightTolerance = 1e-6

// chartRows is the number of rows of the chart of losses, and chartColumns the width of its longest bar.
const chartRows, chartColumns = 20, 50

// train runs the job that trains, and prints its part of the page.
func train(ctx context.Context, cluster *env.Cluster, out, progress io.Writer) error {
	if err := ensureNamespace(ctx, cluster); err != nil {
		return err
	}
	script := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "train"}, Data: map[string]string{"train.py": trainScript}}
	if err := cluster.Client.Delete(ctx, script.DeepCopy()); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete the script of an earlier demo: %w", err)
	}
	if err := cluster.Client.Create(ctx, script); err != nil {
		return fmt.Errorf("create the script: %w", err)
	}
	result, err := runJob(ctx, cluster, strings.ReplaceAll(trainManifest, "PYTORCH_IMAGE", cluster.Images.PyTorch), progress)
	if err != nil {
		return err
	}
	return trainPage(out, result)
}

// A training is what the master's log says about its training.
type training struct {
	losses     []float64
	difference float64
	// facts are the lines about the whole.
	facts []string
	// devices are what the master's connections carried, by device.
	devices map[string]*deviceTraffic
}

var (
	lossLine       = regexp.MustCompile(`(?m)^step \d+ loss (\d+\.\d+)$`)
	differenceLine = regexp.MustCompile(`(?m)^largest difference of a weight from one process (\S+)$`)
)

// parseTraining reads the master's log, and returns an error unless the loss fell and the weights are those of one
// process.
func parseTraining(logs string) (*training, error) {
	var t training
	for _, m := range lossLine.FindAllStringSubmatch(logs, -1) {
		loss, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			return nil, fmt.Errorf("loss %q: %w", m[1], err)
		}
		t.losses = append(t.losses, loss)
	}
	difference := differenceLine.FindStringSubmatch(logs)
	if len(t.losses) < chartRows || difference == nil {
		return nil, errors.New("the log has no losses, or no comparison with one process")
	}
	var err error
	if t.difference, err = strconv.ParseFloat(difference[1], 64); err != nil {
		return nil, fmt.Errorf("difference of weights %q: %w", difference[1], err)
	}
	if first, last := t.losses[0], mean(t.losses[len(t.losses)-5:]); last > first/2 {
		return nil, fmt.Errorf("the loss did not fall by half: %.4f at first, %.4f at last", first, last)
	}
	if !(t.difference <= weightTolerance) { // also where it is not a number
		return nil, fmt.Errorf("a weight differs by %g from that of one process: at most %g", t.difference, weightTolerance)
	}
	t.facts = grep(logs, "torch ", "trained ", "accuracy ", "largest difference")
	if t.devices, err = parseTraffic(logs); err != nil {
		return nil, err
	}
	carried := false
	for _, of := range t.devices {
		carried = carried || of.sent > 0 && of.received > 0
	}
	if len(grep(logs, "backend evenkeel")) == 0 || !carried {
		return nil, errors.New("the log does not show that backend evenkeel carried it")
	}
	return &t, nil
}

// trainPage prints the loss of the training, and what the network carried.
func trainPage(out io.Writer, result *jobResult) error {
	t, err := parseTraining(result.master.logs)
	if err != nil {
		return fmt.Errorf("the job that trains succeeded, but %w:\n%s", err, result.master.logs)
	}
	injected, err := injection(result)
	if err != nil {
		return err
	}
	p := func(format string, args ...any) { fmt.Fprintf(out, format, args...) }
	p("\n%s\n", rule("Training with PyTorch"))
	p("PyTorchJob %s/%s succeeded: master on node %s, worker on node %s.\n", namespace, result.written.GetName(), result.master.pod.Spec.NodeName, result.worker.pod.Spec.NodeName)
	p("The image is Debian's PyTorch. Backend evenkeel came with the annotation.\n\n%s", injected)
	p("\n%s\n", strings.Join(t.facts, "\n"))
	p("\nLoss\n%s", lossChart(t.losses))
	p("\nWhat the master's connections carried\n%s\n", strings.Join(trafficLines(t.devices), "\n"))
	return nil
}

// lossChart draws a bar for every few steps, with their mean loss.
func lossChart(losses []float64) string {
	every := (len(losses) + chartRows - 1) / chartRows
	var rows []float64
	greatest := 0.0
	for first := 0; first < len(losses); first += every {
		m := mean(losses[first:min(first+every, len(losses))])
		rows, greatest = append(rows, m), max(greatest, m)
	}
	var chart strings.Builder
	for i, loss := range rows {
		last := min((i+1)*every, len(losses)) - 1
		bar := strings.Repeat("#", int(loss/greatest*chartColumns+0.5))
		fmt.Fprintf(&chart, "  steps %3d-%-3d %7.4f %s\n", i*every, last, loss, bar)
	}
	return chart.String()
}

func mean(values []float64) float64 {
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	return sum / float64(len(values))
}
