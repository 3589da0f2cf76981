{{- define "preble.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "preble.labels" -}}
app.kubernetes.io/name: preble
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "preble.gatewayLabels" -}}
app.kubernetes.io/name: preble
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: gateway
{{- end -}}

{{- define "preble.serverLabels" -}}
app.kubernetes.io/name: preble
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end -}}

{{- define "preble.secret" -}}
{{- .Values.keys.existingSecret | default (printf "%s-keys" (include "preble.name" .)) -}}
{{- end -}}

{{- define "preble.account" -}}
{{- .Values.serviceAccount.name | default (printf "%s-gateway" (include "preble.name" .)) -}}
{{- end -}}

{{- define "preble.serverPort" -}}
{{- if eq .Values.servers.engine "sglang" -}}30000{{- else -}}8000{{- end -}}
{{- end -}}

{{- define "preble.hasServerKey" -}}
{{- if or .Values.keys.existingSecret .Values.keys.server -}}true{{- end -}}
{{- end -}}

{{/* The gateway's file: what the operator says, and what the chart knows. */}}
{{- define "preble.config" -}}
{{- $table := dict "source" "kubernetes" "namespace" (.Values.discovery.namespace | default .Release.Namespace) "drain_seconds" .Values.discovery.drainSeconds "deletion_costs" .Values.discovery.deletionCosts "keep" "/tmp/servers.json" -}}
{{- if .Values.discovery.service -}}{{- $_ := set $table "service" .Values.discovery.service -}}{{- end -}}
{{- if .Values.discovery.selector -}}{{- $_ := set $table "selector" .Values.discovery.selector -}}{{- end -}}
{{- if not (or .Values.discovery.service .Values.discovery.selector) -}}
{{- $_ := set $table "service" (printf "%s-servers" (include "preble.name" .)) -}}
{{- $_ := set $table "selector" (printf "app.kubernetes.io/instance=%s,app.kubernetes.io/component=server" .Release.Name) -}}
{{- end -}}
{{- if .Values.discovery.port -}}{{- $_ := set $table "port" .Values.discovery.port -}}{{- end -}}
{{- if include "preble.hasServerKey" . -}}{{- $_ := set $table "server" (dict "api_key_variable" "SERVER_KEY") -}}{{- end -}}
{{- $own := dict "host" "0.0.0.0" "port" 8000 "min_workers" 0 "discovery" (list $table) -}}
{{- if .Values.keys.insecure -}}
{{- $host := printf "%s.%s" (include "preble.name" .) .Release.Namespace -}}
{{- $_ := set $own "insecure" true -}}
{{- $_ := set $own "host_names" (list $host (printf "%s.svc" $host) (printf "%s.svc.cluster.local" $host)) -}}
{{- end -}}
{{- if .Values.gateway.peerKeys -}}
{{- $_ := set $own "peers" (list (printf "tcp://%s-peers.%s:7070" (include "preble.name" .) .Release.Namespace)) -}}
{{- $_ := set $own "peer_bind" "tcp://*:7070" -}}
{{- $_ := set $own "peer_keys" "/etc/preble-peers" -}}
{{- end -}}
{{- if .Values.gateway.picker.enabled -}}{{- $_ := set $own "picker_port" 9002 -}}{{- end -}}
{{- toYaml (mergeOverwrite $own .Values.gateway.config) -}}
{{- end -}}

{{- define "preble.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}
