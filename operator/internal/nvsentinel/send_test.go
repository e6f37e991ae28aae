package nvsentinel

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"evenkeel.dev/evenkeel/operator/test/nvsentineltest"
)

var fault = Event{
	Check: CheckName, Node: "gpu-17", Fatal: true, Action: ActionContactSupport, ErrorCode: ErrorCode, Strategy: Store,
	Message: "TooSlow: with gpu-3: 0.1 GB/s, minimum 0.85 GB/s", Details: []Detail{{"check", "nightly"}, {"reason", "TooSlow"}},
	Time: time.Date(2026, 11, 25, 1, 2, 3, 4000, time.UTC),
}

func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestHealthEventHasEveryFieldOfTheProtocol(t *testing.T) {
	server, target := nvsentineltest.Start(t)
	healthy := Event{Check: CheckName, Node: "gpu-17", Healthy: true, Message: "with gpu-4: 1 GB/s", Strategy: Execute, Time: fault.Time}
	token := write(t, "token", "secret\n")
	if err := (Connector{Target: target, TokenFile: token}).Send(t.Context(), "a-key", fault, healthy); err != nil {
		t.Fatal(err)
	}
	entities := []struct{ EntityType, EntityValue string }{{"Node", "gpu-17"}}
	want := []nvsentineltest.Call{{Key: "a-key", Authorization: "Bearer secret", Events: []nvsentineltest.Event{
		{
			Version: 1, Agent: "evenkeel", ComponentClass: "Network", CheckName: "EvenkeelNetworkCheck", IsFatal: true, NodeName: "gpu-17",
			Message: fault.Message, RecommendedAction: "CONTACT_SUPPORT", ErrorCode: []string{"EVENKEEL_NETWORK_UNHEALTHY"}, EntitiesImpacted: entities,
			Metadata: map[string]string{"check": "nightly", "reason": "TooSlow"}, GeneratedTimestamp: "2026-11-25T01:02:03.000004Z", ProcessingStrategy: "STORE_ONLY",
		},
		{
			Version: 1, Agent: "evenkeel", ComponentClass: "Network", CheckName: "EvenkeelNetworkCheck", IsHealthy: true, NodeName: "gpu-17",
			Message: "with gpu-4: 1 GB/s", RecommendedAction: "NONE", ErrorCode: []string{}, EntitiesImpacted: entities,
			Metadata: map[string]string{}, GeneratedTimestamp: "2026-11-25T01:02:03.000004Z", ProcessingStrategy: "EXECUTE_REMEDIATION",
		},
	}}}
	if got := server.Calls(); !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestHealthEventOverTLS(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	server, target := nvsentineltest.StartTLS(t, tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key})
	ca := write(t, "ca.crt", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})))
	c := Connector{Target: target, CAFile: ca, TokenFile: write(t, "token", "secret")}
	if err := c.Send(t.Context(), "k", fault); err != nil || len(server.Calls()) != 1 {
		t.Fatalf("%d calls, %v", len(server.Calls()), err)
	}
	// A connector that anybody could be gets no token.
	c.CAFile = write(t, "other.crt", otherCA(t))
	if err := c.Send(t.Context(), "k", fault); err == nil || !strings.Contains(err.Error(), "certificate") || len(server.Calls()) != 1 {
		t.Errorf("a certificate of another CA: %d calls, %v", len(server.Calls()), err)
	}
}

// otherCA is a certificate that signed nothing.
func otherCA(t *testing.T) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(2), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

func TestHealthEventErrorsNameTheConnector(t *testing.T) {
	server, target := nvsentineltest.Start(t)
	server.Refuse(codes.PermissionDenied, "the token may not name other nodes")
	gone := "unix://" + filepath.Join(t.TempDir(), "none.sock")
	for _, test := range []struct {
		connector Connector
		want      string
	}{
		{Connector{Target: target}, target + ": PermissionDenied: the token may not name other nodes"},
		{Connector{Target: gone}, gone + ": Unavailable: "},
		{Connector{Target: target, TokenFile: "/nowhere/token"}, "read the token: open /nowhere/token"},
		{Connector{Target: "127.0.0.1:1", CAFile: "/nowhere/ca"}, "read the CA: open /nowhere/ca"},
		{Connector{Target: "127.0.0.1:1", CAFile: write(t, "ca", "no PEM")}, "has no certificate (PEM)"},
	} {
		if err := test.connector.Send(t.Context(), "k", fault); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%+v: %v, want %q", test.connector, err, test.want)
		}
	}
}

func TestConnectorSettingsAreValidated(t *testing.T) {
	for target, want := range map[string]string{
		"unix:///run/s": "", "unix://run/s": "want unix:///PATH", "host:1": "name the files of both", "host": "want unix:///PATH or HOST:PORT", "https://host:1": "want unix:///PATH or HOST:PORT", "": "want unix:///PATH or HOST:PORT",
	} {
		if err := (Connector{Target: target}).Validate(); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", target, err, want)
		}
	}
	if err := (Connector{Target: "host:1", CAFile: "a", TokenFile: "b"}).Validate(); err != nil {
		t.Error(err)
	}
	if err := (Connector{Target: "unix:///run/s", CAFile: "a"}).Validate(); err == nil {
		t.Error("a socket with a CA")
	}
	if _, err := ParseStrategy("store_only"); err == nil {
		t.Error("store_only is a strategy")
	}
}
