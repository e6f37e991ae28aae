// Package cli is `kubectl evenkeel`: it runs network checks, and explains the objects in the cluster. It changes nothing but the
// check that it creates, and a file by which it asks a job's processes what they do; to uninstall is a command of its own.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// Exit statuses. Those of verdicts are for scripts that wait for a check.
const (
	ExitPass         = 0
	ExitError        = 1
	ExitFail         = 2
	ExitInconclusive = 3
)

// Exit statuses of `check node`: what node-problem-detector takes from a custom plugin.
const (
	ExitNodeProven  = 0
	ExitNodeFailed  = 1
	ExitNodeUnknown = 2
)

// systemNamespace is the default namespace of the chart.
const systemNamespace = "evenkeel-system"

// verdictStatus ends the program with the exit status of a verdict. The output is complete.
type verdictStatus evenkeel.Verdict

func (v verdictStatus) Error() string { return "the verdict is " + string(v) }

// Run runs one command line and returns its exit status. Results go to out, progress and errors to errs.
func Run(ctx context.Context, args []string, out, errs io.Writer) int {
	log.SetLogger(logr.Discard()) // without a logger the client library prints a warning
	root := rootCommand()
	root.SetArgs(args)
	root.SetOut(out)
	root.SetErr(errs)
	err := root.ExecuteContext(ctx)
	var verdict verdictStatus
	var answer nodeAnswer
	switch {
	case err == nil:
		return ExitPass
	case errors.As(err, &answer):
		fmt.Fprintln(out, answer.line)
		return answer.status
	case errors.As(err, &queuesRefusal{}):
		return ExitRefused
	case errors.As(err, &problemsFound{}):
		return ExitFail
	case !errors.As(err, &verdict):
		fmt.Fprintln(errs, "error:", oneLine(explainError(err)))
		return ExitError
	case evenkeel.Verdict(verdict) == evenkeel.VerdictFail:
		return ExitFail
	default:
		return ExitInconclusive
	}
}

func rootCommand() *cobra.Command {
	c := &connection{}
	root := &cobra.Command{
		Use:   "kubectl-evenkeel",
		Short: "Network checks, and the state of nodes and jobs",
		Long: `Evenkeel checks the network before jobs take their GPUs. This plugin runs the checks and shows their results.

It finds the cluster as kubectl does, and takes kubectl's flags for that.`,
		Example: `  kubectl evenkeel check run --wait             # is the fabric fine?
  kubectl evenkeel check why gpu-17             # what is wrong with this node?
  kubectl evenkeel why pytorchjob/llama -n ml   # what did my job get, and what does it wait for?
  kubectl evenkeel doctor                       # is the cluster, or the installation, the problem?`,
		SilenceUsage: true, SilenceErrors: true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		// The name that users type.
		Annotations: map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl evenkeel"},
	}
	c.flags(root.PersistentFlags())
	check := &cobra.Command{
		Use:   "check",
		Short: "Run network checks and see their results",
		Example: `  kubectl evenkeel check run --selector pool=h100 --wait
  kubectl evenkeel check status
  kubectl evenkeel check why gpu-17`,
		// Without this, an unknown command would be no error.
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	check.AddCommand(checkRunCommand(c), checkStatusCommand(c), checkWhyCommand(c), checkNodeCommand(c))
	root.AddCommand(check, reportCommand(c), whyCommand(c), doctorCommand(c), uninstallCommand(c))
	return root
}

// A connection has the flags that select the cluster, as kubectl's do.
type connection struct {
	path      string
	overrides clientcmd.ConfigOverrides
}

func (c *connection) flags(flags *pflag.FlagSet) {
	flags.StringVar(&c.path, "kubeconfig", "", "path to the kubeconfig (default: the environment's KUBECONFIG, or ~/.kube/config)")
	clientcmd.BindOverrideFlags(&c.overrides, flags, clientcmd.RecommendedConfigOverrideFlags(""))
	// The other flags work too, and are hidden to keep the help short.
	shown := []string{"kubeconfig", "context", "namespace"}
	flags.VisitAll(func(f *pflag.Flag) {
		f.Hidden = true
		for _, name := range shown {
			if f.Name == name {
				f.Hidden = false
			}
		}
	})
	flags.Lookup("namespace").Usage = "of the job for `why`, else the one that Evenkeel is installed in (default " + systemNamespace + ")"
}

func (c *connection) config() clientcmd.ClientConfig {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = c.path
	return clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &c.overrides)
}

// client makes a client. It sends no request yet.
func (c *connection) client() (client.Client, error) { return c.clientOf(nil) }

// clientOf makes a client for the kinds of the mapper. Without a mapper, the client asks the cluster for its kinds.
func (c *connection) clientOf(mapper meta.RESTMapper) (client.Client, error) {
	config, err := c.config().ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("no cluster configured (set KUBECONFIG or --kubeconfig): %w", err)
	}
	config.QPS = -1 // the API server limits clients by itself
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), evenkeel.AddToScheme(scheme)); err != nil {
		return nil, fmt.Errorf("kinds: %w", err)
	}
	made, err := client.New(config, client.Options{Scheme: scheme, Mapper: mapper})
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", config.Host, err)
	}
	return made, nil
}

// system is the namespace that Evenkeel is installed in.
func (c *connection) system() string {
	if c.overrides.Context.Namespace != "" {
		return c.overrides.Context.Namespace
	}
	return systemNamespace
}

// jobs is the namespace of the user's jobs.
func (c *connection) jobs() (string, error) {
	namespace, _, err := c.config().Namespace()
	if err != nil {
		return "", fmt.Errorf("the kubeconfig's namespace: %w", err)
	}
	return namespace, nil
}

// explainError adds to errors of the API server what to do about them.
func explainError(err error) error {
	switch {
	case meta.IsNoMatchError(err):
		return fmt.Errorf("the cluster does not have Evenkeel's CRDs: install the chart (%w)", err)
	case apierrors.IsUnauthorized(err):
		return fmt.Errorf("the cluster does not accept the kubeconfig's credentials: %w", err)
	}
	return err
}

func oneLine(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }
