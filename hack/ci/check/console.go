package main

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"
)

// A console prints the output of jobs that run at the same time: whole lines, each behind the time and the job's name.
type console struct {
	out     io.Writer
	started time.Time
	now     func() time.Time

	mu   sync.Mutex
	last time.Time // of the last line
}

func newConsole(out io.Writer, now func() time.Time) *console {
	return &console{out: out, started: now(), now: now, last: now()}
}

// print writes the lines of a text together.
func (c *console) print(name, text string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last = c.now()
	took := c.last.Sub(c.started)
	var b strings.Builder
	for line := range strings.Lines(text) {
		fmt.Fprintf(&b, "%3d:%02d %-16s %s\n", int(took.Minutes()), int(took.Seconds())%60, name, strings.TrimRight(line, "\r\n"))
	}
	io.WriteString(c.out, b.String()) //nolint:errcheck // a closed terminal cannot be reported
}

// plain writes a text as it is.
func (c *console) plain(text string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	io.WriteString(c.out, text) //nolint:errcheck // a closed terminal cannot be reported
}

// quiet is how long nothing has been printed.
func (c *console) quiet() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now().Sub(c.last)
}

// lines is a writer that calls a function with each whole line, its end included. It may be used by several goroutines.
type lines struct {
	take func(line string)

	mu   sync.Mutex
	rest []byte
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rest = append(l.rest, p...)
	for {
		end := bytes.IndexByte(l.rest, '\n')
		if end < 0 {
			return len(p), nil
		}
		line := string(l.rest[:end+1])
		l.rest = l.rest[end+1:]
		l.take(line)
	}
}

// flush takes a last line that has no end.
func (l *lines) flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.rest) > 0 {
		line := string(l.rest) + "\n"
		l.rest = nil
		l.take(line)
	}
}
