package local

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	corev1 "k8s.io/api/core/v1"

	"evenkeel.dev/evenkeel/hack/cluster/pretenddevice"
)

// An api is a client for the few requests of this package to the API server.
type api struct {
	client *http.Client
	base   string
}

type dialFunc func(ctx context.Context, network, address string) (net.Conn, error)

// newAPI uses the certificate called name, and ca.crt, in a folder. dial may
// be nil.
func newAPI(base, folder, name string, dial dialFunc) (*api, error) {
	pair, err := tls.LoadX509KeyPair(filepath.Join(folder, name+".crt"), filepath.Join(folder, name+".key"))
	if err != nil {
		return nil, err
	}
	ca, err := os.ReadFile(filepath.Join(folder, "ca.crt"))
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return nil, fmt.Errorf("%s/ca.crt holds no certificate", folder)
	}
	return &api{base: base, client: &http.Client{
		Timeout: 5 * time.Second,
		Transport: &http.Transport{
			DialContext:       dial,
			TLSClientConfig:   &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}},
			DisableKeepAlives: true, // few requests, and the server may restart
		},
	}}, nil
}

func (a *api) get(ctx context.Context, path string) ([]byte, error) {
	return httpGet(ctx, a.client, a.base+path)
}

func httpGet(ctx context.Context, client *http.Client, url string) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	response, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, 64<<20))
	if err != nil {
		return nil, err
	}
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s: %.200s", url, response.Status, body)
	}
	return body, nil
}

// ready returns nil when the API server is ready.
func (a *api) ready(ctx context.Context) error {
	_, err := a.get(ctx, "/readyz")
	return err
}

const gpuResource = pretenddevice.GPU

// nodesReady returns nil when all the cluster's nodes are ready and offer
// their pretend GPUs.
func (a *api) nodesReady(ctx context.Context, c Config) error {
	body, err := a.get(ctx, "/api/v1/nodes")
	if err != nil {
		return err
	}
	var list corev1.NodeList
	if err := json.Unmarshal(body, &list); err != nil {
		return err
	}
	return checkNodes(list.Items, c)
}

// podsAllowed returns nil when pods can be created: each needs its namespace's service account, which the controller
// manager creates.
func (a *api) podsAllowed(ctx context.Context) error {
	_, err := a.get(ctx, "/api/v1/namespaces/default/serviceaccounts/default")
	return err
}

func checkNodes(nodes []corev1.Node, c Config) error {
	byName := map[string]*corev1.Node{}
	for i := range nodes {
		byName[nodes[i].Name] = &nodes[i]
	}
	var all []error
	for _, plan := range c.plan() {
		node, ok := byName[plan.name]
		switch {
		case !ok:
			all = append(all, fmt.Errorf("node %s has not registered", plan.name))
		case !isReady(node):
			all = append(all, fmt.Errorf("node %s is not ready", plan.name))
		default:
			if gpus := node.Status.Allocatable[gpuResource]; gpus.Value() != int64(c.GPUs) {
				all = append(all, fmt.Errorf("node %s offers %d of %d pretend GPUs", plan.name, gpus.Value(), c.GPUs))
			}
		}
	}
	return errors.Join(all...)
}

func isReady(node *corev1.Node) bool {
	for _, condition := range node.Status.Conditions {
		if condition.Type == corev1.NodeReady {
			return condition.Status == corev1.ConditionTrue
		}
	}
	return false
}
