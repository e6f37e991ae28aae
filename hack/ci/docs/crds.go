package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"
)

const crdFolder = "charts/evenkeel/files/crds"

// maxEnumCell is the number of enumerated values that a table cell lists.
const maxEnumCell = 12

// crdPage lists every field of the custom resources.
func crdPage(root string) ([]byte, error) {
	files, err := filepath.Glob(filepath.Join(root, crdFolder, "*.yaml"))
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("no file in %s", crdFolder)
	}
	var out bytes.Buffer
	out.WriteString(`# Custom resources

Written by ` + "`make docs`" + ` from ` + "`" + crdFolder + "`" + `; do not edit.

A field in **bold** is required. ` + "`[]`" + ` is an item of a list, and ` + "`[key]`" + ` is a value of a map. Standard
Kubernetes types, such as tolerations and conditions, are not repeated here.
`)
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		var crd apiextensions.CustomResourceDefinition
		if err := yaml.UnmarshalStrict(text, &crd); err != nil {
			return nil, fmt.Errorf("%s: %w", filepath.Base(file), err)
		}
		for _, version := range crd.Spec.Versions {
			title := crd.Spec.Names.Kind
			if !version.Storage {
				title += " " + version.Name
			}
			if version.Schema == nil || version.Schema.OpenAPIV3Schema == nil {
				return nil, fmt.Errorf("%s: version %s has no schema", filepath.Base(file), version.Name)
			}
			writeKind(&out, &crd, title, version.Name, version.Schema.OpenAPIV3Schema)
		}
	}
	return out.Bytes(), nil
}

// writeKind writes a version of a kind. The title names the version too, unless objects are stored in it.
func writeKind(out *bytes.Buffer, crd *apiextensions.CustomResourceDefinition, title, version string, schema *apiextensions.JSONSchemaProps) {
	names := crd.Spec.Names
	fmt.Fprintf(out, "\n## %s\n\n", title)
	scope := "namespaced"
	if crd.Spec.Scope == apiextensions.ClusterScoped {
		scope = "for the whole cluster"
	}
	fmt.Fprintf(out, "`apiVersion: %s/%s`, %s", crd.Spec.Group, version, scope)
	if len(names.ShortNames) > 0 {
		fmt.Fprintf(out, "; `kubectl get %s`", names.ShortNames[0])
	}
	fmt.Fprintf(out, ".\n\n%s\n", wrap(flat(schema.Description)))
	for _, part := range []string{"spec", "status"} {
		field, ok := schema.Properties[part]
		if !ok {
			continue
		}
		fmt.Fprintf(out, "\n### %s %s\n\n| Field | Type | Default | Description |\n|---|---|---|---|\n", title, part)
		writeFields(out, "", &field)
	}
}

// writeFields writes a table row for each field of the object, and below it those of its own fields.
func writeFields(out *bytes.Buffer, prefix string, object *apiextensions.JSONSchemaProps) {
	for _, name := range slices.Sorted(maps.Keys(object.Properties)) {
		field := object.Properties[name]
		path := prefix + name
		shown := "`" + path + "`"
		if slices.Contains(object.Required, name) {
			shown = "**" + shown + "**"
		}
		value := ""
		if field.Default != nil {
			value = "`" + compact(field.Default.Raw) + "`"
		}
		description := flat(field.Description)
		if value == "" {
			value, description = documentedDefault(description)
		}
		for _, rule := range field.XValidations {
			if rule.Message != "" {
				description = strings.TrimSpace(description + " Rule: " + rule.Message + ".")
			}
		}
		fmt.Fprintf(out, "| %s | %s | %s | %s |\n", shown, cell(typeOf(&field)), cell(value), cell(description))
		switch {
		case isStandard(name, &field):
		case field.Items != nil && field.Items.Schema != nil:
			writeFields(out, path+"[].", field.Items.Schema)
		case field.AdditionalProperties != nil && field.AdditionalProperties.Schema != nil:
			writeFields(out, path+"[key].", field.AdditionalProperties.Schema)
		default:
			writeFields(out, path+".", &field)
		}
	}
}

var (
	defaultSentence = regexp.MustCompile(` ?Default: (.+?)\.( |$)`)
	defaultChoice   = regexp.MustCompile(`(\w+) \(the default\)`)
)

// documentedDefault finds the default that a description names, for fields whose default the controller sets, and
// returns the description without it.
func documentedDefault(description string) (value, rest string) {
	if at := defaultSentence.FindStringSubmatchIndex(description); at != nil {
		value = description[at[2]:at[3]]
		if !strings.Contains(value, " ") {
			value = "`" + value + "`"
		}
		return value, strings.TrimSpace(description[:at[0]] + " " + description[at[1]:])
	}
	if choice := defaultChoice.FindStringSubmatch(description); choice != nil {
		return "`" + choice[1] + "`", strings.Replace(description, " (the default)", "", 1)
	}
	return "", description
}

// isStandard reports whether the field has one of Kubernetes' own types, whose fields are documented there.
func isStandard(name string, field *apiextensions.JSONSchemaProps) bool {
	switch name {
	case "conditions", "tolerations", "resources":
		return true
	}
	_, labels := field.Properties["matchLabels"]
	_, expressions := field.Properties["matchExpressions"]
	return labels && expressions
}

// typeOf describes the field's type and bounds, such as "integer, 1 to 16".
func typeOf(field *apiextensions.JSONSchemaProps) string {
	kind := field.Type
	switch {
	case field.XIntOrString:
		kind = "integer or string"
	case kind == "array" && field.Items != nil && field.Items.Schema != nil:
		kind = "list of " + typeOf(field.Items.Schema)
	case kind == "object" && field.AdditionalProperties != nil && field.AdditionalProperties.Schema != nil:
		kind = "map of " + typeOf(field.AdditionalProperties.Schema)
	case len(field.Enum) > 0 && len(field.Enum) <= maxEnumCell:
		var values []string
		for _, v := range field.Enum {
			values = append(values, "`"+strings.Trim(compact(v.Raw), `"`)+"`")
		}
		kind = strings.Join(values, ", ")
	case field.Format == "date-time":
		kind = "time"
	}
	var bounds []string
	if field.Minimum != nil && field.Maximum != nil {
		bounds = append(bounds, fmt.Sprintf("%v to %v", number(*field.Minimum), number(*field.Maximum)))
	} else if field.Minimum != nil {
		bounds = append(bounds, fmt.Sprintf("at least %v", number(*field.Minimum)))
	} else if field.Maximum != nil {
		bounds = append(bounds, fmt.Sprintf("at most %v", number(*field.Maximum)))
	}
	if field.MaxItems != nil {
		bounds = append(bounds, fmt.Sprintf("at most %d items", *field.MaxItems))
	}
	return strings.Join(append([]string{kind}, bounds...), ", ")
}

func number(v float64) string { return fmt.Sprintf("%.0f", v) }

func compact(raw []byte) string {
	var out bytes.Buffer
	if err := json.Compact(&out, raw); err != nil {
		return string(raw)
	}
	return out.String()
}

// flat puts a text of several lines on one.
func flat(text string) string { return strings.Join(strings.Fields(text), " ") }

// cell escapes a text for a table.
func cell(text string) string { return strings.ReplaceAll(text, "|", "\\|") }

// wrap breaks a text into lines of at most 100 characters.
func wrap(text string) string {
	var lines []string
	line := ""
	for _, word := range strings.Fields(text) {
		if line != "" && len(line)+1+len(word) > 100 {
			lines = append(lines, line)
			line = ""
		}
		if line != "" {
			line += " "
		}
		line += word
	}
	return strings.Join(append(lines, line), "\n")
}
