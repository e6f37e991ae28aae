// Package slim reduces objects to what is read of them before they come into a cache, and makes equal parts of them
// once. A cluster may have a hundred thousand pods, and the pods of a job differ in little.
package slim

import "sync"

// maxPooled is the number of values at which the pool is emptied. It exceeds the number of jobs in a large cluster.
const maxPooled = 8192

// A Pool makes equal values once. They are shared by objects of a cache, which nobody changes.
type Pool[V any] struct {
	mu   sync.Mutex
	made map[string]V
}

// Get returns the value of the key, which it makes where none of that key was made before.
func (p *Pool[V]) Get(key []byte, create func() V) V {
	p.mu.Lock()
	defer p.mu.Unlock()
	if value, has := p.made[string(key)]; has {
		return value
	}
	if p.made == nil || len(p.made) >= maxPooled {
		p.made = map[string]V{}
	}
	value := create()
	p.made[string(key)] = value
	return value
}
