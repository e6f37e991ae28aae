package main

import (
	"context"
	"crypto/ecdh"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

const (
	wireguardName = "in clear through WireGuard in user space"
	wireguardPort = 51820
	// tunnelPrefix begins the names of the tunnel's devices. Their control sockets are in one folder, so the names differ.
	tunnelPrefix = "ekwg"
	// tunnelWait is how long the program may take to make its device.
	tunnelWait = 5 * time.Second
)

// wireguard is the plugin in clear, through a tunnel between the hosts. The tunnel's program is WireGuard's own for systems whose kernel
// lacks it.
type wireguard struct {
	plugin  *plugin
	program string
}

// newWireguard builds the tunnel's program. The plugin sends in clear.
func newWireguard(ctx context.Context, box *toolbox.Toolbox, clear *plugin) (*wireguard, error) {
	program, err := box.Path(ctx, "wireguard-go")
	if err != nil {
		return nil, err
	}
	if err := toolbox.EnsurePrograms(ctx, os.Stderr, []toolbox.Program{{Name: "wg", Package: "wireguard-tools"}}); err != nil {
		return nil, err
	}
	inside := *clear
	inside.label, inside.speed = wireguardName, map[string]float64{}
	inside.environment = append(inside.environment, "NCCL_SOCKET_IFNAME="+tunnelPrefix)
	return &wireguard{&inside, program}, nil
}

func (w *wireguard) name() string { return wireguardName }

func (w *wireguard) prepare(ctx context.Context, lab *netns.Lab, c benchCase) (err error) {
	t, err := w.up(ctx, lab)
	if err != nil {
		return err
	}
	defer t.down()
	return w.plugin.prepare(ctx, lab, c)
}

func (w *wireguard) run(ctx context.Context, lab *netns.Lab, c benchCase) (outcome, error) {
	t, err := w.up(ctx, lab)
	if err != nil {
		return outcome{}, err
	}
	got, err := w.plugin.run(ctx, lab, c)
	var carried float64
	if err == nil {
		carried, err = t.carried(ctx, lab)
	}
	lasted := time.Since(t.since)
	t.down()
	if err != nil {
		return outcome{}, err
	}
	// The tunnel's processor time is that of all it has carried, with the warm-up.
	got.Send += t.ends[0].CPUPerGB(carried)
	got.Receive += t.ends[1].CPUPerGB(carried)
	got.Own += proc.Share(proc.CPUTime(t.ends[0].Cmd)+proc.CPUTime(t.ends[1].Cmd), lasted)
	return got, nil
}

// A tunnel runs between both hosts until it is taken down.
type tunnel struct {
	since time.Time
	ends  []*proc.Process
}

func tunnelDevice(end int) string { return fmt.Sprintf("%s%d", tunnelPrefix, end+1) }

// up starts the program on both hosts, with new keys.
func (w *wireguard) up(ctx context.Context, lab *netns.Lab) (t *tunnel, err error) {
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
		end, err := proc.Start(ctx, lab, host, "WireGuard on "+string(host), []string{"WG_PROCESS_FOREGROUND=1"}, w.program, device)
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
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		text, err := lab.Exec(ctx, host, "wg", "show", device)
		if err == nil && strings.Contains(text, device) {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("no device %s within %s", device, tunnelWait), err)
		case <-tick.C:
		}
	}
}
