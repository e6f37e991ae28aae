// Package machine describes the machine that a benchmark runs on, and measures how busy it is.
package machine

import (
	"bufio"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// A Machine is what results depend on.
type Machine struct {
	Cores     int
	Processor string
	Vectors   string // the widest vector instructions that sums use: AVX-512, AVX2, or none
	Kernel    string
	Load      float64 // mean of the last minute
}

// Describe returns this machine. Call it before a build, which raises the load.
func Describe() Machine {
	m := Machine{Cores: runtime.NumCPU(), Processor: "unknown processor", Kernel: "unknown kernel"}
	if text, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		m.readProcessor(string(text))
	}
	var name unix.Utsname
	if unix.Uname(&name) == nil {
		m.Kernel = fmt.Sprintf("%s %s", unix.ByteSliceToString(name.Sysname[:]), unix.ByteSliceToString(name.Release[:]))
	}
	if text, err := os.ReadFile("/proc/loadavg"); err == nil {
		if first, _, ok := strings.Cut(string(text), " "); ok {
			m.Load, _ = strconv.ParseFloat(first, 64)
		}
	}
	return m
}

// readProcessor reads the text of /proc/cpuinfo up to the second processor.
func (m *Machine) readProcessor(text string) {
	text, _, _ = strings.Cut(text, "\n\n")
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(line, ":")
		switch strings.TrimSpace(key) {
		case "model name":
			m.Processor = strings.TrimSpace(value)
		case "flags":
			m.Vectors = vectors(strings.Fields(value))
		}
	}
}

// vectors are those that the kernels for sums choose with these flags of the processor.
func vectors(flags []string) string {
	has := func(all ...string) bool {
		return !slices.ContainsFunc(all, func(flag string) bool { return !slices.Contains(flags, flag) })
	}
	switch {
	case has("avx512f", "avx512bw", "avx512dq", "avx512vl"):
		return "AVX-512"
	case has("avx2", "f16c"):
		return "AVX2"
	}
	return ""
}

// String is the machine in words, for a results page.
func (m Machine) String() string {
	processor := m.Processor
	if m.Vectors != "" {
		processor += " with " + m.Vectors
	}
	return fmt.Sprintf("%d cores (%s), %s", m.Cores, processor, m.Kernel)
}

// CPUTime is the time that all processors together have spent since boot, in clock ticks.
type CPUTime struct{ idle, all float64 }

// ReadCPUTime reads /proc/stat. It returns zero where that cannot be read.
func ReadCPUTime() CPUTime {
	file, err := os.Open("/proc/stat")
	if err != nil {
		return CPUTime{}
	}
	defer file.Close()
	line, _ := bufio.NewReader(file).ReadString('\n')
	var t CPUTime
	for i, field := range strings.Fields(line) {
		n, err := strconv.ParseFloat(field, 64)
		if err != nil || i > 8 {
			continue // the heading, and guests, which count as user time already
		}
		t.all += n
		if i == 4 || i == 5 { // idle, and waiting for a disk
			t.idle += n
		}
	}
	return t
}

// BusySince is the share of the processors' time that was used since t was read.
func (t CPUTime) BusySince() float64 {
	now := ReadCPUTime()
	if now.all <= t.all {
		return 0
	}
	return 1 - (now.idle-t.idle)/(now.all-t.all)
}
