{{- define "dra.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "dra.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- if contains $name .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "dra.namespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride }}
{{- end }}

{{- define "dra.selectorLabels" -}}
{{- if .Values.selectorLabelsOverride }}
{{- toYaml .Values.selectorLabelsOverride }}
{{- else -}}
app.kubernetes.io/name: {{ include "dra.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- end }}

{{/* All objects have these; pods and selectors add the component. */}}
{{- define "dra.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "dra.selectorLabels" . }}
{{- end }}

{{- define "dra.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default (printf "v%s" .Chart.AppVersion) .Values.image.tag }}
{{- end }}
{{- end }}

{{- define "dra.serviceAccountBase" -}}
{{- default (printf "%s-service-account" (include "dra.fullname" .)) .Values.serviceAccount.name }}
{{- end }}

{{- define "dra.pluginAccount" -}}
{{ include "dra.serviceAccountBase" . }}-kubeletplugin
{{- end }}

{{- define "dra.fleetAccount" -}}
{{ include "dra.serviceAccountBase" . }}-fleet
{{- end }}

{{- define "dra.webhookAccount" -}}
{{ default (printf "%s-webhook" (include "dra.serviceAccountBase" .)) .Values.webhook.serviceAccount.name }}
{{- end }}

{{- define "dra.uninstallAccount" -}}
{{ include "dra.serviceAccountBase" . }}-uninstall
{{- end }}

{{/*
The best version of resource.k8s.io that the cluster serves. Asked for with its Kubernetes version: without a cluster
(helm template) Helm takes every version that it knows for served.
*/}}
{{- define "dra.resourceApiVersion" -}}
{{- $apis := .Capabilities.APIVersions }}
{{- $kubernetes := .Capabilities.KubeVersion.Version }}
{{- if .Values.resourceApiVersion }}
{{- .Values.resourceApiVersion | trimPrefix "resource.k8s.io/" }}
{{- else if and ($apis.Has "resource.k8s.io/v1") (semverCompare ">=1.34.0-0" $kubernetes) }}v1
{{- else if and ($apis.Has "resource.k8s.io/v1beta2") (semverCompare ">=1.33.0-0" $kubernetes) }}v1beta2
{{- else }}v1beta1
{{- end }}
{{- end }}

{{/* Two instances at once need sockets with the pod's UID, which kubelets understand from 1.33 on. */}}
{{- define "dra.surges" -}}
{{- if semverCompare ">=1.33.0-0" .Capabilities.KubeVersion.Version }}true{{ end }}
{{- end }}

{{- define "dra.isOpenShift" -}}
{{- if eq (toString .Values.openshift.enabled) "auto" }}
{{- if .Capabilities.APIVersions.Has "security.openshift.io/v1" }}true{{ end }}
{{- else if eq (toString .Values.openshift.enabled) "true" }}true
{{- end }}
{{- end }}

{{- define "dra.logLevel" -}}
{{- if ge (int .Values.logVerbosity) 6 }}debug{{ else }}info{{ end }}
{{- end }}

{{- define "dra.featureGates" -}}
{{- $parts := list }}
{{- range $name, $on := .Values.featureGates }}
{{- $parts = append $parts (printf "%s=%v" $name $on) }}
{{- end }}
{{- join "," $parts }}
{{- end }}

{{/* Where pods of the image can run at all, and where the user wants them. */}}
{{- define "dra.nodeSelector" -}}
{{- toYaml (merge (dict "kubernetes.io/os" "linux") .) }}
{{- end }}

{{/* Replicas on different nodes, as far as there are some. Needs the root and a component. */}}
{{- define "dra.spread" -}}
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "dra.selectorLabels" .root | nindent 6 }}
      dra-driver-nvidia-gpu-component: {{ .component }}
{{- end }}

{{/* One replica after the other when nodes are drained. Needs the root and a component. */}}
{{- define "dra.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "dra.fullname" .root }}-{{ .component }}
  namespace: {{ include "dra.namespace" .root }}
  labels:
    {{- include "dra.labels" .root | nindent 4 }}
spec:
  maxUnavailable: 1
  # One that is not ready anyway is in nobody's way.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "dra.selectorLabels" .root | nindent 6 }}
      dra-driver-nvidia-gpu-component: {{ .component }}
{{- end }}

{{/* For what touches no hardware. */}}
{{- define "dra.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "dra.restrictedPod" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "dra.httpPort" -}}
{{- regexReplaceAll "^.*:" . "" }}
{{- end }}

{{- define "dra.webhookSecret" -}}
{{- if eq .Values.webhook.tls.mode "secret" }}
{{- .Values.webhook.tls.secret.name }}
{{- else }}
{{- include "dra.fullname" . }}-webhook-tls
{{- end }}
{{- end }}

{{/*
The webhook's certificate where Helm makes it, in base64: bundle, certificate, key. Made once for a rendering (it is kept
in the values), and kept over upgrades: what the cluster has already is taken.
*/}}
{{- define "dra.webhookCertificate" -}}
{{- if eq .Values.webhook.tls.mode "secret" }}
bundle: {{ .Values.webhook.tls.secret.caBundle }}
{{- else if eq .Values.webhook.tls.mode "self-signed" }}
{{- if not (hasKey .Values.webhook.tls "made") }}
{{- $name := printf "%s-webhook.%s.svc" (include "dra.fullname" .) (include "dra.namespace" .) }}
{{- $kept := default dict (lookup "v1" "Secret" (include "dra.namespace" .) (include "dra.webhookSecret" .)) }}
{{- if hasKey (default dict $kept.data) "ca.crt" }}
{{- $_ := set .Values.webhook.tls "made" (dict "bundle" (index $kept.data "ca.crt") "certificate" (index $kept.data "tls.crt") "key" (index $kept.data "tls.key")) }}
{{- else }}
{{- $ca := genCA (printf "%s-ca" $name) 3650 }}
{{- $cert := genSignedCert $name (list) (list $name (printf "%s.cluster.local" $name)) 3650 $ca }}
{{- $_ := set .Values.webhook.tls "made" (dict "bundle" (b64enc $ca.Cert) "certificate" (b64enc $cert.Cert) "key" (b64enc $cert.Key)) }}
{{- end }}
{{- end }}
{{- toYaml .Values.webhook.tls.made }}
{{- end }}
{{- end }}
