package workload

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
	"evenkeel.dev/evenkeel/hack/internal/child"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

const opensslPort = "7443"

// Cipher is what one core encrypts, of records as TLS has them, without a network.
func Cipher(name string) experiment.Contender {
	return experiment.Contender{Name: name, Run: func(ctx context.Context, _ experiment.Run) (experiment.Measured, error) {
		started := time.Now()
		cmd := child.Command(ctx, "", "openssl", "speed", "-mr", "-elapsed", "-seconds", "1", "-bytes", "16384", "-aead", "-evp", "aes-128-gcm")
		text, err := proc.Output(ctx, cmd)
		if err != nil {
			return experiment.Measured{}, fmt.Errorf("openssl speed: %w", err)
		}
		own := proc.Share(proc.CPUTime(cmd), time.Since(started))
		for line := range strings.Lines(string(text)) {
			fields := strings.Split(strings.TrimSpace(line), ":")
			if fields[0] != "+F" {
				continue
			}
			if speed, err := strconv.ParseFloat(fields[len(fields)-1], 64); err == nil && speed > 0 {
				return experiment.Measured{Values: Transfer{}.outcome(speed/1e9, 0, 1e9/speed, 0, own)}, nil
			}
		}
		return experiment.Measured{}, fmt.Errorf("openssl speed: no line with +F in %q", text)
	}}
}

// OpenSSL sends by a TLS 1.3 connection between openssl's own programs, with this pre-shared key, in hexadecimal.
func (t Transfer) OpenSSL(name, key string) experiment.Contender {
	return experiment.Contender{Name: name, Reference: true, Run: func(ctx context.Context, r experiment.Run) (experiment.Measured, error) {
		got, err := t.openssl(ctx, r.Lab, key)
		return experiment.Measured{Values: got}, err
	}}
}

func (t Transfer) openssl(ctx context.Context, lab *netns.Lab, key string) (got outcome, err error) {
	common := []string{"-tls1_3", "-psk", key, "-ciphersuites", "TLS_AES_128_GCM_SHA256", "-quiet"}
	server, err := lab.Command(ctx, netns.H2, append([]string{"openssl", "s_server", "-nocert", "-accept", opensslPort}, common...)...)
	if err != nil {
		return nil, err
	}
	// What it receives goes to /dev/null, and what it says is part of an error.
	var said bytes.Buffer
	server.Stderr = &said
	// It would close the connection at the end of its input.
	input, err := server.StdinPipe()
	if err != nil {
		return nil, err
	}
	defer input.Close()
	started := time.Now()
	if err := server.Start(); err != nil {
		return nil, fmt.Errorf("openssl s_server: %w", err)
	}
	var rate float64
	var sending time.Duration
	defer func() {
		// It serves until it is ended.
		_ = server.Process.Kill()
		_ = server.Wait()
		if err == nil {
			receiving, sent := proc.CPUTime(server), rate*t.Length.Seconds()
			got = t.outcome(rate, 0, sending.Seconds()/sent, receiving.Seconds()/sent, proc.Share(sending+receiving, time.Since(started)))
		}
	}()
	if err := awaitListener(ctx, lab, netns.H2); err != nil {
		return nil, fmt.Errorf("openssl s_server: %w: %s", err, said.Bytes())
	}
	zero, err := os.Open("/dev/zero")
	if err != nil {
		return nil, err
	}
	defer zero.Close()
	address := lab.Address(netns.H2).String() + ":" + opensslPort
	client, err := lab.Command(ctx, netns.H1, append([]string{"openssl", "s_client", "-connect", address}, common...)...)
	if err != nil {
		return nil, err
	}
	client.Stdin = zero
	if err := client.Start(); err != nil {
		return nil, fmt.Errorf("openssl s_client: %w", err)
	}
	_, before, err := lab.Traffic(netns.H1)
	waited := pause(ctx, t.Length)
	_, after, errAfter := lab.Traffic(netns.H1)
	_ = client.Process.Kill()
	_ = client.Wait()
	if err := errors.Join(err, errAfter, waited); err != nil {
		return nil, err
	}
	rate = float64(after-before) / t.Length.Seconds() / 1e9
	if rate < 0.01 {
		return nil, fmt.Errorf("openssl sent almost nothing: %s", said.Bytes())
	}
	sending = proc.CPUTime(client)
	return nil, nil
}

// awaitListener waits until something listens at opensslPort on a host.
func awaitListener(ctx context.Context, lab *netns.Lab, host netns.Host) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	err := until(ctx, func() (bool, error) {
		text, err := lab.Exec(ctx, host, "ss", "-ltnH", "sport", "=", ":"+opensslPort)
		return err == nil && text != "", nil
	})
	if err != nil {
		return errors.New("it does not listen")
	}
	return nil
}
