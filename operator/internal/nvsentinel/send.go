package nvsentinel

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const (
	method = "/datamodels.PlatformConnector/HealthEventOccurredV1"
	// idempotencyHeader makes the platform connector store what is sent twice once.
	idempotencyHeader = "idempotency-key"
	socketScheme      = "unix://"
	// sendTimeout bounds one call, in which the platform connector may write into its database.
	sendTimeout = 30 * time.Second
)

// Connector is a platform connector of NVSentinel.
type Connector struct {
	// Target is unix:///PATH for the one of this node, or HOST:PORT for the one of the cluster.
	Target string
	// TokenFile holds the service account's token. If it is empty, no token is sent. CAFile holds the CA certificates for
	// HOST:PORT. Both are read for each call, as they are renewed.
	TokenFile, CAFile string
}

// Validate explains what is wrong with the settings.
func (c Connector) Validate() error {
	path, socket := strings.CutPrefix(c.Target, socketScheme)
	switch {
	case socket && !strings.HasPrefix(path, "/"):
		return fmt.Errorf("%q: want %s/PATH", c.Target, socketScheme)
	case socket && c.CAFile != "":
		return errors.New("a socket has no certificate: leave the CA's file out")
	case !socket && (strings.Contains(c.Target, "/") || !strings.Contains(c.Target, ":")):
		return fmt.Errorf("%q: want unix:///PATH or HOST:PORT", c.Target)
	case !socket && (c.CAFile == "" || c.TokenFile == ""):
		return fmt.Errorf("%q takes TLS and a token: name the files of both", c.Target)
	}
	return nil
}

// Send sends the events in one call. What is sent again with the same key, of letters, digits and ._:- (128 at most),
// is the same for the platform connector. Events are rare, so each call has a connection of its own.
func (c Connector) Send(ctx context.Context, key string, events ...Event) error {
	ctx, cancel := context.WithTimeout(ctx, sendTimeout)
	defer cancel()
	if err := c.send(ctx, key, marshal(events)); err != nil {
		return fmt.Errorf("send a health event to NVSentinel at %s: %w", c.Target, err)
	}
	return nil
}

func (c Connector) send(ctx context.Context, key string, message []byte) error {
	transport, err := c.transport()
	if err != nil {
		return err
	}
	headers := []string{idempotencyHeader, key}
	if c.TokenFile != "" {
		token, err := os.ReadFile(c.TokenFile)
		if err != nil {
			return fmt.Errorf("read the token: %w", err)
		}
		headers = append(headers, "authorization", "Bearer "+strings.TrimSpace(string(token)))
	}
	// No proxy of the environment: the other end is in the cluster.
	conn, err := grpc.NewClient(c.Target, grpc.WithTransportCredentials(transport), grpc.WithNoProxy(), grpc.WithDisableServiceConfig())
	if err != nil {
		return err
	}
	defer conn.Close()
	var reply []byte
	err = conn.Invoke(metadata.AppendToOutgoingContext(ctx, headers...), method, message, &reply, grpc.ForceCodec(encoded{}))
	if s, ok := status.FromError(err); ok && err != nil {
		return fmt.Errorf("%s: %s", s.Code(), s.Message())
	}
	return err
}

func (c Connector) transport() (credentials.TransportCredentials, error) {
	if strings.HasPrefix(c.Target, socketScheme) {
		return insecure.NewCredentials(), nil
	}
	pem, err := os.ReadFile(c.CAFile)
	if err != nil {
		return nil, fmt.Errorf("read the CA: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s has no certificate (PEM)", c.CAFile)
	}
	return credentials.NewTLS(&tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}), nil
}

// encoded passes messages that are encoded already.
type encoded struct{}

func (encoded) Name() string { return "proto" }

func (encoded) Marshal(message any) ([]byte, error) {
	if bytes, ok := message.([]byte); ok {
		return bytes, nil
	}
	return nil, fmt.Errorf("%T is no encoded message", message)
}

func (encoded) Unmarshal(bytes []byte, message any) error {
	into, ok := message.(*[]byte)
	if !ok {
		return fmt.Errorf("%T takes no encoded message", message)
	}
	*into = append([]byte(nil), bytes...)
	return nil
}
