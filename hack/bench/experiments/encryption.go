package experiments

import (
	"crypto/rand"
	"encoding/hex"
	"slices"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/workload"
)

// What limits the cases of encryption that may miss a goal.
const (
	limitsEncryption = "each byte is encrypted at one end and decrypted at the other, on the same processors. AES-GCM alone takes two passes at the rate of its row. " +
		"Memory adds to it: a record is read and written once more at each end, and bytes are received into a buffer before they are opened"
	limitsHandshake = "each of the flows has a handshake of its own, with a key exchange (X25519) and a signature (Ed25519) at both ends. Session tickets would spare the signatures alone. " +
		"Keys of further flows that follow from the first one's would spare most, and flows would not be sessions of their own"
)

// encryption measures what encryption costs, on networks and loads of the experiment tcp.
func encryption() experiment.Experiment {
	const (
		clear, encrypted = "in clear", "encrypted"
		cipher, openssl  = "AES-128-GCM alone, one core", "openssl s_client, one connection"
		wireGuard        = "in clear through WireGuard in user space"
	)
	cases := []string{"four-links", "slow-link", "capped-flows", "silent-link", "one-connection", "four-connections", "ping-pong"}
	secret := make([]byte, 32)
	rand.Read(secret) //nolint:errcheck // it never fails
	key := hex.EncodeToString(secret)
	environment := []string{"EVENKEEL_JOB_KEY=" + key, "EVENKEEL_ENCRYPTION=required"}
	wireGuardProgram, open := opened(workload.WireGuardProgram)
	return experiment.Experiment{
		Name: "encryption", Title: "What encryption costs", Summary: "the plugin encrypted, against the plugin in clear, openssl and WireGuard", Subject: encrypted,
		About: "[What is protected from whom](../encryption.md) is another page. In each round the plugin sends in clear, and encrypted with\n" +
			"`EVENKEEL_ENCRYPTION=required`: TLS 1.3 with AES-128-GCM, one session for each flow, records made in user space. Networks and loads are those of\n" +
			"[TCP](tcp.md). Both hosts share the processors, so each byte is encrypted and decrypted on the same cores. What one core's AES-GCM does is measured\n" +
			"in the same rounds (`openssl speed -aead -evp aes-128-gcm`, records of 16 KiB). GB/s are 10^9 bytes of payload.",
		Notes: "WireGuard is `wireguard-go`, its program for systems whose kernel lacks it; one tunnel carries all flows. [Gloo with TLS](collectives-tls.md) is\n" +
			"measured against the collectives.\n\nNot measured: records made by the kernel (kTLS) and WireGuard in the kernel.",
		Rounds: 10, QuickRounds: 3,
		Open: open,
		Cases: func(quick bool) []experiment.Case {
			var all []experiment.Case
			for _, of := range transfers(quick) {
				if !slices.Contains(cases, of.name) {
					continue
				}
				c := of.asCase()
				c.Contenders = []experiment.Contender{of.load.Plugin(clear), of.load.Plugin(encrypted, environment...)}
				switch {
				case of.load.PingPong:
					c.Goals = []experiment.Goal{shareOf(clear, workload.RoundTrip, 1.3, "")}
				case of.load.Limit > 0:
					c.Goals = []experiment.Goal{shareOf(clear, workload.Rate, 0.95, "")}
				default:
					c.More = append(c.More, workload.PerCore)
					c.Contenders = append(c.Contenders, of.load.WireGuard(wireGuard, wireGuardProgram), workload.Cipher(cipher))
					c.Goals = []experiment.Goal{
						shareOf(clear, workload.Processor, 1.5, limitsEncryption), shareOf(cipher, workload.PerCore, 0.8, limitsEncryption),
						shareOf(wireGuard, workload.Rate, 1, limitsEncryption),
					}
					if of.load.Connections == 1 {
						c.Contenders = append(c.Contenders, of.load.OpenSSL(openssl, key))
						c.Goals = append(c.Goals, shareOf(openssl, workload.Rate, 1, limitsEncryption))
					}
				}
				all = append(all, c)
			}
			connections := workload.Connections{Pairs: 64, Processes: 1}
			return append(all, experiment.Case{
				Name: "set-up", Title: "64 connections over loopback", Headline: workload.Opening, More: []experiment.Quantity{workload.Closing},
				Contenders: []experiment.Contender{connections.Plugin(clear), connections.Plugin(encrypted, environment...)},
				Goals:      []experiment.Goal{shareOf(clear, workload.Opening, 1.5, limitsHandshake)},
			})
		},
	}
}
