package netns

// PayloadLimit is the payload that links of these rates carry at most together, in GB/s (10^9 bytes). Of each packet,
// 52 bytes are headers of IP and TCP with time stamps; Ethernet adds 14.
func PayloadLimit(rates ...Rate) float64 {
	const headers, frame = 20 + 20 + 12, 14
	total := Rate(0)
	for _, rate := range rates {
		total += rate
	}
	return float64(total) / 8e9 * (DefaultMTU - headers) / (DefaultMTU + frame)
}
