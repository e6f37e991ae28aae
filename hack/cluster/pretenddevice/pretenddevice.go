// Package pretenddevice is a kubelet device plugin whose devices do not exist. The scheduler and the kubelet treat a
// node as if it had GPUs, or network cards that pods share.
package pretenddevice

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	plugin "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// DefaultDir is where the kubelet expects plugins' sockets.
const DefaultDir = plugin.DevicePluginPath

const (
	kubeletSocket = "kubelet.sock"
	// checkInterval is the interval at which the socket is checked. A kubelet that starts empties the folder, and expects
	// plugins to register again.
	checkInterval = time.Second
	callTimeout   = 5 * time.Second

	// GPU is the resource of NVIDIA's device plugin.
	GPU = "nvidia.com/gpu"
)

// socketName is the name of the plugin's socket, by which the kubelet identifies plugins.
func socketName(resource string) string {
	return "pretend-" + strings.ReplaceAll(resource, "/", "-") + ".sock"
}

// Run registers count devices of the named resource with the kubelet whose plugin folder is dir, until ctx ends. It
// registers again whenever the kubelet has restarted.
func Run(ctx context.Context, dir, resource string, count int) error {
	for {
		err := serve(ctx, dir, resource, count)
		if ctx.Err() != nil {
			return nil
		}
		log.Printf("registering again: %v", err)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(checkInterval):
		}
	}
}

// serve registers once and serves until the kubelet restarts.
func serve(ctx context.Context, dir, resource string, count int) error {
	socket := filepath.Join(dir, socketName(resource))
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	plugin.RegisterDevicePluginServer(server, newDevices(resource, count))
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	defer server.Stop()
	if err := register(ctx, filepath.Join(dir, kubeletSocket), resource); err != nil {
		return fmt.Errorf("register with the kubelet: %w", err)
	}
	tick := time.NewTicker(checkInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-ended:
			return err
		case <-tick.C:
			if _, err := os.Stat(socket); err != nil {
				return fmt.Errorf("the kubelet has restarted: %w", err)
			}
		}
	}
}

func register(ctx context.Context, kubelet, resource string) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	conn, err := grpc.NewClient("unix://"+kubelet, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = plugin.NewRegistrationClient(conn).Register(ctx, &plugin.RegisterRequest{
		Version: plugin.Version, Endpoint: socketName(resource), ResourceName: resource, Options: &plugin.DevicePluginOptions{},
	})
	return err
}

// devices is the server of the device plugin API.
type devices struct {
	plugin.UnimplementedDevicePluginServer
	resource string
	list     []*plugin.Device
}

func newDevices(resource string, count int) *devices {
	d := &devices{resource: resource}
	for i := range count {
		d.list = append(d.list, &plugin.Device{ID: fmt.Sprint(i), Health: plugin.Healthy})
	}
	return d
}

func (d *devices) GetDevicePluginOptions(context.Context, *plugin.Empty) (*plugin.DevicePluginOptions, error) {
	return &plugin.DevicePluginOptions{}, nil
}

// ListAndWatch sends the devices once: their health never changes.
func (d *devices) ListAndWatch(_ *plugin.Empty, stream plugin.DevicePlugin_ListAndWatchServer) error {
	if err := stream.Send(&plugin.ListAndWatchResponse{Devices: d.list}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

// Allocate sets the variable of NVIDIA's plugin with the container's GPUs. Other devices need no variable.
func (d *devices) Allocate(_ context.Context, request *plugin.AllocateRequest) (*plugin.AllocateResponse, error) {
	response := &plugin.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		allocated := &plugin.ContainerAllocateResponse{}
		if d.resource == GPU {
			allocated.Envs = map[string]string{"NVIDIA_VISIBLE_DEVICES": strings.Join(container.DevicesIds, ",")}
		}
		response.ContainerResponses = append(response.ContainerResponses, allocated)
	}
	return response, nil
}
