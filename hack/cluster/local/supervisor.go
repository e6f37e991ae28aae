package local

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

const (
	// startTimeout is the maximum time of each part's start; it is long, as machines under load are slow.
	startTimeout = 3 * time.Minute
	// crashLimit is the maximum number of exits of a process during the start.
	crashLimit  = 3
	stopTimeout = 20 * time.Second
)

// The messages between the supervisor and the Up that started it, one a line.
const (
	msgProgress = "progress "
	msgError    = "error "
	msgReady    = "ready"
	msgKeep     = "keep"
)

// A supervisor owns everything of one running cluster that is not a file.
type supervisor struct {
	state    state
	settings settings
	running  sync.WaitGroup
	starting context.Context // ends when the start fails
	fail     context.CancelCauseFunc
	progress func(format string, args ...any)

	mu      sync.Mutex
	crashes map[string]int
}

// supervise runs a cluster until ctx ends, and reports to up. It stops when consent ends without the line to keep the
// cluster, as the command that started it was interrupted.
func supervise(ctx context.Context, s state, up io.Writer, consent io.Reader) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	go func() {
		line, _ := bufio.NewReader(consent).ReadString('\n')
		if strings.TrimSpace(line) != msgKeep {
			stop(errors.New("the command that started the cluster has exited"))
		}
	}()
	v, err := s.settings()
	if err != nil {
		return err
	}
	sup := &supervisor{state: s, settings: v, crashes: map[string]int{}}
	sup.starting, sup.fail = context.WithCancelCause(ctx)
	defer sup.fail(nil)
	sup.progress = func(format string, args ...any) {
		log.Printf(format, args...)
		fmt.Fprintf(up, msgProgress+format+"\n", args...)
	}
	err = sup.run(ctx)
	if err == nil {
		fmt.Fprintln(up, msgReady)
		log.Print("cluster is up")
		<-ctx.Done()
		log.Printf("stopping: %v", context.Cause(ctx))
	} else {
		log.Printf("start failed: %v", err)
		fmt.Fprintln(up, msgError+strings.ReplaceAll(err.Error(), "\n", "\t"))
	}
	stop(nil)
	sup.running.Wait()
	return errors.Join(err, release(s, v.Config.Name))
}

// release removes everything of a cluster outside its folder. It may be repeated, and called for a cluster that does
// not exist.
func release(s state, name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	for _, netns := range allNetns(name) {
		if err := endProcessesIn(netns, stopTimeout); err != nil {
			return err
		}
	}
	cgroups, err := s.cgroups("")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return errors.Join(removeCgroups(cgroups, stopTimeout), removeNetwork(ctx, name))
}

// run starts everything and returns when the cluster is usable.
func (s *supervisor) run(ctx context.Context) error {
	c, st := s.settings.Config, s.state
	s.progress("laying out the network")
	if err := s.makeGroups(); err != nil {
		return err
	}
	if err := makeNetwork(s.starting, c); err != nil {
		return err
	}
	cp, err := newNetThread(netnsName(c.Name, "cp"))
	if err != nil {
		return err
	}
	machine, err := newNetThread("")
	if err != nil {
		return err
	}
	record, err := s.forwardFromMachine(ctx, c.Name)
	if err != nil {
		return err
	}

	s.progress("starting etcd and the API server")
	central := &keeper{thread: cp, logs: st.logs(), ended: s.ended}
	etcd, apiserver, rest := controlPlane(st, s.settings.Tools, s.settings.Tools.Kubernetes)
	s.keep(ctx, central, etcd)
	dial, err := newNetThread(netnsName(c.Name, "cp")) // not cp's thread, as a start may take long
	if err != nil {
		return err
	}
	if err := s.await("etcd", central, func() error { return reachable(s.starting, dial, "127.0.0.1:2379") }); err != nil {
		return err
	}
	s.keep(ctx, central, apiserver)
	nodes := &keeper{thread: machine, logs: st.logs(), ended: s.ended}
	for _, node := range c.plan() {
		s.keep(ctx, nodes, service{name: node.name, argv: []string{st.program(), roleHold, string(st), node.name}})
	}
	api, err := newAPI(apiServer, st.path("pki"), "admin", dial.dial)
	if err != nil {
		return err
	}
	if err := s.await("kube-apiserver", central, func() error { return api.ready(s.starting) }); err != nil {
		return err
	}
	s.progress("starting the controller manager, scheduler, DNS and registry")
	for _, svc := range rest {
		s.keep(ctx, central, svc)
	}
	registry := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DialContext: dial.dial, DisableKeepAlives: true}}
	if err := s.await("registry", central, func() error {
		_, err := httpGet(s.starting, registry, "http://"+Registry+"/v2/")
		return err
	}); err != nil {
		return err
	}
	if err := s.await("coredns", central, func() error { return reachable(s.starting, dial, ControlPlaneIP+":53") }); err != nil {
		return err
	}
	s.progress("waiting for %d nodes", c.Nodes)
	err = poll(startTimeout, 200*time.Millisecond, s.starting.Done(), func() error { return api.nodesReady(s.starting, c) })
	if err != nil {
		return fmt.Errorf("nodes: %w", s.startError(err))
	}
	if err := s.await("kube-controller-manager", central, func() error { return api.podsAllowed(s.starting) }); err != nil {
		return err
	}
	return writeJSON(st.path("supervisor.json"), record)
}

// makeGroups creates the nodes' cgroups. It records each before it exists, so that none can be lost.
func (s *supervisor) makeGroups() error {
	var dirs []string
	for _, node := range s.settings.Config.plan() {
		made, err := makeCgroups(node.cgroup)
		dirs = append(dirs, made...)
		if recordErr := writeFile(s.state.cgroupList(), []byte(strings.Join(dirs, "\n")+"\n"), 0o644); err == nil {
			err = recordErr
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// forwardFromMachine forwards a port of 127.0.0.1 in the machine's own network to the API server, and writes a
// kubeconfig with it.
func (s *supervisor) forwardFromMachine(ctx context.Context, name string) (owner, error) {
	record, err := processOwner(os.Getpid())
	if err != nil {
		return owner{}, err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return owner{}, err
	}
	record.Port = listener.Addr().(*net.TCPAddr).Port
	thread, err := newNetThread(netnsName(name, "cp"))
	if err != nil {
		return owner{}, err
	}
	context.AfterFunc(ctx, func() { listener.Close() })
	s.running.Go(func() {
		if err := thread.forward(listener, strings.TrimPrefix(apiServer, "https://")); err != nil {
			log.Print(err)
		}
	})
	var parts [3][]byte
	for i, file := range []string{"ca.crt", "admin.crt", "admin.key"} {
		if parts[i], err = os.ReadFile(s.state.path("pki", file)); err != nil {
			return owner{}, err
		}
	}
	text := kubeconfig(name, fmt.Sprintf("https://127.0.0.1:%d", record.Port), parts[0], keyPair{cert: parts[1], key: parts[2]})
	return record, writeFile(s.state.kubeconfig(), text, 0o600)
}

func (s *supervisor) keep(ctx context.Context, k *keeper, svc service) {
	s.running.Go(func() { k.keep(ctx, svc) })
}

// ended fails the start when a process exits repeatedly.
func (s *supervisor) ended(name string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.crashes[name]++; s.crashes[name] >= crashLimit {
		logFile := filepath.Join(s.state.logs(), name+".log")
		s.fail(fmt.Errorf("%s exits repeatedly (%w); the end of %s:\n%s", name, err, logFile, lastLines(logFile, 5)))
	}
}

// await waits until a started service passes its check.
func (s *supervisor) await(name string, k *keeper, check func() error) error {
	if err := poll(startTimeout, 100*time.Millisecond, s.starting.Done(), check); err != nil {
		if cause := s.startError(err); cause != err {
			return cause // the first failure, perhaps of another part
		}
		return fmt.Errorf("%s (log: %s): %w", name, k.logFile(name), err)
	}
	return nil
}

// startError returns why the start was stopped, if it was, else err.
func (s *supervisor) startError(err error) error {
	if cause := context.Cause(s.starting); cause != nil {
		return cause
	}
	return err
}

func reachable(ctx context.Context, thread *netThread, address string) error {
	conn, err := thread.dial(ctx, "tcp", address)
	if err != nil {
		return err
	}
	return conn.Close()
}
