package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"

	"evenkeel.dev/evenkeel/operator/internal/certs"
	"evenkeel.dev/evenkeel/operator/internal/conversion"
	"evenkeel.dev/evenkeel/operator/internal/uninstall"
)

// conversionTimeout bounds the change of the CRDs at the end, and is less than the pod's grace period.
const conversionTimeout = 20 * time.Second

// certificatesRole is apart from the webhook: whoever may change a webhook configuration can have every object of the cluster sent to
// him, and so serves no requests.
type certificatesRole struct {
	process
	webhookConfiguration, service, secret, authoritySecret string
	conversion                                             bool
}

func certificatesCommand() *cobra.Command {
	var c certificatesRole
	cmd := &cobra.Command{
		Use:   "certificates",
		Short: "Make and renew the webhook's certificate, and have the API server trust it",
		Example: `  evenkeel-operator certificates --namespace=evenkeel-system --webhook-config=evenkeel --service=evenkeel-webhook \
    --secret=evenkeel-webhook-tls --ca-secret=evenkeel-webhook-cert`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := c.validate(); err != nil {
				return err
			}
			return c.run(cmd.Context())
		},
	}
	c.flags(cmd.Flags())
	cmd.Flags().StringVar(&c.secret, "secret", "", "the Secret that holds the certificate; it has to exist, and may be empty")
	cmd.Flags().StringVar(&c.authoritySecret, "ca-secret", "", "the Secret that holds the CA and its key; it has to exist, and may be empty")
	cmd.Flags().StringVar(&c.service, "service", "", "the Service that the API server calls")
	cmd.Flags().StringVar(&c.webhookConfiguration, "webhook-config", "", "the MutatingWebhookConfiguration and the ValidatingWebhookConfiguration that get the CA")
	cmd.Flags().BoolVar(&c.conversion, "conversion", false, "have the API server trust it in the CustomResourceDefinitions too, whose objects the webhook converts")
	return cmd
}

func (c *certificatesRole) validate() error {
	if err := c.process.validate(); err != nil {
		return err
	}
	return needs("certificates", map[string]string{
		"namespace": c.namespace, "secret": c.secret, "ca-secret": c.authoritySecret, "service": c.service, "webhook-config": c.webhookConfiguration,
	})
}

func (c *certificatesRole) run(ctx context.Context) error {
	issuer := &certs.Issuer{
		Names: certs.Names{
			Secret: types.NamespacedName{Namespace: c.namespace, Name: c.secret}, WebhookConfiguration: c.webhookConfiguration, Service: c.service,
		},
		Authority: types.NamespacedName{Namespace: c.namespace, Name: c.authoritySecret},
	}
	if c.conversion {
		issuer.Definitions = conversion.Definitions()
	}
	uncached := []client.Object{&corev1.Secret{}, &apiextensionsv1.CustomResourceDefinition{}}
	mgr, err := c.manager(ctx, ctrl.Options{
		Cache: cache.Options{ByObject: issuer.Cached()}, Client: client.Options{Cache: &client.CacheOptions{DisableFor: uncached}},
	})
	if err != nil {
		return err
	}
	if err := issuer.SetupWithManager(mgr); err != nil {
		return fmt.Errorf("certificates: %w", err)
	}
	if err := mgr.AddReadyzCheck("process", healthz.Ping); err != nil {
		return fmt.Errorf("readiness check: %w", err)
	}
	if err := mgr.Start(ctx); err != nil {
		return fmt.Errorf("certificates: %w", err)
	}
	return c.release(context.WithoutCancel(ctx), mgr)
}

// release leaves one version of the CRDs if this namespace is being deleted: nobody converts their objects any more.
func (c *certificatesRole) release(ctx context.Context, mgr ctrl.Manager) error {
	if !c.conversion || !c.isLast(ctx, mgr) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, conversionTimeout)
	defer cancel()
	live, err := client.New(mgr.GetConfig(), client.Options{Scheme: mgr.GetScheme()})
	if err != nil {
		return fmt.Errorf("client: %w", err)
	}
	step := uninstall.Release{Namespace: c.namespace}.Conversion(live)
	if err := uninstall.Run(ctx, os.Stderr, clock.RealClock{}, step); err != nil {
		return fmt.Errorf("the namespace %s is being deleted, and nobody will convert objects: kubectl evenkeel uninstall leaves "+
			"one version: %w", c.namespace, err)
	}
	return nil
}
