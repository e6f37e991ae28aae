package vm

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// bootTimeout allows for busy cores; on idle ones a boot takes 7 seconds.
	bootTimeout = 3 * time.Minute
	offTimeout  = 30 * time.Second
	consoleTail = 3000 // bytes shown of a machine that failed
)

// runMachine boots a machine from an initramfs and waits until it exits.
func runMachine(ctx context.Context, k kernel, c Config, initramfs []byte) (int, error) {
	archive, err := memoryFile("initramfs", initramfs)
	if err != nil {
		return 0, err
	}
	defer archive.Close()
	ctx, kill := context.WithCancelCause(ctx)
	defer kill(nil)

	console := &tail{limit: consoleTail}
	status := make(chan string, 16)
	m := machine{kernel: k, config: c}
	m.pass(archive)
	outputs := []struct {
		name string
		read func(io.Reader)
	}{
		{"stdout", func(r io.Reader) { copyAll(c.Stdout, r) }},
		{"stderr", func(r io.Reader) { copyAll(c.Stderr, r) }},
		{"status", func(r io.Reader) { sendLines(status, r) }},
		{"console", func(r io.Reader) { copyAll(console, r) }},
	}
	var readers sync.WaitGroup
	for _, o := range outputs {
		r, w, err := os.Pipe()
		if err != nil {
			return 0, err
		}
		defer r.Close()
		defer w.Close()
		m.pass(w)
		readers.Go(func() { o.read(r) })
	}
	ended, err := m.start(ctx, console)
	for _, f := range m.files[1:] {
		f.Close() // so that the readers see the end of the file when QEMU exits, or has not started
	}
	if err != nil {
		readers.Wait()
		return 0, fmt.Errorf("start QEMU: %w", err)
	}
	code, err := await(ctx, c, status, ended)
	kill(err)
	<-ended
	readers.Wait()
	var failure machineError
	if errors.As(err, &failure) {
		return 0, fmt.Errorf("%w; the end of its console:\n%s", err, strings.TrimSpace(console.String()))
	}
	return code, err
}

// A machineError is a failure of the machine, and not of the command in it.
type machineError struct {
	why string
	// early is set if the machine failed before it was ready, so that the command had not started.
	early bool
}

func (e machineError) Error() string { return "the virtual machine failed: " + e.why }

// await follows a machine by the lines that guest/main.sh sends, until it may be killed.
func await(ctx context.Context, c Config, status <-chan string, ended <-chan struct{}) (int, error) {
	limit := time.NewTimer(bootTimeout)
	defer limit.Stop()
	late, early := error(machineError{why: fmt.Sprintf("no boot within %s", bootTimeout)}), true
	for {
		select {
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		case <-limit.C:
			return 0, late
		case line, more := <-status:
			word, rest, _ := strings.Cut(line, " ")
			switch {
			case !more:
				return 0, machineError{"it ended before the command did", early}
			case word == "ready":
				limit.Reset(c.Timeout)
				early = false
				late = fmt.Errorf("%w, %s", ErrTimeout, c.Timeout)
			case word == "failed":
				return 0, machineError{why: rest}
			case word == "exit":
				code, err := strconv.Atoi(rest)
				if err != nil {
					return 0, machineError{why: fmt.Sprintf("it reports the exit status %q", rest)}
				}
				select { // the shared folder is written by now, so nothing is lost if the machine is killed
				case <-ended:
				case <-time.After(offTimeout):
				case <-ctx.Done():
				}
				return code, nil
			default:
				return 0, machineError{why: fmt.Sprintf("it reports %q", line)}
			}
		}
	}
}

// A machine is a QEMU process to be started.
type machine struct {
	kernel kernel
	config Config
	files  []*os.File // that QEMU inherits: the initramfs, then what it writes to
}

func (m *machine) pass(f *os.File) { m.files = append(m.files, f) }

// start starts QEMU, whose errors go to stderr. It is killed when ctx ends or this process exits; then ended is closed.
func (m *machine) start(ctx context.Context, stderr io.Writer) (ended <-chan struct{}, err error) {
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64", m.arguments()...)
	cmd.ExtraFiles = m.files
	cmd.Stderr = stderr
	// A process group of its own, so that an interrupt from the terminal reaches this process alone.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started, done := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(done)
		// The kernel sends the death signal when the thread that started QEMU exits.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			cmd.Wait() // the guest's status matters, not QEMU's
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return done, nil
}

func (m *machine) arguments() []string {
	const firstFile = 3 // of the inherited ones
	args := []string{
		"-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max", "-M", "q35",
		"-smp", strconv.Itoa(m.config.CPUs), "-m", strconv.Itoa(m.config.Memory),
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-monitor", "none",
		"-kernel", m.kernel.image(), "-initrd", fmt.Sprintf("/proc/self/fd/%d", firstFile),
		"-append", "console=ttyS0 panic=-1 quiet mitigations=off nokaslr tsc=nowatchdog",
		"-device", "virtio-rng-pci", "-device", "virtio-serial-pci",
	}
	for i, name := range []string{"stdout", "stderr", "status", "console"} {
		// append, because QEMU truncates otherwise, which a pipe refuses.
		args = append(args, "-add-fd", fmt.Sprintf("fd=%d,set=%d", firstFile+1+i, i+1), "-chardev", fmt.Sprintf("file,id=%s,path=/dev/fdset/%d,append=on", name, i+1))
		if name == "console" {
			args = append(args, "-serial", "chardev:"+name)
		} else {
			args = append(args, "-device", fmt.Sprintf("virtserialport,chardev=%s,name=%s", name, name))
		}
	}
	for _, f := range []struct{ name, options string }{{"root", "path=/,readonly=on"}, {"share", "path=" + m.config.Share}} {
		args = append(args,
			"-fsdev", fmt.Sprintf("local,id=%s,security_model=none,multidevs=remap,%s", f.name, f.options),
			"-device", fmt.Sprintf("virtio-9p-pci,fsdev=%s,mount_tag=%s", f.name, f.name))
	}
	return args
}

// memoryFile creates a file in memory, without a name.
func memoryFile(name string, content []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("file in memory: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err := f.Write(content); err != nil {
		f.Close()
		return nil, fmt.Errorf("file in memory: %w", err)
	}
	return f, nil
}

// copyAll reads to the end, even after a failed write to w, so that the guest does not block.
func copyAll(w io.Writer, r io.Reader) {
	if _, err := io.Copy(w, r); err != nil {
		io.Copy(io.Discard, r) //nolint:errcheck // only the end of the pipe matters now
	}
}

func sendLines(lines chan<- string, r io.Reader) {
	defer close(lines)
	for s := bufio.NewScanner(r); s.Scan(); {
		select {
		case lines <- s.Text():
		default: // more lines than any machine sends: the reader is gone
		}
	}
}

// A tail keeps the last bytes that were written to it.
type tail struct {
	limit int
	mu    sync.Mutex
	kept  []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.kept = append(t.kept, p...)
	if extra := len(t.kept) - t.limit; extra > 0 {
		t.kept = append(t.kept[:0], t.kept[extra:]...)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.kept)
}
