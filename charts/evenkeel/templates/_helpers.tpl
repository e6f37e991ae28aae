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
{{- $repository := .Values.image.repository -}}
{{- with .Values.image.registry -}}
{{- $repository = printf "%s/%s" . (regexReplaceAll "^[^/]*[.:][^/]*/" $.Values.image.repository "") -}}
{{- end -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" $repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "evenkeel.certSecret" -}}
{{- if eq .Values.webhook.certs.source "Supplied" -}}
{{- required "webhook.certs.source is Supplied: set webhook.certs.secretName to the kubernetes.io/tls Secret" .Values.webhook.certs.secretName -}}
{{- else if eq .Values.webhook.certs.source "SelfManaged" -}}
{{- printf "%s-webhook-tls" (include "evenkeel.fullname" .) -}}
{{- else -}}
{{- printf "%s-webhook-cert" (include "evenkeel.fullname" .) -}}
{{- end -}}
{{- end -}}

{{- /* The Secret of a self-managed CA and its key. Earlier versions had all in it: with the CA where they look for it, they make no other
one after a rollback, which the API server and the webhook would not get to know at the same time. */ -}}
{{- define "evenkeel.caSecret" -}}
{{- printf "%s-webhook-cert" (include "evenkeel.fullname" .) -}}
{{- end -}}

{{- /* What every pod template of the operator has: labels and annotations, and what decides where and how it runs. */ -}}
{{- define "evenkeel.podMetadata" -}}
labels:
  {{- with (merge (dict) .values.podLabels .root.Values.podLabels) }}{{ toYaml . | nindent 2 }}{{ end }}
  {{- include "evenkeel.selectorLabels" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
{{- with (merge (dict) (.annotations | default dict) .values.podAnnotations .root.Values.podAnnotations) }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "evenkeel.podSpec" -}}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName | default .root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
securityContext: {{- include "evenkeel.podSecurity" .root | nindent 2 }}
{{- with (merge (dict "kubernetes.io/os" "linux") .values.nodeSelector) }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
{{- if .values.topologySpreadConstraints }}
  {{- toYaml .values.topologySpreadConstraints | nindent 2 }}
{{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "evenkeel.selectorLabels" .root | nindent 8 }}
        app.kubernetes.io/component: {{ .component }}
{{- end }}
{{- end -}}

{{- /* Flags of what every component logs. `helm upgrade --reuse-values` from a release without the values gives none. */ -}}
{{- define "evenkeel.logFlags" -}}
- --log-level={{ .values.logLevel | default .root.Values.logLevel | default "info" }}
- --log-format={{ .root.Values.logFormat | default "json" }}
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

{{- /* Of the hooks of one event. Each object is for one event only: Argo CD, up to some version, knows no list of them, and leaves out what
has one. A hook that failed stays, for its log and so that its Job can be tried again; the guards of its account stay too. */ -}}
{{- define "evenkeel.hook" -}}
helm.sh/hook: {{ . }}
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

{{- /* The same kinds, for CEL. */ -}}
{{- define "evenkeel.jobResources" -}}
{{- $all := list -}}
{{- range (include "evenkeel.jobRules" "CREATE" | fromYamlArray) -}}
{{- $all = append $all (printf "'%s/%s'" (first .apiGroups) (first .resources)) -}}
{{- end -}}
{{- join ", " $all -}}
{{- end -}}

{{- /* The number of pod templates that have a profile among their labels or annotations, for CEL: of the kinds that have templates in
lists, and of Jobs. What another kind has is in maps, of which a patch changes the entries that it names. */ -}}
{{- define "evenkeel.templatesWithProfile" -}}
({{ .of }}.spec.?replicatedJobs.orValue([]).map(j, j.?template.?spec.?template) + {{ .of }}.spec.?tasks.orValue([]).map(t, t.?template) + [{{ .of }}.spec.?template]).filter(t, t.?metadata.?{{ .among }}[?'evenkeel.dev/profile'].hasValue()).size()
{{- end -}}

{{- /* Their API groups. */ -}}
{{- define "evenkeel.jobGroups" -}}
{{- $all := list -}}
{{- range (include "evenkeel.jobRules" "CREATE" | fromYamlArray) -}}
{{- $all = append $all (first .apiGroups) -}}
{{- end -}}
{{- uniq $all | join ", " -}}
{{- end -}}

{{- /* Whether the controller makes keys of jobs: the webhook names them, and reduction servers have some. */ -}}
{{- define "evenkeel.makesKeys" -}}
{{- if or (eq (include "evenkeel.injectionMode" .) "Webhook") .Values.reduction.image -}}
true
{{- end -}}
{{- end -}}

{{- /* The same kinds as an owner reference has them, for CEL. */ -}}
{{- define "evenkeel.jobKinds" -}}
['kubeflow.org/PyTorchJob', 'kubeflow.org/MPIJob', 'jobset.x-k8s.io/JobSet', 'batch.volcano.sh/Job', 'leaderworkerset.x-k8s.io/LeaderWorkerSet', 'batch/Job']
{{- end -}}

{{- /* Guards: admission policies that narrow what RBAC allows an account. Those of the cleanup go with its hook. */ -}}
{{- define "evenkeel.guardName" -}}
{{- if eq .account "controller" -}}
{{- printf "%s-%s" (include "evenkeel.fullname" .root) .what -}}
{{- else -}}
{{- printf "%s-%s-%s" (include "evenkeel.fullname" .root) .account .what -}}
{{- end -}}
{{- end -}}

{{- define "evenkeel.guardMetadata" -}}
name: {{ .name }}
labels: {{- include "evenkeel.labels" .root | nindent 2 }}
{{- if eq .account "cleanup" }}
annotations: {{- include "evenkeel.hook" "post-delete" | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "evenkeel.byAccount" -}}
- name: by-the-{{ .account }}
  expression: "request.userInfo.username == 'system:serviceaccount:{{ .root.Release.Namespace }}:{{ include "evenkeel.fullname" .root }}-{{ .account }}'"
{{- end -}}

{{- /* An update of what the plugin reported about a pod. */ -}}
{{- define "evenkeel.isReport" -}}
request.resource.resource == 'pods' && ['evenkeel.dev/plugin-status', 'evenkeel.dev/suspects'].exists(k, object.metadata.?annotations[?k] != oldObject.metadata.?annotations[?k])
{{- end -}}

{{- define "evenkeel.guardBinding" -}}
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {{- include "evenkeel.guardMetadata" . | nindent 2 }}
spec:
  policyName: {{ .name }}
  validationActions: [Deny]
{{- end -}}

{{- /* All metadata is as before but that field and what the API server writes. */ -}}
{{- define "evenkeel.sameMetadata" -}}
object.metadata.all(k, k in ['{{ . }}', 'managedFields', 'resourceVersion', 'generation'] || (k in oldObject.metadata && object.metadata[k] == oldObject.metadata[k])) && oldObject.metadata.all(k, k in ['{{ . }}', 'managedFields', 'resourceVersion', 'generation'] || k in object.metadata)
{{- end -}}

{{- /* The reduction servers' repository: a profile may name another image of it. */ -}}
{{- define "evenkeel.reductionRepository" -}}
{{- regexReplaceAll ":[^:/]*$" (regexFind "^[^@]*" .Values.reduction.image) "" -}}
{{- end -}}

{{/* How pods are injected. `helm upgrade --reuse-values` from a release without the value gives none. */}}
{{- define "evenkeel.injectionMode" -}}
{{- dig "mode" "Webhook" (.Values.injection | default dict) -}}
{{- end -}}

{{- /* Whether pods report; empty: they do not. The address that they report to is a number, which a policy cannot know. */ -}}
{{- define "evenkeel.reports" -}}
{{- if and .Values.pluginReports.enabled (eq (include "evenkeel.injectionMode" .) "Webhook") -}}true{{- end -}}
{{- end -}}

{{- /* The namespaces whose pods are injected. */ -}}
{{- define "evenkeel.injectedNamespaces" -}}
matchExpressions:
  - {key: kubernetes.io/metadata.name, operator: NotIn, values: [kube-system, {{ .Release.Namespace }}]}
{{- end -}}

{{- /* The profile that a pod asks for, in CEL; empty: none. Pods of jobs from before the policy have the label only. */ -}}
{{- define "evenkeel.podProfile" -}}
object.metadata.?annotations[?'evenkeel.dev/profile'].orValue(object.metadata.?labels[?'evenkeel.dev/profile'].orValue(''))
{{- end -}}

{{- /* How the API server converts objects between the versions of a CRD. The CA is written as that of the webhook configurations. */ -}}
{{- define "evenkeel.conversion" -}}
strategy: Webhook
webhook:
  conversionReviewVersions: [v1]
  clientConfig:
    {{- with .Values.webhook.certs.caBundle }}
    caBundle: {{ . }}
    {{- end }}
    service: {name: {{ include "evenkeel.fullname" . }}-webhook, namespace: {{ .Release.Namespace }}, port: 443, path: /convert}
{{- end -}}

{{- /* The CRDs with two versions, as package conversion lists them. */ -}}
{{- define "evenkeel.convertedDefinitions" -}}
[networkcheckpolicies.evenkeel.dev, networkchecks.evenkeel.dev, networkprofiles.evenkeel.dev]
{{- end -}}
