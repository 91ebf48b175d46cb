{{/* Names, labels and settings. Roles are the keys of values that run Kaveri: router, gateway, predictor and engines. */}}

{{- define "kaveri.fullname" -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) -}}
{{- $name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* The roles that this release runs, as JSON. */}}
{{- define "kaveri.roles" -}}
{{- $roles := list "router" -}}
{{- range $role := list "gateway" "predictor" "prefill" "decode" "colocated" -}}
{{- if (index $.Values $role).enabled }}{{ $roles = append $roles $role }}{{ end -}}
{{- end -}}
{{- toJson $roles -}}
{{- end }}

{{- define "kaveri.engines" -}}
{{- $roles := include "kaveri.roles" . | fromJsonArray -}}
{{- $engines := list -}}
{{- range $role := list "prefill" "decode" "colocated" -}}
{{- if has $role $roles }}{{ $engines = append $engines $role }}{{ end -}}
{{- end -}}
{{- toJson $engines -}}
{{- end }}

{{/* dict "root" $ "role" "decode" */}}
{{- define "kaveri.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "kaveri.labels" -}}
{{ include "kaveri.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{/* dict "root" $ "roles" (list ...): the release's pods of these roles, for a selector. */}}
{{- define "kaveri.selectRoles" -}}
matchLabels:
  app.kubernetes.io/name: {{ .root.Chart.Name }}
  app.kubernetes.io/instance: {{ .root.Release.Name }}
matchExpressions:
  - key: app.kubernetes.io/component
    operator: In
    values: {{ toJson .roles }}
{{- end }}

{{- define "kaveri.tlsSecret" -}}
{{- if .Values.tls.certManager.enabled -}}
{{ .Values.tls.secret | default (printf "%s-tls" (include "kaveri.fullname" .)) }}
{{- else -}}
{{ .Values.tls.secret }}
{{- end -}}
{{- end }}

{{- define "kaveri.transports" -}}
{{- if .Values.kv.transports -}}
{{ join "," .Values.kv.transports }}
{{- else -}}
{{ ternary "tls" "tcp" (ne (include "kaveri.tlsSecret" .) "") }}
{{- end -}}
{{- end }}

{{/* One port is enough for one transport with addresses of the network. Several take free ones, found through Redis. */}}
{{- define "kaveri.kvPort" -}}
{{- $networked := without (splitList "," (include "kaveri.transports" .)) "shm" "unix" -}}
{{ ternary "0" "50053" (gt (len $networked) 1) }}
{{- end }}

{{- define "kaveri.redisUrl" -}}
{{- if .Values.redis.internal -}}
redis://{{ include "kaveri.fullname" . }}-redis:6379/0
{{- else -}}
{{ .Values.redis.url }}
{{- end -}}
{{- end }}

{{/* A value as the text that a flag takes. Whole numbers have no exponent. */}}
{{- define "kaveri.text" -}}
{{- if kindIs "slice" . -}}
{{- $texts := list -}}
{{- range . }}{{ $texts = append $texts (include "kaveri.text" .) }}{{ end -}}
{{ join "," $texts }}
{{- else if kindIs "map" . -}}
{{ toJson . }}
{{- else if kindIs "float64" . -}}
{{ if eq (floor .) . }}{{ printf "%.0f" . }}{{ else }}{{ . }}{{ end }}
{{- else -}}
{{ . }}
{{- end -}}
{{- end }}

{{- define "kaveri.image" -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "kaveri.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* Wrong combinations, which a schema cannot see. */}}
{{- define "kaveri.check" -}}
{{- $values := .Values -}}
{{- if and (not $values.redis.internal) (not $values.redis.url) (not $values.redis.existingSecret) }}
{{- fail "redis: set redis.url or redis.existingSecret, or let redis.internal be true" }}
{{- end }}
{{- if and $values.redis.internal $values.redis.url }}
{{- fail "redis.url: is not used while redis.internal is true; set redis.internal=false" }}
{{- end }}
{{- if contains "@" $values.redis.url }}
{{- fail "redis.url: holds a password, which everyone who may read pods could read; put the URL into redis.existingSecret" }}
{{- end }}
{{- if and $values.redis.url $values.redis.existingSecret }}
{{- fail "redis.url: is set, and redis.existingSecret too; set one of them" }}
{{- end }}
{{- if and $values.tls.certManager.enabled (not $values.tls.certManager.issuerRef.name) }}
{{- fail "tls.certManager.issuerRef.name: is required with tls.certManager.enabled" }}
{{- end }}
{{- if and $values.router.public.enabled (not $values.apiKeys.secret) }}
{{- fail "apiKeys.secret: is required with router.public.enabled" }}
{{- end }}
{{- if and $values.router.public.enabled (not $values.router.public.address) }}
{{- fail "router.public.address: is required with router.public.enabled; HOST:PORT under which clients reach it" }}
{{- end }}
{{- $transports := splitList "," (include "kaveri.transports" .) }}
{{- if and (has "tls" $transports) (not (include "kaveri.tlsSecret" .)) }}
{{- fail "kv.transports: tls needs tls.secret or tls.certManager" }}
{{- end }}
{{- $engines := include "kaveri.engines" . | fromJsonArray }}
{{- if not (or (has "colocated" $engines) (and (has "prefill" $engines) (has "decode" $engines))) }}
{{- fail "prefill.enabled, decode.enabled: enable both, or colocated.enabled" }}
{{- end }}
{{- range $role := $engines }}
{{- $scaling := (index $values $role).autoscaling }}
{{- if and $scaling.enabled (not $values.autoscaling.prometheusAddress) }}
{{- fail (printf "autoscaling.prometheusAddress: is required with %s.autoscaling.enabled" $role) }}
{{- end }}
{{- if and $scaling.enabled (not $values.metrics.enabled) }}
{{- fail (printf "metrics.enabled: must be true with %s.autoscaling.enabled" $role) }}
{{- end }}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) }}
{{- fail (printf "%s.autoscaling.minReplicas: is %d, more than maxReplicas, %d" $role (int $scaling.minReplicas) (int $scaling.maxReplicas)) }}
{{- end }}
{{- end }}
{{- end }}
