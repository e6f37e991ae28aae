package main

import (
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"

	"github.com/go-logr/logr"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
)

// What --log-level and --log-format take.
var (
	logLevels  = []string{"debug", "info", "warn", "error"}
	logFormats = []string{"json", "text"}
)

// logging is how the program logs.
type logging struct{ level, format string }

func (l *logging) flags(flags *pflag.FlagSet) {
	flags.StringVar(&l.level, "log-level", "info", "what is logged: this and what is worse: "+strings.Join(logLevels, ", "))
	flags.StringVar(&l.format, "log-format", "json", "format of the log's lines: "+strings.Join(logFormats, ", "))
}

// handler writes lines to out.
func (l *logging) handler(out io.Writer) (slog.Handler, error) {
	if !slices.Contains(logLevels, l.level) {
		return nil, fmt.Errorf("--log-level=%q: want %s", l.level, strings.Join(logLevels, ", "))
	}
	var options slog.HandlerOptions
	var level slog.Level
	if err := level.UnmarshalText([]byte(l.level)); err != nil {
		return nil, fmt.Errorf("--log-level: %w", err)
	}
	options.Level = level
	switch l.format {
	case "json":
		return slog.NewJSONHandler(out, &options), nil
	case "text":
		return slog.NewTextHandler(out, &options), nil
	}
	return nil, fmt.Errorf("--log-format=%q: want %s", l.format, strings.Join(logFormats, ", "))
}

// start makes the program, and the libraries that it uses, log to out.
func (l *logging) start(out io.Writer) error {
	handler, err := l.handler(out)
	if err != nil {
		return err
	}
	klog.SetSlogLogger(slog.New(handler))
	ctrl.SetLogger(logr.FromSlogHandler(handler))
	return nil
}
