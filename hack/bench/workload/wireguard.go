package workload

import (
	"context"
	"crypto/ecdh"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

const (
	wireguardPort = 51820
	// tunnelPrefix begins the names of the tunnel's devices. Their control sockets are in one folder, so the names differ.
	tunnelPrefix = "ekwg"
	// tunnelWait is how long the program may take to make its device.
	tunnelWait = 5 * time.Second
)

// WireGuardProgram builds the program of [Transfer.WireGuard], which is WireGuard's own for systems whose kernel lacks
// it, and installs what configures it.
func WireGuardProgram(ctx context.Context, progress io.Writer) (string, error) {
	box, err := toolbox.New(progress)
	if err != nil {
		return "", err
	}
	program, err := box.Path(ctx, "wireguard-go")
	if err != nil {
		return "", err
	}
	return program, toolbox.EnsurePrograms(ctx, progress, []toolbox.Program{{Name: "wg", Package: "wireguard-tools"}})
}

// WireGuard sends by the plugin in clear, through a tunnel between the hosts. The program is known when it runs.
func (t Transfer) WireGuard(name string, program func() string) experiment.Contender {
	d := &driven{Transfer: t, environment: []string{"NCCL_SOCKET_IFNAME=" + tunnelPrefix}, speed: map[string]float64{}}
	return experiment.Contender{Name: name, Reference: true, Run: func(ctx context.Context, r experiment.Run) (m experiment.Measured, err error) {
		ends, err := upTunnel(ctx, r.Lab, program())
		if err != nil {
			return m, err
		}
		m, err = d.run(ctx, r, "--plugin", r.Library)
		var carried float64
		if err == nil {
			carried, err = ends.carried(ctx, r.Lab)
		}
		lasted := time.Since(ends.since)
		ends.down()
		if err != nil {
			return m, err
		}
		// The tunnel's processor time is that of all it has carried, with the trial and the warm-up.
		sending, receiving := ends.ends[0].CPUPerGB(carried), ends.ends[1].CPUPerGB(carried)
		own := m.Values[OwnShare]/100 + proc.Share(proc.CPUTime(ends.ends[0].Cmd)+proc.CPUTime(ends.ends[1].Cmd), lasted)
		m.Values = t.outcome(m.Values[Rate], 0, m.Values[Sending]+sending, m.Values[Receiving]+receiving, own)
		return m, nil
	}}
}

// A tunnel runs between both hosts until it is taken down.
type tunnel struct {
	since time.Time
	ends  []*proc.Process
}

func tunnelDevice(end int) string { return fmt.Sprintf("%s%d", tunnelPrefix, end+1) }

// upTunnel starts the program on both hosts, with new keys.
func upTunnel(ctx context.Context, lab *netns.Lab, program string) (t *tunnel, err error) {
	t = &tunnel{since: time.Now()}
	defer func() {
		if err != nil {
			err = fmt.Errorf("WireGuard: %w", err)
			for _, end := range t.ends {
				err = end.Kill(err)
			}
		}
	}()
	folder, err := os.MkdirTemp("", "evenkeel-wireguard-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(folder)
	hosts := []netns.Host{netns.H1, netns.H2}
	var keys []*ecdh.PrivateKey
	for range hosts {
		key, err := ecdh.X25519().GenerateKey(rand.Reader)
		if err != nil {
			return t, err
		}
		keys = append(keys, key)
	}
	for i, host := range hosts {
		device, peer := tunnelDevice(i), 1-i
		end, err := proc.Start(ctx, lab, host, "WireGuard on "+string(host), []string{"WG_PROCESS_FOREGROUND=1"}, program, device)
		if err != nil {
			return t, err
		}
		t.ends = append(t.ends, end)
		if err := awaitTunnel(ctx, lab, host, device); err != nil {
			return t, err
		}
		config := fmt.Sprintf("[Interface]\nPrivateKey = %s\nListenPort = %d\n[Peer]\nPublicKey = %s\nEndpoint = %s:%d\nAllowedIPs = %s/32\n",
			base64.StdEncoding.EncodeToString(keys[i].Bytes()), wireguardPort, base64.StdEncoding.EncodeToString(keys[peer].PublicKey().Bytes()),
			lab.Address(hosts[peer]), wireguardPort, tunnelAddress(peer))
		file := filepath.Join(folder, device)
		if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
			return t, err
		}
		for _, argv := range [][]string{
			{"wg", "setconf", device, file},
			{"ip", "address", "add", tunnelAddress(i) + "/24", "dev", device},
			{"ip", "link", "set", "dev", device, "up"},
		} {
			if _, err := lab.Exec(ctx, host, argv...); err != nil {
				return t, err
			}
		}
	}
	return t, nil
}

// tunnelAddress is in a network that no lab uses.
func tunnelAddress(end int) string { return "10.251.0." + strconv.Itoa(end+1) }

// down ends the program on both hosts, and with it its devices.
func (t *tunnel) down() {
	for _, end := range t.ends {
		// How it ends does not matter.
		_ = end.Kill(nil)
	}
}

var transferred = regexp.MustCompile(`^\S+\t(\d+)\t(\d+)\n?$`)

// carried is what the first host has sent through the tunnel, in bytes.
func (t *tunnel) carried(ctx context.Context, lab *netns.Lab) (float64, error) {
	text, err := lab.Exec(ctx, netns.H1, "wg", "show", tunnelDevice(0), "transfer")
	if err != nil {
		return 0, err
	}
	// Received and sent, of its one peer (wg(8)).
	found := transferred.FindStringSubmatch(text)
	if found == nil {
		return 0, fmt.Errorf("wg show transfer: unexpected %q", text)
	}
	sent, err := strconv.ParseFloat(found[2], 64)
	if err == nil && sent == 0 {
		err = errors.New("nothing went through the tunnel")
	}
	return sent, err
}

// awaitTunnel waits until the program takes commands for a device.
func awaitTunnel(ctx context.Context, lab *netns.Lab, host netns.Host, device string) error {
	ctx, cancel := context.WithTimeout(ctx, tunnelWait)
	defer cancel()
	var last error
	err := until(ctx, func() (bool, error) {
		text, err := lab.Exec(ctx, host, "wg", "show", device)
		last = err
		return err == nil && strings.Contains(text, device), nil
	})
	if err != nil {
		return errors.Join(fmt.Errorf("no device %s within %s", device, tunnelWait), last)
	}
	return nil
}
