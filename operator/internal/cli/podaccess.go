package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/streaming/pkg/httpstream"
)

// A podAccess runs programs in the user's pods and reads their logs, with the user's own rights.
type podAccess struct {
	config *rest.Config
	core   *rest.RESTClient
}

func (c *connection) pods() (*podAccess, error) {
	config, err := c.config().ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("no cluster configured (set KUBECONFIG or --kubeconfig): %w", err)
	}
	config.QPS = -1 // the API server limits clients by itself
	config.APIPath, config.GroupVersion = "/api", &corev1.SchemeGroupVersion
	config.NegotiatedSerializer = clientgoscheme.Codecs.WithoutConversion()
	core, err := rest.RESTClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", config.Host, err)
	}
	return &podAccess{config: config, core: core}, nil
}

// exec runs a command in a container and returns what it prints, at most so many bytes.
func (p *podAccess) exec(ctx context.Context, pod *corev1.Pod, container string, limit int, command ...string) ([]byte, error) {
	at := p.core.Get().Namespace(pod.Namespace).Resource("pods").Name(pod.Name).SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{Container: container, Command: command, Stdout: true, Stderr: true}, clientgoscheme.ParameterCodec).URL()
	executor, err := p.executor(at)
	if err != nil {
		return nil, fmt.Errorf("prepare to run a command: %w", err)
	}
	out, errs := &limited{limit: limit}, &limited{limit: 4096}
	err = executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: out, Stderr: errs})
	if text := bytes.TrimSpace(errs.Bytes()); err != nil && len(text) > 0 {
		err = fmt.Errorf("%w: %s", err, text)
	}
	return out.Bytes(), err
}

// executor is what kubectl has: WebSocket, and SPDY where a proxy, or the user's rights, do not allow that.
func (p *podAccess) executor(at *url.URL) (remotecommand.Executor, error) {
	first, err := remotecommand.NewWebSocketExecutor(p.config, "GET", at.String())
	if err != nil {
		return nil, err
	}
	second, err := remotecommand.NewSPDYExecutor(p.config, "POST", at)
	if err != nil {
		return nil, err
	}
	return remotecommand.NewFallbackExecutor(first, second, func(err error) bool {
		return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
	})
}

// log reads the last lines of a container's log, or of that of the container before its restart.
func (p *podAccess) log(ctx context.Context, pod *corev1.Pod, container string, previous bool, lines int64, read func(io.Reader) error) error {
	stream, err := p.core.Get().Namespace(pod.Namespace).Resource("pods").Name(pod.Name).SubResource("log").
		Param("container", container).Param("previous", strconv.FormatBool(previous)).Param("tailLines", strconv.FormatInt(lines, 10)).Stream(ctx)
	if err != nil {
		return err
	}
	return errors.Join(read(stream), stream.Close())
}

// A limited buffer refuses more than its limit.
type limited struct {
	bytes.Buffer
	limit int
}

func (l *limited) Write(data []byte) (int, error) {
	if l.Len()+len(data) > l.limit {
		return 0, fmt.Errorf("it prints more than %d bytes", l.limit)
	}
	return l.Buffer.Write(data)
}
