// Package pluginreports receives what the plugin reports from the pods, keeps it in annotations of each pod, and tells
// jobs which of their pods run without it.
package pluginreports

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/kube/debounce"
	"evenkeel.dev/evenkeel/operator/internal/metrics"
	"evenkeel.dev/evenkeel/operator/internal/pluginstatus"
	"evenkeel.dev/evenkeel/operator/internal/suspects"
)

const (
	// maxWaiting bounds the reports that wait to be written, of at most a kilobyte each. Processes repeat what is dropped.
	maxWaiting = 4096
	writers    = 8
	// writeRate bounds the requests to the API server, in a second. A job of 5,000 pods takes as many requests, once.
	writeRate, writeBurst = 50, 100
	writeTimeout          = 10 * time.Second
	// refusedFor is how long reports of an address for a pod are ignored after one that did not come from the pod, at most
	// maxRefused of them.
	refusedFor = 5 * time.Second
	maxRefused = 4096
	// suspectsInterval bounds how often suspects of one pod are written, whatever it reports.
	suspectsInterval = 10 * time.Second
	// complaintInterval is the minimum time between log lines about refused reports.
	complaintInterval = time.Minute
)

// Receiver listens for the plugin's reports. Every replica of the controller does. A report names a pod, and counts
// only if it comes from that pod's address.
type Receiver struct {
	// Address is where it listens (UDP).
	Address string
	Clock   clock.PassiveClock
	// Delays scales how long further suspects of a pod wait.
	Delays debounce.Scale

	pods   client.Reader
	names  *podNames
	writer client.Writer
	queue  chan report
	// complaints limits the lines about refused reports.
	complaints *rate.Limiter

	mu      sync.Mutex
	waiting map[subject]bool        // reports in the queue or being written
	refused map[sender]time.Time    // when a report came that was not the pod's
	written map[types.UID]time.Time // when suspects that the pod named were last written
}

// A sender claims to be a pod. Anybody may claim that, so reports from another address do not keep the pod from
// reporting.
type sender struct {
	pod  types.UID
	from netip.Addr
}

// A subject is the annotation of a pod that a sender's reports are about.
type subject struct {
	sender
	annotation string
}

// A report is a value to write, and the address that it came from.
type report struct {
	pod        *metav1.PartialObjectMetadata
	annotation string
	// value of the annotation, or empty to remove it.
	value string
	// outcome of the plugin's start. If it is empty, the report is about something else, and the process waits for no
	// answer.
	outcome pluginstatus.Outcome
	from    netip.AddrPort
}

func (r report) sender() sender {
	return sender{r.pod.UID, r.from.Addr().Unmap().WithZone("")}
}

func (r report) subject() subject { return subject{r.sender(), r.annotation} }

// SetupWithManager starts the receiver with the manager, whether that leads or not.
func (r *Receiver) SetupWithManager(mgr manager.Manager) error {
	config := rest.CopyConfig(mgr.GetConfig())
	config.QPS, config.Burst = writeRate, writeBurst // so that reports keep no other controller waiting
	writer, err := client.New(config, client.Options{Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper()})
	if err != nil {
		return fmt.Errorf("client: %w", err)
	}
	informer, err := mgr.GetCache().GetInformer(context.Background(), podMetadata())
	if err != nil {
		return fmt.Errorf("watch pods: %w", err)
	}
	r.prepare(mgr.GetClient(), writer)
	if _, err := informer.AddEventHandler(r.names); err != nil {
		return fmt.Errorf("names of pods: %w", err)
	}
	return mgr.Add(r)
}

func (r *Receiver) prepare(pods client.Reader, writer client.Writer) {
	r.pods, r.names, r.writer, r.queue = pods, newPodNames(), writer, make(chan report, maxWaiting)
	r.complaints = rate.NewLimiter(rate.Every(complaintInterval), 1)
	r.waiting, r.refused, r.written = map[subject]bool{}, map[sender]time.Time{}, map[types.UID]time.Time{}
}

func podMetadata() *metav1.PartialObjectMetadata {
	pod := &metav1.PartialObjectMetadata{}
	pod.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Pod"))
	return pod
}

// NeedLeaderElection is false: the Service sends reports to any replica.
func (r *Receiver) NeedLeaderElection() bool { return false }

// Start receives until the context is done.
func (r *Receiver) Start(ctx context.Context) error {
	conn, err := (&net.ListenConfig{}).ListenPacket(ctx, "udp", r.Address)
	if err != nil {
		return fmt.Errorf("listen for the plugin's reports: %w", err)
	}
	socket, ok := conn.(*net.UDPConn)
	if !ok {
		return fmt.Errorf("listen for the plugin's reports: %T is no UDP socket", conn)
	}
	_ = socket.SetReadBuffer(4 << 20) // as much as the kernel allows
	var running sync.WaitGroup
	for range writers {
		running.Go(func() { r.write(ctx, socket) })
	}
	defer running.Wait()
	defer context.AfterFunc(ctx, func() { socket.Close() })()
	defer socket.Close()
	buffer := make([]byte, pluginstatus.MaxReport+1)
	for {
		n, from, err := socket.ReadFromUDPAddrPort(buffer)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("listen for the plugin's reports: %w", err)
		case err != nil:
			continue // such as an ICMP error about an answer to a process that has ended
		}
		if r.receive(ctx, buffer[:n], from) {
			answer(socket, from, buffer[:n])
		}
	}
}

// receive queues a report. It returns true if the pod's annotation already holds it, so that the answer needs no
// request.
func (r *Receiver) receive(ctx context.Context, datagram []byte, from netip.AddrPort) bool {
	if suspects.IsReport(datagram) {
		r.receiveSuspects(ctx, datagram, from)
		return false
	}
	uid, outcome, text, err := pluginstatus.ParseReport(datagram)
	if err != nil {
		metrics.Report(metrics.ReportUnreadable)
		return false
	}
	pod, before := r.reporter(ctx, uid)
	switch {
	case pod == nil:
		metrics.Report(metrics.ReportUnknown)
		return false
	case before.Outcome == outcome, before.Outcome == pluginstatus.Failed:
		metrics.Report(metrics.ReportRepeated)
		return true // one process without the plugin is enough to spoil the job
	}
	said := pluginstatus.Status{Outcome: outcome, At: r.Clock.Now(), Text: text}
	r.enqueue(report{pod: pod, annotation: evenkeel.PluginStatusKey, value: said.String(), outcome: outcome, from: from})
	return false
}

// receiveSuspects queues whom the ranks of a job wait for, if that is news.
func (r *Receiver) receiveSuspects(ctx context.Context, datagram []byte, from netip.AddrPort) {
	uid, said, err := suspects.Parse(datagram)
	if err != nil {
		metrics.Report(metrics.ReportUnreadable)
		return
	}
	pod, _ := r.reporter(ctx, uid)
	if pod == nil {
		metrics.Report(metrics.ReportUnknown)
		return
	}
	now := r.Clock.Now()
	if value, write := suspects.Next(pod, said, now); !write {
		metrics.Report(metrics.ReportRepeated)
	} else {
		r.enqueue(report{pod: pod, annotation: evenkeel.SuspectsKey, value: value, from: from})
	}
}

// reporter returns the pod with that UID and its earlier report, or nil if no such pod may report.
func (r *Receiver) reporter(ctx context.Context, uid string) (*metav1.PartialObjectMetadata, pluginstatus.Status) {
	pod := podMetadata()
	if name, known := r.names.of(types.UID(uid)); !known || r.pods.Get(ctx, name, pod) != nil || string(pod.UID) != uid {
		return nil, pluginstatus.Status{}
	}
	before, expected := pluginstatus.Of(pod)
	if !expected {
		return nil, before
	}
	return pod, before
}

// enqueue queues the report, unless an equal one waits. The process repeats dropped reports.
func (r *Receiver) enqueue(next report) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.Clock.Now()
	switch {
	case now.Sub(r.refused[next.sender()]) < refusedFor:
		metrics.Report(metrics.ReportRefused)
		return
	case r.waiting[next.subject()], next.annotation == evenkeel.SuspectsKey && next.value != "" && now.Sub(r.written[next.pod.UID]) < r.Delays.Of(suspectsInterval):
		metrics.Report(metrics.ReportRepeated)
		return
	}
	select {
	case r.queue <- next:
		r.waiting[next.subject()] = true
	default:
		metrics.Report(metrics.ReportDropped)
	}
}

// note keeps a time of a pod or a sender, in a map of a bounded size.
func note[Key comparable](times map[Key]time.Time, of Key, now time.Time) {
	if len(times) >= maxRefused {
		clear(times)
	}
	times[of] = now
}

func (r *Receiver) write(ctx context.Context, socket *net.UDPConn) {
	for {
		select {
		case <-ctx.Done():
			return
		case next := <-r.queue:
			if r.writeNext(ctx, next) && next.outcome != "" {
				_, _ = socket.WriteToUDPAddrPort([]byte(next.pod.UID), next.from) // without an answer it is sent again
			}
		}
	}
}

// writeNext writes a report of the queue.
func (r *Receiver) writeNext(ctx context.Context, next report) (recorded bool) {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	recorded, refused := r.record(ctx, next)
	result := metrics.ReportFailed
	switch {
	case recorded:
		result = metrics.ReportRecorded
	case refused:
		result = metrics.ReportRefused
	}
	metrics.Report(result)
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.waiting, next.subject())
	if refused && r.complaints.AllowN(r.Clock.Now(), 1) {
		log.FromContext(ctx).Info("a report of the plugin came from another address than its pod's, and does not count: if reports of many pods do, the network translates their addresses; this is said once a minute",
			"namespace", next.pod.Namespace, "pod", next.pod.Name, "from", next.from.String())
	}
	if refused {
		note(r.refused, next.sender(), r.Clock.Now())
	}
	if recorded && next.annotation == evenkeel.SuspectsKey {
		note(r.written, next.pod.UID, r.Clock.Now())
	}
	return recorded
}

// record writes the report on the pod, provided that the report came from the pod's address. The API server
// tests that, so the pod need not be read. Refused is true if the pod has another address.
func (r *Receiver) record(ctx context.Context, next report) (recorded, refused bool) {
	address := next.sender().from.String()
	type step struct {
		Op    string  `json:"op"`
		Path  string  `json:"path"`
		Value *string `json:"value,omitempty"`
	}
	uid, path := string(next.pod.UID), "/metadata/annotations/"+strings.ReplaceAll(next.annotation, "/", "~1")
	for _, field := range []string{"/status/podIP", "/status/podIPs/1/ip"} {
		steps := []step{{"test", "/metadata/uid", &uid}, {"test", field, &address}}
		if before, had := next.pod.Annotations[next.annotation]; had {
			steps = append(steps, step{"test", path, &before})
		}
		if next.value != "" {
			steps = append(steps, step{"add", path, &next.value})
		} else {
			steps = append(steps, step{Op: "remove", Path: path})
		}
		patch, err := json.Marshal(steps)
		if err != nil {
			return false, false
		}
		err = r.writer.Patch(ctx, next.pod, client.RawPatch(types.JSONPatchType, patch))
		switch {
		case err == nil:
			if result := map[pluginstatus.Outcome]string{pluginstatus.Loaded: metrics.PluginLoaded, pluginstatus.Failed: metrics.PluginFailed}[next.outcome]; result != "" {
				metrics.Pod(result)
			}
			return true, false
		case !apierrors.IsInvalid(err):
			return false, false // such as a pod that is gone, or an API server that is away
		}
	}
	return false, true
}

// answer confirms a report with the UID in its second line.
func answer(socket *net.UDPConn, to netip.AddrPort, datagram []byte) {
	if uid, _, _, err := pluginstatus.ParseReport(datagram); err == nil {
		_, _ = socket.WriteToUDPAddrPort([]byte(uid), to)
	}
}
