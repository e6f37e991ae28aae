package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// A metric is one that is registered in the sources.
type metric struct {
	name, kind, help string
	labels           []string
}

// A metricsSource is a folder of sources and what its metrics are about.
type metricsSource struct {
	title, intro, folder string
	suffix               string // of the files to read
	read                 func(text string) ([]metric, error)
}

var metricsSources = []metricsSource{
	{
		"Plugin", "Every process that has loaded the plugin serves them at `EVENKEEL_METRICS`.",
		"plugin/crates/transport/src", ".rs", rustMetrics,
	},
	{
		"Reduction server", "Every `evenkeel-reduction-server` serves them at the address of `--metrics`.",
		"plugin/crates/reduction-server/src", ".rs", rustMetrics,
	},
	{
		"Operator", "The chart's Service `evenkeel-metrics` serves them.",
		"operator/internal", ".go", goMetrics,
	},
}

// metricsPage lists every metric with its type, labels and help, from the calls that register them.
func metricsPage(root string) ([]byte, error) {
	var out bytes.Buffer
	out.WriteString("# Metrics\n\nWritten by `make docs` from the sources; do not edit. " +
		"[Operations](../operate.md#metrics) says which of\nthem to watch.\n")
	for _, source := range metricsSources {
		all, err := source.collect(root)
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(&out, "\n## %s\n\n%s\n\n| Metric | Type | Labels | Meaning |\n|---|---|---|---|\n", source.title, source.intro)
		for _, m := range all {
			var labels []string
			for _, label := range m.labels {
				labels = append(labels, "`"+label+"`")
			}
			help := strings.TrimSuffix(m.help, ".")
			fmt.Fprintf(&out, "| `%s` | %s | %s | %s |\n", m.name, m.kind, strings.Join(labels, ", "), cell(help))
		}
	}
	return out.Bytes(), nil
}

// collect reads the metrics of all files of the source, sorted by name.
func (s metricsSource) collect(root string) ([]metric, error) {
	var all []metric
	err := filepath.WalkDir(filepath.Join(root, s.folder), func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, s.suffix) || strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		found, err := s.read(string(text))
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		all = append(all, found...)
		return nil
	})
	if err != nil {
		return nil, err
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("no metric is registered in %s", s.folder)
	}
	slices.SortFunc(all, func(a, b metric) int { return cmp.Compare(a.name, b.name) })
	return all, nil
}

var (
	rustPrefix = regexp.MustCompile(`Registry::with_prefix\("(\w+)"\)`)
	// rustHelp is a help text that the next call takes.
	rustHelp     = regexp.MustCompile(`let help\s*=\s*"([^"]*)";`)
	rustRegister = regexp.MustCompile(`\.register(_with_unit)?\(\s*"(\w+)",\s*("[^"]*"|help),\s*([^;]*?)\s*\);`)
	rustField    = regexp.MustCompile(`self\.(\w+)`)
	rustUnit     = regexp.MustCompile(`(?i)\b(bytes|seconds)\b`)
	rustStruct   = regexp.MustCompile(`(?s)struct (\w+) \{(.*?)\n\}`)
	rustMember   = regexp.MustCompile(`(?m)^\s*(?:pub(?:\(crate\))? )?(\w+): ([^\n]+?),$`)
	rustKind     = regexp.MustCompile(`\b(Counter|Gauge|Histogram)\b`)
	rustAlias    = regexp.MustCompile(`(?m)^type (\w+)(?:<M>)? = ([^;]+);`)
	// rustConstant is a row of a table that a collector encodes as gauges.
	rustConstant = regexp.MustCompile(`\("(\w+)", "([^"]*)", \w+\)`)
)

// rustMetrics reads what a file registers with prometheus_client. It fails on a registration that it cannot read.
func rustMetrics(text string) ([]metric, error) {
	prefix := rustPrefix.FindStringSubmatch(text)
	if prefix == nil {
		return nil, nil
	}
	aliases := map[string]string{}
	for _, a := range rustAlias.FindAllStringSubmatch(text, -1) {
		aliases[a[1]] = a[2]
	}
	types, labels := map[string]string{}, map[string][]string{}
	for _, s := range rustStruct.FindAllStringSubmatch(text, -1) {
		for _, m := range rustMember.FindAllStringSubmatch(s[2], -1) {
			labels[s[1]] = append(labels[s[1]], m[1])
			of := m[2]
			if name, _, _ := strings.Cut(of, "<"); aliases[name] != "" {
				of = aliases[name] + " " + of
			}
			if rustKind.MatchString(of) && len(of) > len(types[m[1]]) {
				types[m[1]] = of
			}
		}
	}
	var all []metric
	calls := rustRegister.FindAllStringSubmatchIndex(text, -1)
	if registered := strings.Count(text, "all.register"); registered != len(calls)+strings.Count(text, "all.register_collector(") {
		return nil, fmt.Errorf("%d of %d registrations can be read", len(calls), registered)
	}
	for _, at := range calls {
		group := func(i int) string { return text[at[2*i]:at[2*i+1]] }
		m := metric{name: prefix[1] + "_" + group(2), help: strings.Trim(group(3), `"`)}
		if m.help == "help" {
			before := rustHelp.FindAllStringSubmatch(text[:at[0]], -1)
			if before == nil {
				return nil, fmt.Errorf("%s has no help", m.name)
			}
			m.help = before[len(before)-1][1]
		}
		field := rustField.FindStringSubmatch(group(4))
		if field == nil || types[field[1]] == "" {
			return nil, fmt.Errorf("the type of %s is not known", m.name)
		}
		of := types[field[1]]
		for name, names := range labels {
			if strings.Contains(of, "<"+name+",") {
				m.labels = names
			}
		}
		if at[2] >= 0 { // with a unit
			unit := rustUnit.FindString(group(4))
			if unit == "" {
				return nil, fmt.Errorf("the unit of %s is not known", m.name)
			}
			m.name += "_" + strings.ToLower(unit)
		}
		m.kind = strings.ToLower(rustKind.FindString(of))
		if m.kind == "counter" {
			m.name += "_total"
		}
		all = append(all, m)
	}
	if strings.Contains(text, "encode_descriptor(") {
		rows := rustConstant.FindAllStringSubmatch(text, -1)
		if len(rows) == 0 || !strings.Contains(text, "Unit::Bytes;") {
			return nil, errors.New("the metrics of a collector cannot be read")
		}
		for _, row := range rows {
			all = append(all, metric{name: prefix[1] + "_" + row[1] + "_bytes", kind: "gauge", help: row[2]})
		}
	}
	return all, nil
}

// goMetrics reads the metrics that a file makes with client_golang.
func goMetrics(text string) ([]metric, error) {
	if !strings.Contains(text, "prometheus.New") {
		return nil, nil
	}
	file, err := parser.ParseFile(token.NewFileSet(), "", text, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	var all []metric
	var failed error
	ast.Inspect(file, func(node ast.Node) bool {
		call, ok := node.(*ast.CallExpr)
		if !ok || failed != nil {
			return failed == nil
		}
		function, ok := call.Fun.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		if of, ok := function.X.(*ast.Ident); !ok || of.Name != "prometheus" {
			return true
		}
		kind, vector := strings.CutSuffix(strings.TrimPrefix(function.Sel.Name, "New"), "Vec")
		switch kind {
		case "Counter", "Gauge", "Histogram":
			m := metric{kind: strings.ToLower(kind)}
			if options, ok := call.Args[0].(*ast.CompositeLit); ok {
				m.name, m.help = member(options, "Name"), member(options, "Help")
			}
			if vector {
				m.labels = texts(call.Args[1])
			}
			all = append(all, m)
		case "Desc":
			all = append(all, metric{name: literal(call.Args[0]), kind: "gauge", help: literal(call.Args[1]), labels: texts(call.Args[2])})
			if strings.Contains(text, "prometheus.CounterValue") {
				failed = errors.New("whether a Desc is of a counter or of a gauge is not known")
			}
		default:
			return true
		}
		if m := all[len(all)-1]; m.name == "" || m.help == "" {
			failed = fmt.Errorf("a metric's name or help is not a string literal: %+v", m)
		}
		return true
	})
	return all, failed
}

func member(options *ast.CompositeLit, name string) string {
	for _, element := range options.Elts {
		if pair, ok := element.(*ast.KeyValueExpr); ok {
			if key, ok := pair.Key.(*ast.Ident); ok && key.Name == name {
				return literal(pair.Value)
			}
		}
	}
	return ""
}

func literal(expression ast.Expr) string {
	if value, ok := expression.(*ast.BasicLit); ok && value.Kind == token.STRING {
		if text, err := strconv.Unquote(value.Value); err == nil {
			return text
		}
	}
	return ""
}

func texts(expression ast.Expr) []string {
	list, ok := expression.(*ast.CompositeLit)
	if !ok {
		return nil
	}
	var all []string
	for _, element := range list.Elts {
		all = append(all, literal(element))
	}
	return all
}
