package preflight

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	bridge "evenkeel.dev/evenkeel/operator/internal/controller/nvsentinel"
	"evenkeel.dev/evenkeel/operator/internal/nvsentinel"
	"evenkeel.dev/evenkeel/operator/test/apiserver"
	"evenkeel.dev/evenkeel/operator/test/nvsentineltest"
)

// startBridge runs the bridge to NVSentinel, with the permissions of its own account.
func startBridge(t *testing.T, target string) (stop func()) {
	t.Helper()
	skip := true
	mgr, err := ctrl.NewManager(apiserver.As(config, namespace, "evenkeel-nvsentinel"), ctrl.Options{
		Scheme: scheme, Metrics: metricsserver.Options{BindAddress: "0"}, HealthProbeBindAddress: "0",
		Cache: cache.Options{ReaderFailOnMissingInformer: true}, Controller: ctrlconfig.Controller{SkipNameValidation: &skip},
	})
	if err != nil {
		t.Fatal(err)
	}
	b := &bridge.Bridge{Connector: nvsentinel.Connector{Target: target}, Strategy: nvsentinel.Store, Clock: &clock{}}
	if err := b.SetupWithManager(mgr); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- mgr.Start(ctx) }()
	var stopped atomic.Bool
	stop = func() {
		if stopped.Swap(true) {
			return
		}
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("the bridge ended with %v", err)
			}
		case <-time.After(waitTimeout):
			t.Error("the bridge does not end")
		}
	}
	t.Cleanup(stop)
	return stop
}

// NVSentinel is told of a node that a real check failed, with what was measured and with whom, and when a later check clears it. What
// it refuses is sent again, and a new process repeats nothing.
func TestNVSentinelIsToldOfFailedAndClearedNodes(t *testing.T) {
	var repaired atomic.Bool
	f := newFleet(t, func(nodes []string) ending {
		if repaired.Load() {
			return links(nil)(nodes)
		}
		return links(map[string]float64{"sentinel-1": 0.1})(nodes)
	})
	start(t, f, &clock{}, &clock{})
	server, target := nvsentineltest.Start(t)
	server.Refuse(codes.Unavailable, "the database is away")
	stop := startBridge(t, target)
	newNodes(t, "sentinel", 4)
	newPolicy(t, "sentinel", nil)
	carries(t, "sentinel-1", "False TooSlow|unhealthy|")
	eventually(t, "the fault was refused", func(context.Context) (bool, error) { return server.Refused() > 0, nil })
	server.Refuse(codes.OK, "")
	calls := func(count int) []nvsentineltest.Call {
		t.Helper()
		eventually(t, "NVSentinel was told", func(context.Context) (bool, error) { return len(server.Calls()) >= count, nil })
		return server.Calls()
	}
	first := calls(1)[0]
	fault := first.Events[0]
	if len(first.Events) != 1 || fault.NodeName != "sentinel-1" || fault.IsHealthy || !fault.IsFatal || fault.RecommendedAction != "CONTACT_SUPPORT" || fault.ProcessingStrategy != "STORE_ONLY" {
		t.Errorf("%+v", first.Events)
	}
	for _, evidence := range []string{"TooSlow: with sentinel-", "0.1 GB/s, minimum "} {
		if !strings.Contains(fault.Message, evidence) {
			t.Errorf("the event lacks %q: %q", evidence, fault.Message)
		}
	}
	if fault.Metadata["evenkeel.busBandwidthBytesPerSecond"] != "100000000" || !strings.HasPrefix(fault.Metadata["evenkeel.check"], "sentinel-") {
		t.Errorf("%v", fault.Metadata)
	}

	// A process that begins anew looks at every node.
	eventually(t, "it is remembered", func(ctx context.Context) (bool, error) {
		state := &evenkeel.NodeNetworkHealth{}
		err := admin.Get(ctx, client.ObjectKey{Name: "sentinel-1"}, state)
		return state.Annotations[bridge.ToldKey] != "", err
	})
	stop()
	startBridge(t, target)
	repaired.Store(true)
	newCheck(t, "sentinel", nil)
	carries(t, "sentinel-1", "True Proven|healthy|")
	all := calls(2)
	cleared := all[1].Events[0]
	if len(all) != 2 || cleared.NodeName != "sentinel-1" || !cleared.IsHealthy || cleared.IsFatal || cleared.CheckName != fault.CheckName {
		t.Fatalf("%+v", all)
	}
	if !strings.Contains(cleared.Message, "with sentinel-") || !strings.Contains(cleared.Message, "1 GB/s") || len(cleared.ErrorCode) > 0 {
		t.Errorf("%+v", cleared)
	}
	if first.Key == "" || all[1].Key == first.Key {
		t.Errorf("keys %q and %q", first.Key, all[1].Key)
	}
}
