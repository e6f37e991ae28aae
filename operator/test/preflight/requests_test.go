package preflight

import (
	"net/http"
	"net/url"
	"slices"
	"sync"
	"testing"

	"k8s.io/client-go/rest"
)

// reads are the requests of controllers that read.
type reads struct {
	mu  sync.Mutex
	all []*url.URL
}

// recordReads records what the controllers read that the test starts from now on.
func recordReads(t *testing.T) *reads {
	t.Helper()
	r, whole := &reads{}, config
	config = rest.CopyConfig(config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(request *http.Request) (*http.Response, error) {
			if request.Method == http.MethodGet {
				r.mu.Lock()
				r.all = append(r.all, request.URL)
				r.mu.Unlock()
			}
			return next.RoundTrip(request)
		})
	})
	t.Cleanup(func() { config = whole })
	return r
}

// of are the requests so far that fit.
func (r *reads) of(fits func(*url.URL) bool) []*url.URL {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(r.all), func(u *url.URL) bool { return !fits(u) })
}
