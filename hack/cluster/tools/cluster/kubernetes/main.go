// Command kubernetes is every Kubernetes program the local cluster runs, in
// one binary: the name it is called by says which one it is. One binary is a
// quarter of the size of six, and links once.
package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	_ "time/tzdata" // CronJobs name time zones; the machine may have no zone files

	"github.com/spf13/cobra"
	_ "k8s.io/client-go/plugin/pkg/client/auth" // credential plugins a kubeconfig may name
	"k8s.io/component-base/cli"
	"k8s.io/component-base/logs"
	_ "k8s.io/component-base/logs/json/register"          // --logging-format=json
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // client and work queue metrics
	_ "k8s.io/component-base/metrics/prometheus/version"  // build information metric
	"k8s.io/kubectl/pkg/cmd"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	servers := map[string]func() *cobra.Command{
		"kube-apiserver":          apiserver.NewAPIServerCommand,
		"kube-controller-manager": controllermanager.NewControllerManagerCommand,
		"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
		"kube-proxy":              proxy.NewProxyCommand,
		"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
	}
	name := filepath.Base(os.Args[0])
	if name == "kubectl" {
		logs.GlogSetter(cmd.GetLogVerbosity(os.Args))
		if err := cli.RunNoErrOutput(cmd.NewDefaultKubectlCommand()); err != nil {
			cmdutil.CheckErr(err)
		}
		return
	}
	server, ok := servers[name]
	if !ok {
		names := append(slices.Sorted(maps.Keys(servers)), "kubectl")
		fmt.Fprintf(os.Stderr, "called as %q: call it through a link named one of %s\n", name, strings.Join(names, ", "))
		os.Exit(2)
	}
	os.Exit(cli.Run(server()))
}
