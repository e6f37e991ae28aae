package local

import (
	"context"
	"net"
)

// DialRegistry returns a function that connects to the cluster's registry, which listens in the cluster's network only,
// and one that ends this. The network and the address that it is given are not used.
func (c *Cluster) DialRegistry() (dial func(ctx context.Context, network, address string) (net.Conn, error), end func(), err error) {
	thread, err := newNetThread(netnsName(c.config.Name, "cp"))
	if err != nil {
		return nil, nil, err
	}
	return func(ctx context.Context, _, _ string) (net.Conn, error) { return thread.dial(ctx, "tcp", Registry) }, thread.close, nil
}
