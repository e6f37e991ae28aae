// Command training-operator runs the training-operator's controller of PyTorchJobs. The operator's own program has a
// webhook too, which only refuses invalid jobs, and which does not compile with the libraries of the cluster's other
// programs.
package main

import (
	"flag"
	"os"

	kubeflow "github.com/kubeflow/training-operator/pkg/apis/kubeflow.org/v1"
	"github.com/kubeflow/training-operator/pkg/config"
	"github.com/kubeflow/training-operator/pkg/controller.v1/common"
	"github.com/kubeflow/training-operator/pkg/controller.v1/pytorch"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
)

func main() {
	c := &config.Config
	c.PyTorchInitContainerTemplateFile = config.PyTorchInitContainerTemplateFileDefault
	c.PyTorchInitContainerMaxTries = config.PyTorchInitContainerMaxTriesDefault
	flag.StringVar(&c.PyTorchInitContainerImage, "pytorch-init-container-image", config.PyTorchInitContainerImageDefault, "image of the container in which workers wait for the master's name")
	flag.Parse()
	ctrl.SetLogger(zap.New(zap.UseDevMode(true)))
	if err := run(); err != nil {
		ctrl.Log.Error(err, "training-operator")
		os.Exit(1)
	}
}

func run() error {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, kubeflow.AddToScheme} {
		if err := add(scheme); err != nil {
			return err
		}
	}
	rest, err := ctrl.GetConfig()
	if err != nil {
		return err
	}
	rest.QPS, rest.Burst = 50, 100
	manager, err := ctrl.NewManager(rest, ctrl.Options{Scheme: scheme, HealthProbeBindAddress: ":8081", Metrics: server.Options{BindAddress: ":8080"}})
	if err != nil {
		return err
	}
	for _, add := range []func(string, healthz.Checker) error{manager.AddHealthzCheck, manager.AddReadyzCheck} {
		if err := add("ping", healthz.Ping); err != nil {
			return err
		}
	}
	if err := pytorch.NewReconciler(manager, common.GenNonGangSchedulerSetupFunc()).SetupWithManager(manager, 1); err != nil {
		return err
	}
	return manager.Start(ctrl.SetupSignalHandler())
}
