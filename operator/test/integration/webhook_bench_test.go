package integration

import (
	"context"
	"strconv"
	"strings"
	"testing"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// BenchmarkWebhook measures how long the webhook takes for a pod of an annotated job, by the program's own histogram.
func BenchmarkWebhook(b *testing.B) {
	config := rest.CopyConfig(config)
	config.QPS = -1
	c, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		b.Fatal(err)
	}
	// answered counts the requests by the bound of their latency, seconds; +Inf: all.
	answered := func() map[string]float64 {
		served, err := install.webhook.scrape()
		if err != nil {
			b.Fatal(err)
		}
		counts := map[string]float64{}
		for _, line := range served["controller_runtime_webhook_latency_seconds_bucket"] {
			labels, value, _ := strings.Cut(line, "} ")
			_, bound, _ := strings.Cut(labels, `le="`)
			bound, _, _ = strings.Cut(bound, `"`)
			count, err := strconv.ParseFloat(value, 64)
			if err != nil {
				b.Fatal(err)
			}
			counts[bound] += count
		}
		return counts
	}
	before := answered()
	b.ResetTimer()
	b.RunParallel(func(next *testing.PB) {
		for next.Next() {
			if err := c.Create(context.Background(), labelledPod("default"), client.DryRunAll); err != nil {
				b.Error(err)
				return
			}
		}
	})
	b.StopTimer()
	after := answered()
	all := after["+Inf"] - before["+Inf"]
	if all < float64(b.N) {
		b.Fatalf("the webhook answered %g of %d requests", all, b.N)
	}
	const bound = "0.01"
	b.ReportMetric(100*(after[bound]-before[bound])/all, "%-within-"+bound+"s")
}
