package main

import (
	"context"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/util/wait"
)

// lookupInterval is how often the address of the Service is looked up, which hardly ever changes. lookupTimeout bounds each.
const lookupInterval, lookupTimeout = time.Minute, 5 * time.Second

// A reportAddress is the address to which the plugin reports. Pods get a number: the plugin looks up no names, since that could
// disturb a process that forks. Without an address, pods are made that report nothing.
type reportAddress struct {
	// service is HOST:PORT; empty: there is none.
	service string
	log     logr.Logger
	current atomic.Pointer[string]
}

// get returns the address; empty if it is not known.
func (a *reportAddress) get() string {
	if known := a.current.Load(); known != nil {
		return *known
	}
	return ""
}

// Start looks the address up until the context is done.
func (a *reportAddress) Start(ctx context.Context) error {
	if a.service == "" {
		return nil
	}
	failed := ""
	wait.UntilWithContext(ctx, func(ctx context.Context) {
		limited, cancel := context.WithTimeout(ctx, lookupTimeout)
		defer cancel()
		found, err := lookUp(limited, a.service)
		switch {
		case err == nil:
			a.current.Store(&found)
			failed = ""
		case err.Error() != failed && ctx.Err() == nil: // the last address stays
			failed = err.Error()
			a.log.Info("the address for the plugin's reports is not known", "reason", failed)
		}
	}, lookupInterval)
	return nil
}

// NeedLeaderElection is false: every webhook needs the address.
func (a *reportAddress) NeedLeaderElection() bool { return false }

// lookUp replaces the host of HOST:PORT by its address.
func lookUp(ctx context.Context, service string) (string, error) {
	host, port, err := net.SplitHostPort(service)
	if err != nil {
		return "", fmt.Errorf("%q: want HOST:PORT: %w", service, err)
	}
	addresses, err := net.DefaultResolver.LookupHost(ctx, host)
	if err != nil {
		return "", fmt.Errorf("look up %s: %w", host, err)
	}
	return net.JoinHostPort(addresses[0], port), nil
}
