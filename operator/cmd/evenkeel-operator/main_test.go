package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
)

func TestFlagErrorsAreOneLine(t *testing.T) {
	t.Setenv("POD_NAMESPACE", "")
	whole := "webhook --namespace=n --secret=s --service=v --webhook-config=w"
	for args, want := range map[string]string{
		"run":                                                `unknown command "run"`,
		"webhook extra":                                      `unknown command "extra"`,
		"webhook --prot=1":                                   "--prot",
		"webhook --port=many":                                "--port",
		whole + " --port=0":                                  "--port=0: want 1 to 65535",
		whole + " --port=65536":                              "--port=65536",
		whole + " --cert-source=Own":                         `--cert-source="Own": want SelfManaged or Supplied`,
		whole + " --cert-dir=/certs":                         "--cert-dir goes with --cert-source=Supplied",
		whole + " --metrics-bind-address=8080":               `--metrics-bind-address="8080": want`,
		whole + " --health-probe-bind-address=a:b:c":         "--health-probe-bind-address",
		whole + " --client-ca=/nowhere":                      "--client-ca: open /nowhere",
		whole + " --client-ca=/dev/null":                     "--client-ca=/dev/null: no certificate in it",
		whole + " --client-name=kube-apiserver":              "goes with --client-ca",
		"webhook":                                            "needs --namespace",
		"webhook --namespace=n --secret=s":                   "needs --service",
		"webhook --cert-source=Supplied":                     "needs --cert-dir",
		"webhook --cert-source=Supplied --cert-dir=/nowhere": "/nowhere/tls.crt",
		"controller --leader-elect --namespace=n":            "needs --leader-election-id",
		"controller":                                         "needs --namespace",
		"controller --namespace=n --delay-scale=0":           "--delay-scale=0: want more than 0",
		"certificates --namespace=n --secret=s":              "needs --ca-secret",
		"controller --default-profile=/nowhere":              "/nowhere",
		"version --log-level=loud":                           `--log-level="loud": want debug, info, warn, error`,
		"version --log-level=INFO+1":                         `--log-level="INFO+1"`,
		"version --log-format=xml":                           `--log-format="xml": want json, text`,
	} {
		root := rootCommand()
		root.SetArgs(strings.Fields(args))
		var out bytes.Buffer
		root.SetOut(&out)
		root.SetErr(&out)
		err := root.ExecuteContext(t.Context())
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(strings.TrimSpace(err.Error()), "\n") || out.Len() > 0 {
			t.Errorf("%s: error %v, output %q; want one line with %s", args, err, out.String(), want)
		}
	}
}

func TestLogLevelAndFormat(t *testing.T) {
	for level, want := range map[string][]string{
		"debug": {"fine", "usual", "odd", "bad"}, "info": {"usual", "odd", "bad"}, "warn": {"odd", "bad"}, "error": {"bad"},
	} {
		for _, format := range logFormats {
			var out bytes.Buffer
			handler, err := (&logging{level: level, format: format}).handler(&out)
			if err != nil {
				t.Fatal(err)
			}
			slog.New(handler).Warn("odd")
			log := logr.FromSlogHandler(handler) // as controllers log
			log.V(1).Info("fine")
			log.Info("usual")
			log.Error(errors.New("no"), "bad")
			lines := strings.Split(strings.TrimSpace(out.String()), "\n")
			if len(lines) != len(want) {
				t.Errorf("%s, %s: want %q:\n%s", level, format, want, out.String())
			}
			for _, message := range want {
				if !strings.Contains(out.String(), message) {
					t.Errorf("%s, %s: %q is missing in\n%s", level, format, message, out.String())
				}
			}
			for _, line := range lines {
				if json.Valid([]byte(line)) != (format == "json") {
					t.Errorf("%s: %s", format, line)
				}
			}
		}
	}
}

func TestHelpHasExamples(t *testing.T) {
	for _, command := range []string{"webhook", "controller", "cleanup", "version"} {
		root := rootCommand()
		root.SetArgs([]string{command, "--help"})
		var out bytes.Buffer
		root.SetOut(&out)
		if err := root.Execute(); err != nil || !strings.Contains(out.String(), "evenkeel-operator "+command) || !strings.Contains(out.String(), "Examples:") {
			t.Errorf("%s: %v\n%s", command, err, out.String())
		}
	}
}

func TestUnreachableAPIServerIsNamed(t *testing.T) {
	// Nothing listens on port 1.
	err := reach(t.Context(), &rest.Config{Host: "https://127.0.0.1:1"}, 100*time.Millisecond)
	if err == nil || !strings.Contains(err.Error(), "https://127.0.0.1:1 cannot be reached") {
		t.Errorf("error %v", err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := reach(ended, &rest.Config{Host: "https://127.0.0.1:1"}, time.Hour); err == nil {
		t.Error("it waits although its context ended")
	}
}

func TestMissingCRDIsNamed(t *testing.T) {
	empty := meta.NewDefaultRESTMapper(nil)
	if err := waitForKind(t.Context(), empty, "NetworkProfile", 10*time.Millisecond); err == nil || !strings.Contains(err.Error(), "networkprofiles.evenkeel.dev") {
		t.Errorf("error %v", err)
	}
	if err := waitForKind(t.Context(), empty, "NetworkCheckPolicy", 10*time.Millisecond); err == nil || !strings.Contains(err.Error(), "networkcheckpolicies.evenkeel.dev") {
		t.Errorf("error %v", err)
	}
	full := meta.NewDefaultRESTMapper(nil)
	full.Add(schema.GroupVersionKind{Group: "evenkeel.dev", Version: "v1alpha1", Kind: "NetworkProfile"}, meta.RESTScopeRoot)
	if err := waitForKind(t.Context(), full, "NetworkProfile", time.Minute); err != nil {
		t.Error(err)
	}
}

func TestReadinessLogsEachReasonOnce(t *testing.T) {
	var log strings.Builder
	var reason error
	check := readiness(funcr.New(func(_, args string) { log.WriteString(args + "\n") }, funcr.Options{}), []healthz.Checker{
		healthz.Ping, func(*http.Request) error { return reason },
	})
	for _, reason = range []error{nil, errors.New("no certificate"), errors.New("no certificate"), errors.New("not listed"), nil, nil} {
		if err := check(nil); !errors.Is(err, reason) {
			t.Errorf("check says %v, want %v", err, reason)
		}
	}
	if got := strings.Count(log.String(), "\n"); got != 3 {
		t.Errorf("%d lines, want one for each reason and one for the end:\n%s", got, log.String())
	}
}

func TestMemoryLimit(t *testing.T) {
	for name, test := range map[string]struct {
		environment map[string]string
		want        int64
	}{
		"in a container": {map[string]string{"MEMORY_LIMIT": "536870912"}, 357913940},
		"elsewhere":      {nil, 0},
		"not a number":   {map[string]string{"MEMORY_LIMIT": "512Mi"}, 0},
		"somebody's own": {map[string]string{"MEMORY_LIMIT": "536870912", "GOMEMLIMIT": "100MiB"}, 0},
	} {
		if got := memoryLimit(func(key string) string { return test.environment[key] }); got != test.want {
			t.Errorf("%s: %d, want %d", name, got, test.want)
		}
	}
}
