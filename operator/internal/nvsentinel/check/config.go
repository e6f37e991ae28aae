// Package check is a check of a pod's network before it starts, as one of NVSentinel's preflight checks: an init
// container that NVSentinel adds to pods. It runs evenkeel-bench, inside the node or between all pods of a gang,
// reports to NVSentinel, and ends with the exit statuses of NVSentinel's own checks.
package check

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/operator/internal/nvsentinel"
)

// Exit statuses, as in NVSentinel's preflight-checks/nccl-allreduce.
const (
	// ExitPassed lets the pod start; so does every status with STORE_ONLY but ExitNotSent.
	ExitPassed = 0
	// ExitFailed: the run failed, or was too slow.
	ExitFailed = 1
	// ExitConfig: the environment is wrong, or the benchmark cannot work here. It says nothing about the network.
	ExitConfig = 2
	// ExitGang: not all pods of the gang came.
	ExitGang = 3
	// ExitNotSent: NVSentinel did not accept the event.
	ExitNotSent = 4
)

const (
	defaultThreshold  = 0
	defaultMegabytes  = 64
	defaultIterations = 20
	defaultGangWait   = 10 * time.Minute
	defaultTimeout    = 5 * time.Minute
	defaultGangFolder = "/etc/preflight"
	maxMegabytes      = 16 << 10
)

// Config holds the environment's settings. NVSentinel sets the variables of the first block.
type Config struct {
	Node, Pod string
	Connector nvsentinel.Connector
	Strategy  nvsentinel.Strategy
	// GangFolder holds the files of the gang's ConfigMap. If it is empty, the check stays inside the node.
	GangFolder string
	GangWait   time.Duration

	// MinBusBandwidth in GB/s; 0: any will do.
	MinBusBandwidth float64
	Bytes           int64
	Iterations      int
	// Timeout bounds the run.
	Timeout time.Duration
}

// ReadConfig reads the environment, which getenv looks up.
func ReadConfig(getenv func(string) string) (Config, error) {
	c := Config{Node: getenv("NODE_NAME"), Pod: getenv("POD_NAME")}
	if c.Node == "" {
		return c, errors.New("NODE_NAME is not set: NVSentinel sets it from spec.nodeName")
	}
	if target := getenv("HEALTH_PUBLISH_TARGET"); target != "" {
		c.Connector = nvsentinel.Connector{Target: target, TokenFile: getenv("HEALTH_PUBLISH_TOKEN_PATH"), CAFile: getenv("HEALTH_PUBLISH_TLS_CA_FILE")}
	} else if socket := strings.TrimPrefix(getenv("PLATFORM_CONNECTOR_SOCKET"), "unix://"); socket != "" {
		c.Connector = nvsentinel.Connector{Target: "unix://" + socket}
	} else {
		return c, errors.New("neither PLATFORM_CONNECTOR_SOCKET nor HEALTH_PUBLISH_TARGET is set: NVSentinel sets one of them")
	}
	if err := c.Connector.Validate(); err != nil {
		return c, fmt.Errorf("the platform connector: %w", err)
	}
	strategy := getenv("PROCESSING_STRATEGY")
	if strategy == "" {
		strategy = "EXECUTE_REMEDIATION" // NVSentinel's own default
	}
	var err error
	if c.Strategy, err = nvsentinel.ParseStrategy(strategy); err != nil {
		return c, fmt.Errorf("PROCESSING_STRATEGY: %w", err)
	}
	if getenv("GANG_ID") != "" {
		if c.Pod == "" {
			return c, errors.New("POD_NAME is not set, and GANG_ID is: a pod finds its rank by its name")
		}
		if c.GangFolder = getenv("GANG_CONFIG_DIR"); c.GangFolder == "" {
			c.GangFolder = defaultGangFolder
		}
	}
	if c.MinBusBandwidth, err = number(getenv, "BW_THRESHOLD_GBPS", defaultThreshold, 0, 1e6); err != nil {
		return c, err
	}
	for _, whole := range []struct {
		name      string
		byDefault float64
		most      float64
		set       func(int64)
	}{
		{"TEST_SIZE_MB", defaultMegabytes, maxMegabytes, func(n int64) { c.Bytes = n << 20 }},
		{"BENCHMARK_ITERS", defaultIterations, 1e6, func(n int64) { c.Iterations = int(n) }},
		{"GANG_TIMEOUT_SECONDS", defaultGangWait.Seconds(), 86400, func(n int64) { c.GangWait = time.Duration(n) * time.Second }},
		{"TIMEOUT_SECONDS", defaultTimeout.Seconds(), 86400, func(n int64) { c.Timeout = time.Duration(n) * time.Second }},
	} {
		n, err := number(getenv, whole.name, whole.byDefault, 1, whole.most)
		if err != nil {
			return c, err
		}
		whole.set(int64(n))
	}
	return c, nil
}

// number reads a number of at least and at most these.
func number(getenv func(string) string, name string, byDefault, least, most float64) (float64, error) {
	text := getenv(name)
	if text == "" {
		return byDefault, nil
	}
	n, err := strconv.ParseFloat(text, 64)
	if err != nil || !(n >= least && n <= most) {
		return 0, fmt.Errorf("%s=%q: want a number from %v to %v", name, text, least, most)
	}
	return n, nil
}

// Gang is the pods that start together. The zero value is a pod by itself.
type Gang struct {
	Size, Rank int
	// Master and Port are where rank 0 listens.
	Master string
	Port   int
	// Pods names all of them.
	Pods []string
}

// maxGangFile bounds the files of the gang's ConfigMap, which has a megabyte at most.
const maxGangFile = 1 << 20

// readGang reads the files that NVSentinel writes about the pod's gang. It reports false as long as they are not
// complete.
func readGang(folder, pod string) (gang Gang, complete bool, err error) {
	text := map[string]string{}
	for _, name := range []string{"expected_count", "peers", "master_addr", "master_port"} {
		if text[name], err = readFile(filepath.Join(folder, name)); err != nil {
			return gang, false, err
		}
	}
	if text["expected_count"] == "" || text["expected_count"] == "0" || text["master_addr"] == "" {
		return gang, false, nil
	}
	if gang.Size, err = strconv.Atoi(text["expected_count"]); err != nil || gang.Size < 1 {
		return gang, false, fmt.Errorf("expected_count of the gang is %q", text["expected_count"])
	}
	gang.Master, gang.Rank = text["master_addr"], -1
	// NVSentinel's own check of the gang uses the port, and may still run on some nodes.
	if gang.Port, err = strconv.Atoi(text["master_port"]); err != nil || gang.Port < 1 || gang.Port > 65534 {
		return gang, false, fmt.Errorf("master_port of the gang is %q", text["master_port"])
	}
	gang.Port++
	checks := ""
	for i, line := range strings.Fields(text["peers"]) {
		peer := strings.Split(line, ";") // pod;address;rank[;checks]
		if len(peer) < 3 {
			return gang, false, fmt.Errorf("a peer of the gang is %q, want pod;address;rank", line)
		}
		own := strings.Join(peer[3:], ";")
		if i == 0 {
			checks = own
		} else if own != checks {
			return gang, false, fmt.Errorf("pods of the gang run different checks: %s runs %q, %s runs %q", gang.Pods[0], checks, peer[0], own)
		}
		gang.Pods = append(gang.Pods, peer[0])
		if peer[0] == pod {
			if gang.Rank, err = strconv.Atoi(peer[2]); err != nil || gang.Rank < 0 {
				return gang, false, fmt.Errorf("the rank of %s in the gang is %q", pod, peer[2])
			}
		}
	}
	if len(gang.Pods) < gang.Size || gang.Rank < 0 {
		return gang, false, nil
	}
	if gang.Rank >= gang.Size {
		return gang, false, fmt.Errorf("the rank of %s is %d, in a gang of %d", pod, gang.Rank, gang.Size)
	}
	return gang, true, nil
}

// readFile reads a file; it is empty as long as there is none.
func readFile(path string) (string, error) {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return "", nil
	case err != nil:
		return "", fmt.Errorf("the gang: %w", err)
	case info.Size() > maxGangFile:
		return "", fmt.Errorf("the gang: %s has %d bytes", path, info.Size())
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("the gang: %w", err)
	}
	return strings.TrimSpace(string(text)), nil
}
