// Package text fits text into the limits of API fields and table cells.
package text

import (
	"fmt"
	"strings"
)

// Clip shortens s to at most limit bytes and ends it with "..." if something is missing. Limit is at least 3.
func Clip(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit-3], "") + "..."
}

// List joins as many names as fit into limit bytes, and counts the others: "a, b and 3 more".
func List(names []string, limit int) string {
	text := ""
	for i, name := range names {
		more := fmt.Sprintf(" and %d more", len(names)-i)
		next := name
		if text != "" {
			next = text + ", " + name
		}
		if len(next)+len(more) > limit && i > 0 {
			return Clip(text+more, limit)
		}
		text = next
	}
	return Clip(text, limit)
}
