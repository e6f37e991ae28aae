package pretenddevice

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	plugin "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// kubelet is the part of a kubelet that plugins register with.
type kubelet struct {
	plugin.UnimplementedRegistrationServer
	registered chan *plugin.RegisterRequest
}

func (k *kubelet) Register(_ context.Context, request *plugin.RegisterRequest) (*plugin.Empty, error) {
	k.registered <- request
	return &plugin.Empty{}, nil
}

func startKubelet(t *testing.T, dir string) *kubelet {
	t.Helper()
	k := &kubelet{registered: make(chan *plugin.RegisterRequest, 10)}
	listener, err := net.Listen("unix", filepath.Join(dir, kubeletSocket))
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	plugin.RegisterRegistrationServer(server, k)
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	return k
}

func (k *kubelet) await(t *testing.T) *plugin.RegisterRequest {
	t.Helper()
	select {
	case request := <-k.registered:
		return request
	case <-time.After(30 * time.Second):
		t.Fatal("the plugin did not register")
		return nil
	}
}

func TestPretendDevicesAreAllocated(t *testing.T) {
	dir := t.TempDir()
	k := startKubelet(t, dir)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, dir, GPU, 3) }()
	request := k.await(t)
	if request.ResourceName != GPU || request.Version != plugin.Version {
		t.Errorf("registered %v", request)
	}
	conn, err := grpc.NewClient("unix://"+filepath.Join(dir, request.Endpoint), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	client := plugin.NewDevicePluginClient(conn)
	call, done := context.WithTimeout(t.Context(), 30*time.Second)
	defer done()
	stream, err := client.ListAndWatch(call, &plugin.Empty{})
	if err != nil {
		t.Fatal(err)
	}
	list, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	if len(list.Devices) != 3 {
		t.Errorf("%d devices are offered", len(list.Devices))
	}
	for _, device := range list.Devices {
		if device.Health != plugin.Healthy {
			t.Errorf("device %s is %s", device.ID, device.Health)
		}
	}
	response, err := client.Allocate(call, &plugin.AllocateRequest{ContainerRequests: []*plugin.ContainerAllocateRequest{
		{DevicesIds: []string{"0", "2"}}, {DevicesIds: []string{"1"}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	if len(response.ContainerResponses) != 2 || response.ContainerResponses[0].Envs["NVIDIA_VISIBLE_DEVICES"] != "0,2" {
		t.Errorf("allocated %v", response)
	}
	cancel()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("the plugin went on")
	}
}

func TestPretendDevicesRegisterAgainAfterKubeletRestart(t *testing.T) {
	dir := t.TempDir()
	k := startKubelet(t, dir)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, dir, "example.com/gpu", 1) }()
	defer func() { cancel(); <-ended }()
	first := k.await(t)
	// A kubelet that starts empties the folder.
	if err := os.Remove(filepath.Join(dir, first.Endpoint)); err != nil {
		t.Fatal(err)
	}
	k.await(t)
}
