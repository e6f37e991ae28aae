package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
)

// machine is what ran it, for people.
func machine() string {
	model, err := processor()
	if err != nil {
		model = "unknown processor"
	}
	var name syscall.Utsname
	release := "unknown"
	if syscall.Uname(&name) == nil {
		bytes := make([]byte, 0, len(name.Release))
		for _, c := range name.Release {
			if c == 0 {
				break
			}
			bytes = append(bytes, byte(c))
		}
		release = string(bytes)
	}
	cores, err := os.ReadFile("/sys/devices/system/cpu/online")
	if err != nil {
		cores = []byte("unknown")
	}
	return fmt.Sprintf("Cores %s of an %s, Linux %s", strings.TrimSpace(string(cores)), model, release)
}

func processor() (string, error) {
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return "", err
	}
	lines := strings.Split(string(info), "\n")
	i := slices.IndexFunc(lines, func(line string) bool { return strings.HasPrefix(line, "model name") })
	if i < 0 {
		return "", errors.New("no model name")
	}
	_, model, _ := strings.Cut(lines[i], ":")
	return strings.TrimSpace(model), nil
}
