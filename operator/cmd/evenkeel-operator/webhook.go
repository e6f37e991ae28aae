package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"path/filepath"
	"sync"
	"sync/atomic"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/certwatcher"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/webhook"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/admission"
	"evenkeel.dev/evenkeel/operator/internal/certs"
	"evenkeel.dev/evenkeel/operator/internal/conversion"
	"evenkeel.dev/evenkeel/operator/internal/kube/events"
	"evenkeel.dev/evenkeel/operator/internal/metrics"
)

// Where the server's certificate comes from.
const (
	selfManaged = "SelfManaged"
	supplied    = "Supplied"
)

type webhookRole struct {
	process
	port                                  int
	certSource, certDir                   string
	webhookConfiguration, service, secret string
	clients                               clients
	reductionImage                        string
	reports                               string
}

func webhookCommand() *cobra.Command {
	var w webhookRole
	cmd := &cobra.Command{
		Use:   "webhook",
		Short: "Serve the webhooks that add the plugin to annotated jobs and their pods",
		Example: `  evenkeel-operator webhook --namespace=evenkeel-system --webhook-config=evenkeel --service=evenkeel-webhook --secret=evenkeel-webhook-tls
  evenkeel-operator webhook --cert-source=Supplied --cert-dir=/certs`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := w.validate(); err != nil {
				return err
			}
			return w.run(cmd.Context())
		},
	}
	w.flags(cmd.Flags())
	cmd.Flags().IntVar(&w.port, "port", webhook.DefaultPort, "port of the HTTPS server")
	cmd.Flags().StringVar(&w.certSource, "cert-source", selfManaged, "SelfManaged: read from --secret, where evenkeel-operator certificates writes it; Supplied: read from --cert-dir")
	cmd.Flags().StringVar(&w.certDir, "cert-dir", "", "Supplied: folder with tls.crt and tls.key, read again when they change")
	cmd.Flags().StringVar(&w.secret, "secret", "", "SelfManaged: the Secret that holds the certificate")
	cmd.Flags().StringVar(&w.service, "service", "", "SelfManaged: the Service that the API server calls")
	cmd.Flags().StringVar(&w.webhookConfiguration, "webhook-config", "", "SelfManaged: the MutatingWebhookConfiguration that has to trust it")
	cmd.Flags().StringVar(&w.clients.caFile, "client-ca", "", "file of the CAs that sign the certificate which the API server presents (PEM), read for each connection; none: anybody may call")
	cmd.Flags().StringVar(&w.clients.name, "client-name", "", "common name of that certificate; none: any")
	cmd.Flags().StringVar(&w.reductionImage, "reduction-image", "", "image of the reduction servers, as the controller has it; without one, no job gets any")
	cmd.Flags().StringVar(&w.reports, "reports", "", "HOST:PORT to which the plugin reports that NCCL uses it; none: pods do not report")
	return cmd
}

func (w *webhookRole) validate() error {
	if err := w.process.validate(); err != nil {
		return err
	}
	if _, _, err := net.SplitHostPort(w.reports); w.reports != "" && err != nil {
		return fmt.Errorf("--reports=%q: want HOST:PORT", w.reports)
	}
	if w.port < 1 || w.port > 65535 {
		return fmt.Errorf("--port=%d: want 1 to 65535", w.port)
	}
	if err := w.clients.validate(); err != nil {
		return err
	}
	switch w.certSource {
	case selfManaged:
		if w.certDir != "" {
			return errors.New("--cert-dir goes with --cert-source=Supplied: a self-managed certificate is served from memory")
		}
		return needs("--cert-source=SelfManaged", map[string]string{
			"namespace": w.namespace, "secret": w.secret, "service": w.service, "webhook-config": w.webhookConfiguration,
		})
	case supplied:
		if err := needs("--cert-source=Supplied", map[string]string{"cert-dir": w.certDir}); err != nil {
			return err
		}
		// The server's error would not say which file is wrong.
		if _, err := tls.LoadX509KeyPair(w.certFiles()); err != nil {
			return fmt.Errorf("--cert-dir=%s: %w", w.certDir, err)
		}
		return nil
	default:
		return fmt.Errorf("--cert-source=%q: want SelfManaged or Supplied", w.certSource)
	}
}

// certFiles are the supplied certificate and its key.
func (w *webhookRole) certFiles() (certificate, key string) {
	return filepath.Join(w.certDir, corev1.TLSCertKey), filepath.Join(w.certDir, corev1.TLSPrivateKeyKey)
}

func (w *webhookRole) run(ctx context.Context) error {
	byObject := map[client.Object]cache.ByObject{}
	var certificates *certs.Server
	var files *certwatcher.CertWatcher
	var getCertificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)
	if w.certSource == selfManaged {
		certificates = &certs.Server{Names: certs.Names{
			Secret: types.NamespacedName{Namespace: w.namespace, Name: w.secret}, WebhookConfiguration: w.webhookConfiguration, Service: w.service,
		}}
		maps.Copy(byObject, certificates.Cached())
		getCertificate = certificates.GetCertificate
	} else {
		var err error
		if files, err = certwatcher.New(w.certFiles()); err != nil {
			return fmt.Errorf("--cert-dir=%s: %w", w.certDir, err)
		}
		getCertificate = files.GetCertificate
	}
	mgr, err := w.manager(ctx, ctrl.Options{
		Cache: cache.Options{ByObject: byObject, DefaultTransform: cache.TransformStripManagedFields()},
		WebhookServer: webhook.NewServer(webhook.Options{Port: w.port, TLSOpts: []func(*tls.Config){
			func(c *tls.Config) { c.GetCertificate = getCertificate }, w.clients.configure,
		}}),
	}, "NetworkProfile", "NetworkCheckPolicy")
	if err != nil {
		return err
	}
	if files != nil {
		if err := mgr.Add(manager.RunnableFunc(func(ctx context.Context) error {
			// The webhook goes on with the certificate that it has.
			if err := files.Start(ctx); err != nil {
				mgr.GetLogger().Error(err, "another certificate would not be noticed")
			}
			return nil
		})); err != nil {
			return fmt.Errorf("files of the certificate: %w", err)
		}
	}
	if err := ctrlmetrics.Registry.Register(metrics.CertificateCollector(getCertificate)); err != nil {
		return fmt.Errorf("metric of the certificate: %w", err)
	}
	started := mgr.GetWebhookServer().StartedChecker()
	checks := []healthz.Checker{started}
	if certificates != nil {
		if err := certificates.SetupWithManager(mgr); err != nil {
			return fmt.Errorf("certificates: %w", err)
		}
		checks = []healthz.Checker{certificates.Ready, started}
	}
	groups, err := discovery.NewDiscoveryClientForConfigAndClient(mgr.GetConfig(), mgr.GetHTTPClient())
	if err != nil {
		return fmt.Errorf("client for API groups: %w", err)
	}
	jobs := admission.Workloads(mgr.GetClient(), mgr.GetAPIReader(), w.reductionImage)
	register := func(path string, hook http.Handler) { mgr.GetWebhookServer().Register(path, w.clients.only(hook)) }
	register("/mutate-workload", admission.WarnWithoutKueue(jobs, mgr.GetClient(), groups.RESTClient()))
	// Anybody may call it: the API server presents its certificate to admission webhooks only, and an answer has nothing
	// that the caller did not send.
	mgr.GetWebhookServer().Register("/convert", conversion.Handler())
	reports := &reportAddress{service: w.reports, log: mgr.GetLogger()}
	if err := mgr.Add(reports); err != nil {
		return fmt.Errorf("address of reports: %w", err)
	}
	register("/mutate-pod", admission.Pods(mgr.GetScheme(), mgr.GetAPIReader(), reports.get))
	siblings := admission.NewSiblings()
	if err := siblings.SetupWithManager(mgr); err != nil {
		return fmt.Errorf("pods that ask themselves: %w", err)
	}
	register("/mutate-annotated-pod", admission.AnnotatedPods(mgr.GetScheme(), mgr.GetClient(), mgr.GetAPIReader(), siblings, reports.get))
	checks = append(checks, siblings.Ready)
	queue := events.NewQueue(mgr.GetClient(), clock.RealClock{})
	if err := mgr.Add(queue); err != nil {
		return fmt.Errorf("queue of Events: %w", err)
	}
	register("/validate-without-effect", admission.WithoutEffect(mgr.GetClient(), queue, clock.RealClock{}, w.namespace))
	return serve(ctx, mgr, checks)
}

// serve watches the kinds that the workload webhook reads, and runs the manager. It is ready when these are listed and the checks
// pass. A first list that does not end is an error: every annotated job would be refused without a visible reason.
func serve(ctx context.Context, mgr ctrl.Manager, checks []healthz.Checker) error {
	namespaces := &metav1.PartialObjectMetadata{}
	namespaces.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Namespace"))
	for _, object := range []client.Object{&evenkeel.NetworkProfile{}, &evenkeel.NetworkCheckPolicy{}, &corev1.LimitRange{}, namespaces} {
		if _, err := mgr.GetCache().GetInformer(ctx, object); err != nil {
			return fmt.Errorf("watch %T: %w", object, err)
		}
	}
	var synced atomic.Bool
	listed := func(*http.Request) error {
		if !synced.Load() {
			return errors.New("profiles, policies, LimitRanges and namespaces are not listed yet")
		}
		return nil
	}
	if err := mgr.AddReadyzCheck("webhook", readiness(mgr.GetLogger(), append([]healthz.Checker{listed}, checks...))); err != nil {
		return fmt.Errorf("readiness check: %w", err)
	}
	running, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	go func() {
		limited, release := context.WithTimeout(running, syncTimeout)
		defer release()
		if mgr.GetCache().WaitForCacheSync(limited) {
			synced.Store(true)
		} else if running.Err() == nil {
			stop(fmt.Errorf("profiles, policies, LimitRanges and namespaces could not be listed within %s: the messages above say why", syncTimeout))
		}
	}()
	if err := mgr.Start(running); err != nil {
		return fmt.Errorf("webhook: %w", err)
	}
	if ctx.Err() == nil {
		return context.Cause(running)
	}
	return nil
}

// readiness returns the first failing check. The answers of probes are not visible, so each new reason is logged too.
func readiness(logger logr.Logger, checks []healthz.Checker) healthz.Checker {
	var mu sync.Mutex
	last := ""
	return func(request *http.Request) error {
		mu.Lock()
		defer mu.Unlock()
		for _, check := range checks {
			if err := check(request); err != nil {
				if reason := err.Error(); reason != last {
					last = reason
					logger.Info("not ready", "reason", reason)
				}
				return err
			}
		}
		if last != "" {
			last = ""
			logger.Info("ready")
		}
		return nil
	}
}
