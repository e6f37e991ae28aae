package preflight

import (
	"context"
	"fmt"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/preflight"
	"evenkeel.dev/evenkeel/operator/internal/preflight/pairing"
	"evenkeel.dev/evenkeel/operator/internal/preflight/report"
)

// Each of 5,000 nodes with a long name fails with all that a log may say: several MiB.
func TestReportOfThousandsOfNodesFitsAPIServer(t *testing.T) {
	owner := newCheck(t, "large-report", func(s *evenkeel.NetworkCheckSpec) { s.Nodes.Selector.MatchLabels["pool"] = "none" })
	yes := true
	about := metav1.ObjectMeta{
		Namespace: namespace, Name: "large-report", Labels: map[string]string{evenkeel.CheckKey: owner.Name},
		OwnerReferences: []metav1.OwnerReference{{APIVersion: evenkeel.GroupVersion.String(), Kind: "NetworkCheck", Name: owner.Name, UID: owner.UID, Controller: &yes}},
	}
	record := &preflight.Record{Started: time.Now().UTC().Truncate(time.Second), Launcher: evenkeel.LauncherIndexedJob}
	for i := range 5000 {
		record.Nodes = append(record.Nodes, preflight.Node{Name: fmt.Sprintf("ip-10-%d-%d-17.eu-central-1.compute.internal", i/250, i%250), Pool: "NVIDIA-H100-80GB-HBM3", RDMA: true})
	}
	t.Cleanup(func() {
		if err := admin.DeleteAllOf(context.Background(), &corev1.ConfigMap{}, client.InNamespace(namespace), client.MatchingLabels{evenkeel.CheckKey: owner.Name}); err != nil {
			t.Error(err)
		}
	})
	r, err := report.Create(t.Context(), admin, admin, about, record)
	if err != nil {
		t.Fatal(err)
	}
	options := preflight.Options{Stages: []evenkeel.Stage{evenkeel.StageLocal, evenkeel.StagePairs}, Network: "Evenkeel"}
	for {
		d := preflight.Decide(options, record)
		if len(d.Pending) == 0 {
			break
		}
		for i, w := range d.Pending {
			m := preflight.Measurement{Outcome: pairing.Broken, Detail: strings.Repeat("the cause ", 30)}
			if w.Stage == evenkeel.StageLocal && w.Index%2 == 0 {
				m = preflight.Measurement{Outcome: pairing.Measured, BusBW: 46.123456789}
			}
			record.Add(w, m)
			if i%256 == 255 || i == len(d.Pending)-1 {
				if err := r.Save(t.Context(), admin); err != nil {
					t.Fatal(err)
				}
			}
		}
		if d.Round > 3 {
			break // enough
		}
	}
	record.Finished = record.Started
	r.Markdown, r.Pairs = "report", "pairs"
	if err := r.Finish(t.Context(), admin); err != nil {
		t.Fatal(err)
	}
	back, err := report.Read(t.Context(), admin, namespace, about.Name)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(back.Record, record) || back.Markdown != "report" || back.Pairs != "pairs" {
		t.Errorf("it was read with %d nodes and %d runs, and written with %d and %d", len(back.Record.Nodes), len(back.Record.Runs), len(record.Nodes), len(record.Runs))
	}
	// What an earlier attempt left is no part of a report.
	if err := admin.Delete(t.Context(), &corev1.ConfigMap{ObjectMeta: about}); err != nil {
		t.Fatal(err)
	}
	again := &preflight.Record{Started: record.Started, Nodes: record.Nodes[:3]}
	if r, err = report.Create(t.Context(), admin, admin, about, again); err != nil {
		t.Fatal(err)
	}
	again.Runs = record.Runs[:2]
	if err := r.Save(t.Context(), admin); err != nil {
		t.Fatal(err)
	}
	if back, err = report.Read(t.Context(), admin, namespace, about.Name); err != nil || !reflect.DeepEqual(back.Record, again) {
		t.Errorf("%v, %+v", err, back)
	}
}

// failing makes writes of ConfigMaps fail with the error that it returns, if any.
func failing(with func(client.Object) error) func(*ctrl.Options) {
	return func(o *ctrl.Options) {
		o.NewClient = func(config *rest.Config, options client.Options) (client.Client, error) {
			c, err := client.NewWithWatch(config, options)
			if err != nil {
				return nil, err
			}
			refused := func(o client.Object) error {
				if _, is := o.(*corev1.ConfigMap); is {
					return with(o)
				}
				return nil
			}
			return interceptor.NewClient(c, interceptor.Funcs{
				Create: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.CreateOption) error {
					if err := refused(o); err != nil {
						return err
					}
					return c.Create(ctx, o, opts...)
				},
				Update: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.UpdateOption) error {
					if err := refused(o); err != nil {
						return err
					}
					return c.Update(ctx, o, opts...)
				},
			}), nil
		}
	}
}

func completeReason(c *evenkeel.NetworkCheck) string {
	if complete := meta.FindStatusCondition(c.Status.Conditions, evenkeel.ConditionComplete); complete != nil {
		return complete.Reason
	}
	return ""
}

func TestCheckConcludesWithoutItsReport(t *testing.T) {
	for name, test := range map[string]struct {
		err    error
		late   bool // the check ends by its timeout
		passed int32
	}{
		"toolarge": {apierrors.NewRequestEntityTooLargeError("limit is 3145728"), false, 0},
		"nospace":  {apierrors.NewInternalError(fmt.Errorf("etcdserver: mvcc: database space exceeded")), true, 0},
	} {
		t.Run(name, func(t *testing.T) {
			pool := "unwritten-" + name
			var full atomic.Bool
			f := newFleet(t, func(nodes []string) ending {
				full.Store(true)
				return links(nil)(nodes)
			})
			clock := &clock{}
			start(t, f, clock, clock, failing(func(client.Object) error {
				if full.Load() {
					return test.err
				}
				return nil
			}))
			newNodes(t, pool, 4)
			c := newCheck(t, pool, func(s *evenkeel.NetworkCheckSpec) { s.Stages = []evenkeel.Stage{"Pairs"} })
			if test.late {
				eventually(t, "a run has ended", func(context.Context) (bool, error) { return full.Load(), nil })
				clock.advance(time.Hour + 2*time.Minute)
			}
			c = ended(t, c)
			if completeReason(c) != "ReportNotWritten" || c.Status.Verdict == "" || len(found(c, "Fail")) > 0 {
				t.Errorf("%+v", c.Status)
			}
		})
	}
}

func TestCheckEndsIfItsReportIsRefused(t *testing.T) {
	f := newFleet(t, links(nil))
	start(t, f, &clock{}, &clock{}, failing(func(o client.Object) error {
		return apierrors.NewForbidden(corev1.Resource("configmaps"), o.GetName(), fmt.Errorf("exceeded quota: objects, requested: count/configmaps=1"))
	}))
	newNodes(t, "noreport", 2)
	c := ended(t, newCheck(t, "noreport", nil))
	if completeReason(c) != "ReportNotWritten" || !strings.Contains(c.Status.Message, "exceeded quota") {
		t.Errorf("%+v", c.Status)
	}
}

// Its Jobs cannot be deleted, by somebody's admission webhook for example.
func TestCheckEndsWhateverFails(t *testing.T) {
	f := newFleet(t, links(nil))
	clock := &clock{}
	start(t, f, clock, clock, func(o *ctrl.Options) {
		o.NewClient = func(config *rest.Config, options client.Options) (client.Client, error) {
			c, err := client.NewWithWatch(config, options)
			if err != nil {
				return nil, err
			}
			return interceptor.NewClient(c, interceptor.Funcs{
				Delete: func(context.Context, client.WithWatch, client.Object, ...client.DeleteOption) error {
					return apierrors.NewInternalError(fmt.Errorf("failed calling webhook"))
				},
			}), nil
		}
	})
	newNodes(t, "stays", 2)
	c := newCheck(t, "stays", nil)
	eventually(t, "it runs", func(context.Context) (bool, error) { return len(f.all()) > 0, nil })
	clock.advance(2 * time.Hour)
	eventually(t, "it has ended", func(ctx context.Context) (bool, error) {
		err := admin.Get(ctx, client.ObjectKeyFromObject(c), c)
		return completeReason(c) == "CannotContinue", err
	})
	if c.Status.Verdict != evenkeel.VerdictInconclusive || !strings.Contains(c.Status.Message, "failed calling webhook") {
		t.Errorf("%+v", c.Status)
	}
	if err := admin.DeleteAllOf(t.Context(), &corev1.Service{}, client.InNamespace(namespace), client.MatchingLabels{evenkeel.CheckKey: c.Name}); err != nil {
		t.Error(err)
	}
}
