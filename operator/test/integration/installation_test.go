package integration

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/api/v1beta1"
	"evenkeel.dev/evenkeel/operator/test/apiserver"
)

const (
	systemNamespace = "evenkeel-system"
	// startTimeout bounds how long a program may take until it is ready, stopTimeout how long until it has ended, which is what the
	// kubelet grants.
	startTimeout = 60 * time.Second
	stopTimeout  = 30 * time.Second
	// delayScale makes the controller collect changes for a short time only.
	delayScale = "--delay-scale=0.1"

	zeros = "0000000000000000000000000000000000000000000000000000000000000000"
	image = "registry.example.com/evenkeel-plugin@sha256:" + zeros

	reductionImage = "registry.example.com/evenkeel-reduction-server@sha256:" + zeros
	ncclTestsImage = "registry.example.com/evenkeel-nccl-tests:1"
	rcclTestsImage = "registry.example.com/evenkeel-rccl-tests:1"
)

var scheme = func() *runtime.Scheme {
	s := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(s), evenkeel.AddToScheme(s), v1beta1.AddToScheme(s)); err != nil {
		panic(err)
	}
	return s
}()

// An installation is the chart's objects on the API server, and the programs that its Deployments describe as processes
// of this machine.
type installation struct {
	root, work, binary string
	// objects are the chart's, by "Kind/name".
	objects map[string]*unstructured.Unstructured
	port    int    // of the webhook
	reports string // where the controller receives what the plugin reports

	webhook, controller, certificates *program
}

// newInstallation renders the chart and applies its objects, as a GitOps tool does.
func newInstallation(root, work, binary string) (*installation, error) {
	i := &installation{root: root, work: work, binary: binary, objects: map[string]*unstructured.Unstructured{}}
	var err error
	if i.port, err = freePort(); err != nil {
		return nil, err
	}
	if i.reports, err = freeUDPAddress(); err != nil {
		return nil, err
	}
	manifests, err := i.manifests()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	if err := admin.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: systemNamespace}}); err != nil {
		return nil, err
	}
	for _, manifest := range manifests {
		object, err := applied(ctx, manifest)
		if err != nil {
			return nil, err
		}
		i.objects[object.GetKind()+"/"+object.GetName()] = object
	}
	return i, nil
}

// manifests are what the chart renders, for this machine; more arguments change its values.
func (i *installation) manifests(args ...string) ([]*unstructured.Unstructured, error) {
	objects, err := apiserver.Chart(i.root, systemNamespace, append([]string{"--no-hooks", "--set", "crds.v1beta1=true", "--set", "defaultProfile.spec.plugin.image=" + image, "--set", "reduction.image=" + reductionImage,
		"--set", "preflight.ncclTestsImage=" + ncclTestsImage, "--set", "preflight.rcclTestsImage=" + rcclTestsImage}, args...)...)
	if err != nil {
		return nil, err
	}
	for _, object := range objects {
		if err := i.adapt(object); err != nil {
			return nil, err
		}
	}
	return objects, nil
}

// adapt changes the one thing that is different here: there is no network of services, so the API server reaches the
// webhook's Service by a name of this machine, on the process's own port. Certificates and names stay the chart's.
func (i *installation) adapt(object *unstructured.Unstructured) error {
	switch object.GetKind() {
	case "CustomResourceDefinition":
		if _, found, err := unstructured.NestedMap(object.Object, "spec", "conversion"); err != nil || !found {
			return err
		}
		return unstructured.SetNestedField(object.Object, int64(i.port), "spec", "conversion", "webhook", "clientConfig", "service", "port")
	case "Service":
		object.Object["spec"] = map[string]any{"type": "ExternalName", "externalName": "localhost"}
	case "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration":
		webhooks, _, err := unstructured.NestedSlice(object.Object, "webhooks")
		if err != nil {
			return err
		}
		for _, w := range webhooks {
			if err := unstructured.SetNestedField(w.(map[string]any), int64(i.port), "clientConfig", "service", "port"); err != nil {
				return err
			}
		}
		return unstructured.SetNestedSlice(object.Object, webhooks, "webhooks")
	}
	return nil
}

// start starts the programs and waits until they are ready.
func (i *installation) start() error {
	var err error
	if i.certificates, err = i.startProgram("evenkeel-certificates"); err != nil {
		return err
	}
	if i.webhook, err = i.startWebhook(); err != nil {
		return err
	}
	if i.controller, err = i.startController(); err != nil {
		return err
	}
	// The controller creates it. Tests of the admission use it from the first one on.
	err = wait.PollUntilContextTimeout(context.Background(), 50*time.Millisecond, startTimeout, true, func(ctx context.Context) (bool, error) {
		var profile evenkeel.NetworkProfile
		err := admin.Get(ctx, client.ObjectKey{Name: "default"}, &profile)
		return err == nil && ready(&profile) != nil, client.IgnoreNotFound(err)
	})
	if err != nil {
		return fmt.Errorf("the default profile is not there: %w", err)
	}
	return nil
}

func (i *installation) stop() error {
	return errors.Join(i.webhook.stop(), i.controller.stop(), i.certificates.stop())
}

func (i *installation) startWebhook() (*program, error) {
	return i.startProgram("evenkeel-webhook", fmt.Sprintf("--port=%d", i.port), "--reports="+i.reports)
}

// startController starts one more controller.
func (i *installation) startController() (*program, error) {
	text, _, err := unstructured.NestedString(i.objects["ConfigMap/evenkeel-default-profile"].Object, "data", "default-profile.yaml")
	if err != nil {
		return nil, err
	}
	file := filepath.Join(i.work, "default-profile.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return nil, err
	}
	address := i.reports
	if used, err := net.ListenPacket("udp", address); err != nil {
		address = "127.0.0.1:0" // a second one: the Service would choose
	} else if err := used.Close(); err != nil {
		return nil, err
	}
	return i.startProgram("evenkeel-controller", "--default-profile="+file, "--report-bind-address="+address, delayScale)
}

// startProgram runs what the chart's Deployment says: its arguments, its service account. Flags replace what depends on
// the machine.
func (i *installation) startProgram(deployment string, flags ...string) (*program, error) {
	spec, _, err := unstructured.NestedMap(i.objects["Deployment/"+deployment].Object, "spec", "template", "spec")
	if err != nil {
		return nil, err
	}
	account, _, err := unstructured.NestedString(spec, "serviceAccountName")
	if err != nil {
		return nil, err
	}
	containers, _, err := unstructured.NestedSlice(spec, "containers")
	if err != nil {
		return nil, err
	}
	args, _, err := unstructured.NestedStringSlice(containers[0].(map[string]any), "args")
	if err != nil {
		return nil, err
	}
	kubeconfig, err := i.kubeconfig(account)
	if err != nil {
		return nil, err
	}
	return launch(i.binary, kubeconfig, append(args, flags...))
}

// kubeconfig acts as the service account, with its permissions and no others.
func (i *installation) kubeconfig(account string) (string, error) {
	c := clientcmdapi.NewConfig()
	c.Clusters["test"] = &clientcmdapi.Cluster{Server: "https://" + strings.TrimPrefix(config.Host, "https://"), CertificateAuthorityData: config.CAData}
	c.AuthInfos["test"] = &clientcmdapi.AuthInfo{
		ClientCertificateData: config.CertData, ClientKeyData: config.KeyData,
		Impersonate:       fmt.Sprintf("system:serviceaccount:%s:%s", systemNamespace, account),
		ImpersonateGroups: []string{"system:serviceaccounts", "system:serviceaccounts:" + systemNamespace, "system:authenticated"},
	}
	c.Contexts["test"] = &clientcmdapi.Context{Cluster: "test", AuthInfo: "test"}
	c.CurrentContext = "test"
	path := filepath.Join(i.work, account+".kubeconfig")
	return path, clientcmd.WriteToFile(*c, path)
}

// A program is a running evenkeel-operator.
type program struct {
	cmd             *exec.Cmd
	probes, metrics string
	output          lockedBuffer
	ended           chan struct{} // closed when err is set
	err             error
}

// launch starts the program and waits until it says that it is ready.
func launch(binary, kubeconfig string, args []string) (*program, error) {
	p := &program{ended: make(chan struct{})}
	for _, address := range []*string{&p.probes, &p.metrics} {
		port, err := freePort()
		if err != nil {
			return nil, err
		}
		*address = fmt.Sprintf("127.0.0.1:%d", port)
	}
	p.cmd = exec.Command(binary, append(args, "--metrics-bind-address="+p.metrics, "--health-probe-bind-address="+p.probes)...)
	p.cmd.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig, "POD_NAMESPACE="+systemNamespace)
	p.cmd.Stdout, p.cmd.Stderr = &p.output, &p.output
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.ended)
	}()
	err := wait.PollUntilContextTimeout(context.Background(), 50*time.Millisecond, startTimeout, true, func(context.Context) (bool, error) {
		select {
		case <-p.ended:
			return false, fmt.Errorf("it ended: %w", p.err)
		default:
			return p.ready(), nil
		}
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s did not become ready: %w\n%s", strings.Join(p.cmd.Args, " "), err, p.output.String()), p.stop())
	}
	return p, nil
}

func (p *program) ready() bool {
	response, err := (&http.Client{Timeout: 5 * time.Second}).Get("http://" + p.probes + "/readyz")
	if err != nil {
		return false
	}
	response.Body.Close()
	return response.StatusCode == http.StatusOK
}

// stop asks the program to end, as the kubelet does, and judges how it ended and whether it lacked a permission.
func (p *program) stop() error {
	if p == nil {
		return nil
	}
	name := strings.Join(p.cmd.Args[:2], " ")
	select {
	case <-p.ended:
		return fmt.Errorf("%s ended by itself: %w", name, p.err)
	default:
	}
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case <-p.ended:
	case <-time.After(stopTimeout):
		return errors.Join(fmt.Errorf("%s did not end within %s of being asked\n%s", name, stopTimeout, p.output.String()), p.kill())
	}
	if p.err != nil {
		return fmt.Errorf("%s: %w\n%s", name, p.err, p.output.String())
	}
	if lines := slices.Collect(func(yield func(string) bool) {
		for line := range strings.SplitSeq(p.output.String(), "\n") {
			if strings.Contains(line, "forbidden") && !yield(line) {
				return
			}
		}
	}); len(lines) > 0 {
		return fmt.Errorf("%s lacks a permission:\n%s", name, strings.Join(lines, "\n"))
	}
	return nil
}

// kill ends the program as a lost node would.
func (p *program) kill() error {
	if err := p.cmd.Process.Kill(); err != nil {
		return err
	}
	<-p.ended
	return nil
}

// A lockedBuffer is written by a process while the test reads it.
type lockedBuffer struct {
	mu     sync.Mutex
	buffer bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.String()
}

// freeUDPAddress is an address of this machine that nothing receives datagrams at.
func freeUDPAddress() (address string, err error) {
	err = tryPorts(func(at string) error {
		conn, err := net.ListenPacket("udp", at)
		if err != nil {
			return err
		}
		address = at
		return conn.Close()
	})
	return address, err
}

func freePort() (port int, err error) {
	err = tryPorts(func(at string) error {
		l, err := net.Listen("tcp", at)
		if err != nil {
			return err
		}
		port = l.Addr().(*net.TCPAddr).Port
		return l.Close()
	})
	return port, err
}

// tryPorts tries ports until one is free. They are not those that the system gives to connections: such a port could be taken by one
// of the API server's while no program listens on it yet, or while it restarts.
func tryPorts(try func(address string) error) (err error) {
	for range 100 {
		if err = try(fmt.Sprintf("127.0.0.1:%d", 10000+rand.IntN(20000))); err == nil {
			return nil
		}
	}
	return err
}

// ready reports whether the profile's status is about its present spec, and what the condition Ready says.
func ready(p *evenkeel.NetworkProfile) *metav1.Condition {
	if p.Status.ObservedGeneration != p.Generation {
		return nil
	}
	return meta.FindStatusCondition(p.Status.Conditions, evenkeel.ConditionReady)
}
