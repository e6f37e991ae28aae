package main

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// A deviceTraffic is what a process's connections over one device have carried, and what happened to them.
type deviceTraffic struct {
	// sent and received are bytes of complete messages.
	sent, received float64
	flows          int
	// retransmits counts segments that TCP sent again. lost counts flows that died, and replaced the flows opened in their
	// place. repaths counts moves from slow paths. recoveries counts connections that lost all flows and went on.
	retransmits, lost, replaced, repaths, recoveries float64
}

var (
	metricLine  = regexp.MustCompile(`(?m)^(evenkeel_[a-z_]+)\{(.*)\} (\S+)$`)
	metricLabel = regexp.MustCompile(`([a-z_]+)="([^"]*)"`)
)

// parseTraffic sums the plugin's metrics in a log by device.
func parseTraffic(logs string) (map[string]*deviceTraffic, error) {
	devices := map[string]*deviceTraffic{}
	for _, line := range metricLine.FindAllStringSubmatch(logs, -1) {
		value, err := strconv.ParseFloat(line[3], 64)
		if err != nil {
			return nil, fmt.Errorf("metric %q: %w", line[0], err)
		}
		labels := map[string]string{}
		for _, m := range metricLabel.FindAllStringSubmatch(line[2], -1) {
			labels[m[1]] = m[2]
		}
		of := devices[labels["device"]]
		if of == nil {
			of = &deviceTraffic{}
			devices[labels["device"]] = of
		}
		switch name := line[1]; name {
		case "evenkeel_message_bytes_total":
			if labels["direction"] == "send" {
				of.sent += value
			} else {
				of.received += value
			}
		case "evenkeel_flow_bytes_total":
			of.flows++
		case "evenkeel_flow_retransmits_total":
			of.retransmits += value
		case "evenkeel_flows_lost_total":
			of.lost += value
		case "evenkeel_flows_replaced_total":
			of.replaced += value
		case "evenkeel_repaths_total":
			of.repaths += value
		case "evenkeel_recoveries_total":
			of.recoveries += value
		}
	}
	return devices, nil
}

// trafficLines are a line for each device, in the order of their names.
func trafficLines(devices map[string]*deviceTraffic) []string {
	var lines []string
	for _, name := range slices.Sorted(maps.Keys(devices)) {
		of := devices[name]
		var repairs []string
		for _, r := range []struct {
			count float64
			what  string
		}{
			{of.lost, "lost"}, {of.replaced, "replaced"}, {of.repaths, "moved to another path"}, {of.recoveries, "connections recovered"},
		} {
			if r.count > 0 {
				repairs = append(repairs, fmt.Sprintf("%.0f %s", r.count, r.what))
			}
		}
		if repairs == nil {
			repairs = []string{"no repairs"}
		}
		lines = append(lines, fmt.Sprintf("  %s: %.1f MB sent, %.1f MB received, %d flows, %s, %.0f segments retransmitted",
			name, of.sent/1e6, of.received/1e6, of.flows, strings.Join(repairs, ", "), of.retransmits))
	}
	return lines
}
