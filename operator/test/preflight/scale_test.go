package preflight

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/pluginstatus"
	"evenkeel.dev/evenkeel/operator/internal/preflight"
	"evenkeel.dev/evenkeel/operator/internal/preflight/pairing"
	"evenkeel.dev/evenkeel/operator/internal/preflight/report"
	"evenkeel.dev/evenkeel/operator/test/apiserver"
)

var (
	scale        = flag.Int("scale", 100, "TestScale: how many pretend nodes")
	scalePods    = flag.Int("scale-pods", 500, "TestScale: how many pods of annotated jobs, besides; every twentieth job of them is held")
	scaleRun     = flag.Duration("scale-run", 0, "TestScale: how long each run takes")
	scaleResults = flag.String("scale-results", "", "TestScale: file to write the figures to, from the root of the repository")
)

// Budgets. Those of time depend on the machine, and are judged only when the page is written.
const (
	maxStatus        = 64 << 10         // of any status, bytes
	maxHealth        = 8 << 10          // of a NodeNetworkHealth
	maxWritesPerRun  = 3                // of the controller, while a check runs
	maxWritesPerNode = 5                // of the controller, after the verdict
	maxWritesPerHeld = 3                // of the controller, for each held job when it starts: its Event is counted
	maxMemory        = 400 << 20        // of the controller, at 5,000 nodes and 100,000 pods
	maxCheck         = 30 * time.Minute // at 5,000 nodes, with runs of 20 s
	maxGate          = time.Minute      // of jobs that wait for one such run
	maxRead          = 2 * time.Second  // of a report
	maxCleanup       = time.Minute      // of 5,000 nodes
	maxPlanning      = 50 * time.Millisecond
)

// A controllerProcess is the operator's own program, with the chart's permissions and no others.
type controllerProcess struct {
	cmd     *exec.Cmd
	metrics string
	log     bytes.Buffer
	ended   chan error
}

// startProcess starts the program; it ends with the test.
func startProcess(t *testing.T) *controllerProcess {
	t.Helper()
	root, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	binary, err := apiserver.Operator(root, work)
	if err != nil {
		t.Fatal(err)
	}
	as := apiserver.As(config, namespace, account)
	k := clientcmdapi.NewConfig()
	k.Clusters["test"] = &clientcmdapi.Cluster{Server: "https://" + strings.TrimPrefix(as.Host, "https://"), CertificateAuthorityData: as.CAData}
	k.AuthInfos["test"] = &clientcmdapi.AuthInfo{ClientCertificateData: as.CertData, ClientKeyData: as.KeyData, Impersonate: as.Impersonate.UserName, ImpersonateGroups: as.Impersonate.Groups}
	k.Contexts["test"] = &clientcmdapi.Context{Cluster: "test", AuthInfo: "test"}
	k.CurrentContext = "test"
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*k, kubeconfig); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &controllerProcess{metrics: listener.Addr().String(), ended: make(chan error, 1)}
	listener.Close()
	p.cmd = exec.Command(binary, "controller", "--namespace="+namespace, "--bench-image="+benchName, "--metrics-bind-address="+p.metrics, "--health-probe-bind-address=0", "--report-bind-address=127.0.0.1:0")
	p.cmd.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig, fmt.Sprint("MEMORY_LIMIT=", 512<<20)) // the chart's
	p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { p.ended <- p.cmd.Wait() }()
	t.Cleanup(func() { p.stop(t) })
	eventually(t, "the controller serves metrics", func(context.Context) (bool, error) {
		select {
		case err := <-p.ended:
			p.ended <- err
			return false, fmt.Errorf("it has ended: %w", errors.Join(err, errors.New(p.log.String())))
		default:
		}
		_, err := p.scrape()
		return err == nil, nil
	})
	return p
}

func (p *controllerProcess) stop(t *testing.T) {
	t.Helper()
	if p.cmd == nil {
		return
	}
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		t.Error(err)
	}
	select {
	case err := <-p.ended:
		if err != nil {
			t.Errorf("the controller: %v\n%s", err, p.log.String())
		}
	case <-time.After(waitTimeout):
		t.Errorf("the controller does not end: %v", p.cmd.Process.Kill())
	}
	p.cmd = nil
}

// scrape sums the series of each metric that the program serves, and of rest_client_requests_total those of each method.
func (p *controllerProcess) scrape() (map[string]float64, error) {
	response, err := (&http.Client{Timeout: 10 * time.Second}).Get("http://" + p.metrics + "/metrics")
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	var text bytes.Buffer
	if _, err := text.ReadFrom(response.Body); err != nil {
		return nil, err
	}
	sums := map[string]float64{}
	for line := range strings.Lines(text.String()) {
		at := strings.LastIndex(strings.TrimSpace(line), " ")
		value, err := strconv.ParseFloat(strings.TrimSpace(line[max(at, 0):]), 64)
		if strings.HasPrefix(line, "#") || at < 0 || err != nil {
			continue
		}
		name, labels, _ := strings.Cut(line[:at], "{")
		sums[name] += value
		for _, label := range strings.Split(strings.TrimSuffix(labels, "}"), ",") {
			if strings.HasPrefix(label, "method=") || strings.HasPrefix(label, "controller=") {
				sums[name+" "+label] += value
			}
		}
	}
	return sums, nil
}

// writes are the program's requests that change something, or would.
func writes(sums map[string]float64) (count int) {
	for _, method := range []string{"POST", "PUT", "PATCH", "DELETE"} {
		count += int(sums[`rest_client_requests_total method="`+method+`"`])
	}
	return count
}

// memory is the peak memory of the program, bytes.
func (p *controllerProcess) memory() (int, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) == 3 && fields[0] == "VmHWM:" {
			kilo, err := strconv.Atoi(fields[1])
			return kilo << 10, err
		}
	}
	return 0, errors.New("no VmHWM")
}

// kubelet serves the logs of the fleet's pods, as every pretend node's kubelet does. It returns its port.
func kubelet(t *testing.T, f *fleet) int32 {
	t.Helper()
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// /containerLogs/NAMESPACE/POD/CONTAINER
		text, err := f.Tail(r.Context(), "", path.Base(path.Dir(r.URL.Path)))
		if err != nil {
			http.Error(w, err.Error(), http.StatusNotFound)
			return
		}
		_, _ = w.Write(text) // whoever went away does not want it
	}))
	t.Cleanup(server.Close)
	return int32(server.Listener.Addr().(*net.TCPAddr).Port)
}

// many does something for each of so many, some at a time.
func many(count int, do func(i int) error) error {
	work, problems := make(chan int), make([]error, 16)
	var group sync.WaitGroup
	for w := range problems {
		group.Go(func() {
			for i := range work {
				if problems[w] == nil {
					problems[w] = do(i)
				}
			}
		})
	}
	for i := range count {
		work <- i
	}
	close(work)
	group.Wait()
	return errors.Join(problems...)
}

// pretendNodes makes ready nodes whose kubelet listens here. They go with the test.
func pretendNodes(t *testing.T, pool string, count int, port int32) []string {
	t.Helper()
	names := make([]string, count)
	for i := range names {
		names[i] = fmt.Sprintf("%s-%04d", pool, i)
	}
	t.Cleanup(func() {
		if err := many(count, func(i int) error {
			node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: names[i]}}
			state := &evenkeel.NodeNetworkHealth{ObjectMeta: metav1.ObjectMeta{Name: names[i]}}
			return errors.Join(client.IgnoreNotFound(admin.Delete(context.Background(), node)), client.IgnoreNotFound(admin.Delete(context.Background(), state)))
		}); err != nil {
			t.Error(err)
		}
	})
	ready := fmt.Appendf(nil, `{"status": {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}], "daemonEndpoints": {"kubeletEndpoint": {"Port": %d}},
		"nodeInfo": {"kubeletVersion": "v1.36.0", "containerRuntimeVersion": "containerd://2.2.0"},
		"conditions": [{"type": "Ready", "status": "True", "reason": "Test"}]}}`, port)
	if err := many(count, func(i int) error {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: names[i], Labels: map[string]string{"pool": pool, "kubernetes.io/hostname": names[i]}}}
		return errors.Join(admin.Create(t.Context(), node),
			admin.Patch(t.Context(), node.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"spec": {"taints": null}}`))),
			admin.Status().Patch(t.Context(), node.DeepCopy(), client.RawPatch(types.StrategicMergePatchType, ready)))
	}); err != nil {
		t.Fatal(err)
	}
	return names
}

// size is an object's, as JSON.
func size(t *testing.T, object any) int {
	t.Helper()
	text, err := json.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	return len(text)
}

// planning is how long one decision takes at the end of a check of so many nodes, of which one in a hundred is slow.
func planning(nodes int) time.Duration {
	record := &preflight.Record{Started: time.Now(), Launcher: evenkeel.LauncherIndexedJob}
	for i := range nodes {
		record.Nodes = append(record.Nodes, preflight.Node{Name: fmt.Sprintf("node-%04d", i), Pool: "p"})
	}
	options := preflight.Options{Stages: []evenkeel.Stage{evenkeel.StageLocal, evenkeel.StagePairs}}
	for {
		d := preflight.Decide(options, record)
		if len(d.Pending) == 0 {
			break
		}
		for _, w := range d.Pending {
			m := preflight.Measurement{Outcome: pairing.Measured, BusBW: 40}
			if w.Stage == evenkeel.StagePairs && slices.ContainsFunc(w.Nodes, func(n string) bool { return strings.HasSuffix(n, "50") }) {
				m.BusBW = 4
			}
			record.Add(w, m)
		}
	}
	const rounds = 5
	var took []time.Duration
	for range rounds {
		started := time.Now()
		preflight.Decide(options, record)
		took = append(took, time.Since(started))
	}
	slices.Sort(took)
	return took[rounds/2]
}

// waitingJobs is the number of jobs that wait for their nodes at a time.
const waitingJobs = 11

// jobsStart returns how long the last of so many jobs of two pods waits for its nodes to be proven.
func jobsStart(t *testing.T, limit time.Duration) time.Duration {
	t.Helper()
	created := time.Now()
	var jobs []*unstructured.Unstructured
	for i := range waitingJobs {
		jobs = append(jobs, newJob(t, "PyTorchJob", "scale", func(j *unstructured.Unstructured) {
			j.SetName(fmt.Sprintf("scale-%d", i))
			if err := unstructured.SetNestedField(j.Object, int64(2), "spec", "pytorchReplicaSpecs", "Worker", "replicas"); err != nil {
				t.Fatal(err)
			}
		}))
	}
	for _, job := range jobs {
		within(t, limit, job.GetName()+" starts", func(ctx context.Context) (bool, error) {
			got, err := state(ctx, job)
			return got == started, err
		})
	}
	return time.Since(created)
}

// TestScale runs the operator's program with many simulated nodes, one in a hundred slow, and measures the cost.
func TestScale(t *testing.T) {
	slow := map[string]float64{}
	for i := 50; i < *scale; i += 100 {
		slow[fmt.Sprintf("scale-%04d", i)] = 0.1
	}
	limited := admin
	t.Cleanup(func() { admin = limited })
	fast := rest.CopyConfig(config)
	fast.QPS = -1
	var err error
	if admin, err = client.New(fast, client.Options{Scheme: scheme}); err != nil {
		t.Fatal(err)
	}
	var begun sync.Map // when each run was seen first, by its nodes
	quick := links(slow)
	f := newFleet(t, func(nodes []string) ending {
		e := quick(nodes)
		first, _ := begun.LoadOrStore(strings.Join(nodes, " "), time.Now())
		e.running = time.Since(first.(time.Time)) < *scaleRun
		return e
	})
	nodes := pretendNodes(t, "scale", *scale, kubelet(t, f))
	heldJobs := labelledPods(t, *scalePods)
	p := startProcess(t)
	policy := newPolicy(t, "scale", onStart(nil))
	// Long, as the machine may be busy with other things.
	limit := waitTimeout + time.Duration(*scale)*time.Second + 40*(*scaleRun)
	within(t, limit, "all nodes say that they were never checked", func(context.Context) (bool, error) {
		var list corev1.NodeList
		err := admin.List(t.Context(), &list, client.MatchingLabels{"pool": "scale"})
		return !slices.ContainsFunc(list.Items, func(n corev1.Node) bool {
			return !slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == evenkeel.ConditionNodeHealthy })
		}), err
	})
	var loads []string
	reached := func(what string) { // a run that is cut off says how far it came
		memory, err := p.memory()
		if err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile("/proc/loadavg")
		if err != nil {
			t.Fatal(err)
		}
		load, _, _ := strings.Cut(string(text), " ")
		loads = append(loads, load)
		sums, err := p.scrape()
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: controller %d MiB at most, %.0f MiB in use at the last garbage collection; load %s", what, memory>>20, sums["go_gc_heap_live_bytes"]/(1<<20), load)
	}
	reached(fmt.Sprintf("%d nodes, %d pods", *scale, *scalePods))
	gateTook := jobsStart(t, limit)
	reached(fmt.Sprintf("%d jobs started after %s", waitingJobs, gateTook.Round(100*time.Millisecond)))
	within(t, limit, "the checks of the jobs have ended", func(ctx context.Context) (bool, error) {
		var list evenkeel.NetworkCheckList
		err := admin.List(ctx, &list, client.InNamespace(namespace))
		return !slices.ContainsFunc(list.Items, func(c evenkeel.NetworkCheck) bool {
			return !meta.IsStatusConditionTrue(c.Status.Conditions, evenkeel.ConditionComplete)
		}), err
	})
	before, err := p.scrape()
	if err != nil {
		t.Fatal(err)
	}
	started := time.Now()
	check := newCheck(t, "scale", func(s *evenkeel.NetworkCheckSpec) {
		s.Nodes = evenkeel.NodeSet{Names: nodes} // as a policy's checks have it
	})
	within(t, limit, "the check has ended", func(context.Context) (bool, error) {
		err := admin.Get(t.Context(), client.ObjectKeyFromObject(check), check)
		return meta.IsStatusConditionTrue(check.Status.Conditions, evenkeel.ConditionComplete), err
	})
	checkTook := check.Status.CompletionTime.Sub(check.Status.StartTime.Time)
	reached(fmt.Sprintf("%d nodes checked in %s", *scale, checkTook))
	ended, err := p.scrape()
	if err != nil {
		t.Fatal(err)
	}
	if int(*check.Status.Summary.Failed) != len(slow) || int(*check.Status.Summary.Passed) != *scale-len(slow) {
		t.Errorf("%+v", check.Status)
	}
	within(t, limit, "all nodes are marked", func(context.Context) (bool, error) {
		err := admin.Get(t.Context(), client.ObjectKeyFromObject(policy), policy)
		s := &policy.Status
		if err != nil || s.RunningCheck != "" || s.Healthy == nil || int(*s.Healthy) != *scale-len(slow) || int(*s.Unhealthy) != len(slow) {
			return false, err
		}
		var marked corev1.NodeList
		err = admin.List(t.Context(), &marked, client.MatchingLabels{"pool": "scale"}, client.HasLabels{evenkeel.HealthKey})
		return len(marked.Items) == *scale, err
	})
	markedAfter := time.Since(started)
	reached(fmt.Sprintf("marked after %s", markedAfter.Round(time.Second)))
	marked, err := p.scrape()
	if err != nil {
		t.Fatal(err)
	}

	// Sizes.
	largest, health := 0, 0
	var states evenkeel.NodeNetworkHealthList
	if err := admin.List(t.Context(), &states); err != nil {
		t.Fatal(err)
	}
	for i := range states.Items {
		largest, health = max(largest, size(t, states.Items[i].Status)), max(health, size(t, states.Items[i]))
	}
	checkStatus, policyStatus := size(t, check.Status), size(t, policy.Status)
	reading := time.Now()
	if written, err := report.Read(t.Context(), admin, namespace, check.Status.ReportName); err != nil || len(written.Record.Nodes) != *scale {
		t.Errorf("the report cannot be read: %v", err)
	}
	readTook := time.Since(reading)
	largestPart, reportSize := 0, 0
	var parts corev1.ConfigMapList
	if err := admin.List(t.Context(), &parts, client.InNamespace(namespace), client.MatchingLabels{evenkeel.CheckKey: check.Name}); err != nil {
		t.Fatal(err)
	}
	for i := range parts.Items {
		bytes := size(t, parts.Items[i].Data)
		largestPart, reportSize = max(largestPart, bytes), reportSize+bytes
	}
	for what, bytes := range map[string]int{"NetworkCheck": checkStatus, "NetworkCheckPolicy": policyStatus, "NodeNetworkHealth": largest} {
		if bytes > maxStatus {
			t.Errorf("the status of a %s has %d bytes, more than %d", what, bytes, maxStatus)
		}
	}
	if health > maxHealth {
		t.Errorf("a NodeNetworkHealth has %d bytes, more than %d", health, maxHealth)
	}
	runs := int(*check.Status.Summary.Runs)
	perRun, perNode := float64(writes(ended)-writes(before))/float64(runs), float64(writes(marked)-writes(ended))/float64(*scale)
	// Nodes are marked while the last runs end, so that both are judged together.
	if all, most := writes(marked)-writes(before), maxWritesPerRun*runs+maxWritesPerNode**scale; all > most {
		t.Errorf("%d writes for %d runs and %d nodes, more than %d", all, runs, *scale, most)
	}
	memory, err := p.memory()
	if err != nil {
		t.Fatal(err)
	}
	if memory > maxMemory {
		t.Errorf("the controller held %d bytes, more than %d", memory, maxMemory)
	}
	p.stop(t)

	// At rest: a controller that starts reconciles everything, and each node's kubelet sends heartbeats.
	p = startProcess(t)
	heartbeat := fmt.Appendf(nil, `{"status": {"conditions": [{"type": "Ready", "status": "True", "reason": "Test", "lastHeartbeatTime": %q}]}}`, time.Now().UTC().Format(time.RFC3339))
	if err := many(len(nodes), func(i int) error {
		return admin.Status().Patch(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodes[i]}}, client.RawPatch(types.StrategicMergePatchType, heartbeat))
	}); err != nil {
		t.Fatal(err)
	}
	var rest map[string]float64
	eventually(t, "it has looked at everything", func(context.Context) (bool, error) {
		var err error
		rest, err = p.scrape()
		looked := rest[`workqueue_depth`] == 0 && rest["workqueue_unfinished_work_seconds"] == 0
		for _, controller := range []string{"networkcheck", "nodenetworkhealth-results", "nodenetworkhealth-marker", "networkcheckpolicy", "networkprofile"} {
			looked = looked && rest[fmt.Sprintf("controller_runtime_reconcile_total controller=%q", controller)] > 0
		}
		return looked && rest["evenkeel_nodes"] == float64(*scale+1), err // and the node that jobs are held for
	})
	if n := writes(rest); n > maxWritesPerHeld*heldJobs {
		t.Errorf("%d writes at rest:\n%s", n, p.log.String())
	}
	if n := gatedPods(t); n != heldJobs*podsOfJob {
		t.Errorf("%d pods are gated, and %d jobs of %d pods were held", n, heldJobs, podsOfJob)
	}
	restMemory, err := p.memory()
	if err != nil {
		t.Fatal(err)
	}
	reached("at rest")
	p.stop(t)
	cleanupWrites, cleanupTook := cleanNodes(t)
	var left corev1.NodeList
	if err := admin.List(t.Context(), &left, client.HasLabels{evenkeel.HealthKey}); err != nil || len(left.Items) > 0 {
		t.Errorf("%d nodes have the label after the cleanup, %v", len(left.Items), err)
	}
	t.Logf("cleaned up with %d writes in %s", cleanupWrites, cleanupTook.Round(100*time.Millisecond))
	t.Logf("%d nodes, %d runs: checked in %s, marked after %s, %.2f writes for each run, then %.2f for each node, %d at rest; jobs started after %s; report read in %s; check's status %d bytes, node's health %d; controller %d MiB at most, %d MiB at rest, %.1f s of processor",
		*scale, runs, checkTook, markedAfter.Round(time.Second), perRun, perNode, writes(rest), gateTook.Round(100*time.Millisecond), readTook.Round(time.Millisecond), checkStatus, health, memory>>20, restMemory>>20, marked["process_cpu_seconds_total"])
	if *scaleResults == "" {
		return
	}
	planning256 := planning(256)
	rows := [][]string{
		{"verdict on all nodes, from the choice of the nodes", checkTook.String(), maxCheck.String(), fmt.Sprintf("%d runs of %s, %d nodes at a time", runs, *scaleRun, *check.Spec.WithDefaultsFor(*scale).MaxConcurrentNodes)},
		{fmt.Sprintf("%d jobs of two pods, all at once: until the last one starts", waitingJobs), gateTook.Round(100 * time.Millisecond).String(), maxGate.String(), "each has a check of its own nodes, one run for each pair"},
		{"all nodes marked, from the check's creation", markedAfter.Round(time.Second).String(), "", "condition and label on each"},
		{"one decision about 256 nodes", planning256.Round(10 * time.Microsecond).String(), maxPlanning.String(), "who meets whom next, at the end of a check, when there is most to think of"},
		{"one decision about 1,000 nodes", planning(1000).Round(10 * time.Microsecond).String(), "", ""},
		{"one decision about 5,000 nodes", planning(5000).Round(10 * time.Microsecond).String(), "", ""},
		{"API writes for each run of the benchmark", fmt.Sprintf("%.2f", perRun), strconv.Itoa(maxWritesPerRun), "record and progress included"},
		{"API writes for each node after the verdict", fmt.Sprintf("%.2f", perNode), "", "its NodeNetworkHealth, condition and label"},
		{"API writes at rest", strconv.Itoa(writes(rest)), strconv.Itoa(maxWritesPerHeld * heldJobs), fmt.Sprintf("after a restart, which looks at everything, and a heartbeat of each node; %d held jobs have their Events counted", heldJobs)},
		{"status of the NetworkCheck", kibi(checkStatus), kibi(maxStatus), ""},
		{"the whole NetworkCheck, with the nodes' names", kibi(size(t, check)), "", ""},
		{"status of the NetworkCheckPolicy", kibi(policyStatus), kibi(maxStatus), ""},
		{"largest NodeNetworkHealth", kibi(health), kibi(maxHealth), "after one check; after twenty it is bounded by a test of its own"},
		{"report, with every run and the heat map", kibi(reportSize), "", fmt.Sprintf("%d ConfigMaps", len(parts.Items))},
		{"reading it, as `kubectl evenkeel report` does", readTook.Round(time.Millisecond).String(), maxRead.String(), ""},
		{"largest ConfigMap of it", kibi(largestPart), "1024 KiB", "the API server's own limit"},
		{"memory of the controller, at most", fmt.Sprintf("%d MiB", memory>>20), fmt.Sprintf("%d MiB", maxMemory>>20), fmt.Sprintf("with %d pods of annotated jobs", *scalePods)},
		{"memory of the controller, at rest", fmt.Sprintf("%d MiB", restMemory>>20), fmt.Sprintf("%d MiB", maxMemory>>20), ""},
		{"cleanup of all nodes, as the chart's hook does it", cleanupTook.Round(100 * time.Millisecond).String(), maxCleanup.String(), fmt.Sprintf("condition and label, %d writes", cleanupWrites)},
		{"processor time of the controller", fmt.Sprintf("%.1f s", marked["process_cpu_seconds_total"]), "", "from its start until all nodes were marked"},
	}
	writeResults(t, rows, loads)
	for _, limited := range []struct {
		what         string
		took, budget time.Duration
	}{
		{"the check", checkTook, maxCheck}, {"the start of the jobs", gateTook, maxGate}, {"one decision about 256 nodes", planning256, maxPlanning},
		{"reading the report", readTook, maxRead}, {"the cleanup", cleanupTook, maxCleanup},
	} {
		if limited.took > limited.budget {
			t.Errorf("%s took %s, more than %s", limited.what, limited.took, limited.budget)
		}
	}
}

func kibi(bytes int) string { return fmt.Sprintf("%.1f KiB", float64(bytes)/1024) }

const (
	// podsOfJob is the number of pods of a job, heldShare the number of jobs of which one is held.
	podsOfJob = 20
	heldShare = 20
)

// labelledPods makes pods as annotated jobs have them. The pods of held jobs are gated, and wait for a node that has failed. Each job
// has its own settings, and each pod its own network and time of its report. It returns how many jobs are held. The pods stay: the API
// server ends with the tests.
func labelledPods(t *testing.T, count int) (held int) {
	t.Helper()
	const where, heldPool = "scale-pods", "scale-held"
	failed := newNodes(t, heldPool, 1)[0]
	node := &corev1.Node{}
	if err := admin.Get(t.Context(), client.ObjectKey{Name: failed}, node); err != nil {
		t.Fatal(err)
	}
	health := &evenkeel.NodeNetworkHealth{ObjectMeta: metav1.ObjectMeta{Name: failed, OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: failed, UID: node.UID}}}}
	if err := admin.Create(t.Context(), health); err != nil {
		t.Fatal(err)
	}
	now := metav1.Now()
	health.Status = evenkeel.NodeNetworkHealthStatus{Health: evenkeel.HealthUnhealthy, Reason: "TooSlow", Message: "for this test", ObservedTime: &now}
	if err := admin.Status().Update(t.Context(), health); err != nil {
		t.Fatal(err)
	}
	newPolicy(t, heldPool, onStart(func(s *evenkeel.NetworkCheckPolicySpec) { s.Gate.OnTimeout = evenkeel.GateWait }))
	if err := admin.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: where}}); err != nil {
		t.Fatal(err)
	}
	yes, started := true, time.Now()
	if err := many(count, func(i int) error {
		job := fmt.Sprintf("train-%d", i/podsOfJob)
		environment := strings.Repeat(fmt.Sprintf("%-16s", job), 128) // 2 KiB, as much as a profile's settings may be
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
			Namespace: where, Name: fmt.Sprintf("%s-worker-%d", job, i%podsOfJob),
			Labels:          map[string]string{evenkeel.ProfileKey: "default", "jobset.sigs.k8s.io/jobset-name": job, "jobset.sigs.k8s.io/jobset-uid": job + "-0123456789abcdef"},
			Annotations:     map[string]string{evenkeel.InjectedKey: fmt.Sprintf("%016x", i/podsOfJob), evenkeel.PluginImageKey: pluginName, evenkeel.EnvironmentKey: environment},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "batch/v1", Kind: "Job", Name: job, UID: types.UID(job + "-fedcba9876543210"), Controller: &yes}},
		}}
		// As a network plugin writes it.
		pod.Annotations["k8s.v1.cni.cncf.io/network-status"] = fmt.Sprintf(`[{"name": "rail0", "interface": "eth1", "ips": ["10.%d.%d.%d"], "mac": "0a:58:0a:00:%02x:%02x"}]`, i>>16&255, i>>8&255, i&255, i>>8&255, i&255)
		container := corev1.Container{Name: "c", Image: "c", Env: []corev1.EnvVar{{Name: "SETTINGS", Value: environment}}}
		if i/podsOfJob%heldShare == 0 {
			pod.Labels[evenkeel.GatedKey], pod.Annotations[evenkeel.PluginStatusKey] = "true", evenkeel.PluginNotReported
			pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: evenkeel.SchedulingGate}}
			pod.Spec.NodeSelector = map[string]string{"pool": heldPool}
		} else {
			pod.Annotations[evenkeel.PluginStatusKey] = pluginstatus.Status{ // the pods of a job report within a minute
				Outcome: pluginstatus.Loaded, At: started.Add(time.Duration(i*7%60) * time.Second),
				Text: fmt.Sprintf("version 0.1.0, protocol 7, devices: eth0-%d 100000 Mb/s, eth1 100000 Mb/s", i/podsOfJob),
			}.String()
			pod.Spec.NodeName = job // nodes of their own: those of the check are idle
			container.Resources.Limits = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("8")}
		}
		pod.Spec.Containers = []corev1.Container{container}
		return admin.Create(t.Context(), pod)
	}); err != nil {
		t.Fatal(err)
	}
	return (count/podsOfJob + heldShare - 1) / heldShare
}

// gatedPods is the number of pods that wait.
func gatedPods(t *testing.T) (count int) {
	t.Helper()
	var list corev1.PodList
	if err := admin.List(t.Context(), &list, client.HasLabels{evenkeel.GatedKey}); err != nil {
		t.Fatal(err)
	}
	for _, pod := range list.Items {
		count += len(pod.Spec.SchedulingGates)
	}
	return count
}

// webhookResults begins the part of the page that is not written here. BenchmarkWebhook writes it.
const webhookResults = "\n## Webhook\n"

// writeResults writes the page.
func writeResults(t *testing.T, rows [][]string, loads []string) {
	t.Helper()
	root, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	model := "unknown processor"
	if text, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(text)) {
			if name, value, _ := strings.Cut(line, ":"); strings.TrimSpace(name) == "model name" {
				model = strings.TrimSpace(value)
				break
			}
		}
	}
	var page strings.Builder
	fmt.Fprintf(&page, `# Pre-flight at %[1]d nodes

The operator's own program checks %[1]d pretend nodes, of which one in a hundred has a slow link, against a real API server. The test plays the
nodes' kubelets and the jobs' pods: a run ends %[7]s after it was first seen. Nothing is measured by it, so the rest is Evenkeel's share and the
API server's. Pods of annotated jobs, with GPUs and 2 KiB of annotations, are on other nodes;
the pods of every twentieth job are gated. Everything ran on one machine: %[2]d cores (%[3]s),
%[4]s, the API server, etcd, the controller and the test alike. Other work ran there too: the load was %[8]s at the steps below.

Taken at commit %[5]s, on %[6]s. Budgets are this project's own, for 5,000 nodes and 100,000 pods.

| what | measured | budget | |
|---|---|---|---|
`, *scale, runtime.NumCPU(), model, runtime.GOARCH, toolbox.Commit(t.Context(), root, "operator"), time.Now().UTC().Format(time.DateOnly), *scaleRun, strings.Join(loads, ", "))
	for _, row := range rows {
		fmt.Fprintf(&page, "| %s |\n", strings.Join(row, " | "))
	}
	fmt.Fprintf(&page, `
The same test runs with 100 nodes in %[1]smake test%[1]s, and fails there where a size, a number of writes or the memory exceeds its
budget. Times depend on the machine: their budgets are judged when this page is written, with

%[1]s%[1]s%[1]s
KUBEBUILDER_ASSETS=$(go run ./hack/cluster tool envtest) go test ./operator/test/preflight -run '^TestScale$' -v -timeout 120m \
  -scale %[2]d -scale-pods %[3]d -scale-run %[4]s -scale-results docs/results/preflight.md
%[1]s%[1]s%[1]s
`, "`", *scale, *scalePods, *scaleRun)
	file := filepath.Join(root, *scaleResults)
	if old, err := os.ReadFile(file); err == nil {
		if _, webhook, has := strings.Cut(string(old), webhookResults); has {
			page.WriteString(webhookResults + webhook)
		}
	}
	if err := os.WriteFile(file, []byte(page.String()), 0o644); err != nil {
		t.Fatal(err)
	}
}
