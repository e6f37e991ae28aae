{{- define "evenkeel.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- /* At most 40 characters, so that every name made from it stays below 63. */ -}}
{{- define "evenkeel.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "evenkeel.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "evenkeel.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "evenkeel.selectorLabels" -}}
app.kubernetes.io/name: {{ include "evenkeel.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "evenkeel.labels" -}}
{{ include "evenkeel.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "evenkeel.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "evenkeel.certSecret" -}}
{{- if eq .Values.webhook.certs.source "Supplied" -}}
{{- required "webhook.certs.source is Supplied: set webhook.certs.secretName to the kubernetes.io/tls Secret" .Values.webhook.certs.secretName -}}
{{- else -}}
{{- printf "%s-webhook-cert" (include "evenkeel.fullname" .) -}}
{{- end -}}
{{- end -}}

{{- define "evenkeel.podSecurity" -}}
{{- toYaml (merge (dict "runAsNonRoot" true "seccompProfile" (dict "type" "RuntimeDefault")) (.Values.podSecurityContext | default dict)) -}}
{{- end -}}

{{- define "evenkeel.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "evenkeel.checkPriorityClass" -}}
{{- default (printf "%s-check" (include "evenkeel.fullname" .)) .Values.preflight.priorityClassName -}}
{{- end -}}

{{- /* Of the accounts and roles of the hooks; a Job names the one event that it is for. */ -}}
{{- define "evenkeel.cleanupHook" -}}
helm.sh/hook: pre-delete,post-delete
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}

{{- /* The default NetworkProfile, or nothing when it is turned off or has no image to name. */ -}}
{{- define "evenkeel.defaultProfile" -}}
{{- $spec := .Values.defaultProfile.spec -}}
{{- if and .Values.defaultProfile.enabled (or $spec.plugin.image (eq $spec.plugin.delivery "Preinstalled")) -}}
apiVersion: evenkeel.dev/v1alpha1
kind: NetworkProfile
metadata:
  name: {{ .Values.defaultProfile.name }}
spec:
  {{- if not $spec.plugin.image }}{{ $_ := unset $spec.plugin "image" }}{{ end }}
  {{- toYaml $spec | nindent 2 }}
{{- end -}}
{{- end -}}

{{- /* The kinds of jobs that the webhooks know, for one operation. */ -}}
{{- define "evenkeel.jobRules" -}}
- {apiGroups: [kubeflow.org], apiVersions: [v1], resources: [pytorchjobs], operations: [{{ . }}], scope: Namespaced}
- {apiGroups: [kubeflow.org], apiVersions: [v2beta1], resources: [mpijobs], operations: [{{ . }}], scope: Namespaced}
- {apiGroups: [jobset.x-k8s.io], apiVersions: [v1alpha2], resources: [jobsets], operations: [{{ . }}], scope: Namespaced}
- {apiGroups: [batch.volcano.sh], apiVersions: [v1alpha1], resources: [jobs], operations: [{{ . }}], scope: Namespaced}
- {apiGroups: [leaderworkerset.x-k8s.io], apiVersions: [v1], resources: [leaderworkersets], operations: [{{ . }}], scope: Namespaced}
- {apiGroups: [batch], apiVersions: [v1], resources: [jobs], operations: [{{ . }}], scope: Namespaced}
{{- end -}}
