{{/* The Deployment of one role: dict "root" $ "role" "decode". An instance is a pod. */}}
{{- define "kaveri.deployment" -}}
{{- $root := .root -}}
{{- $role := .role -}}
{{- $values := $root.Values -}}
{{- $own := index $values $role -}}
{{- $name := include "kaveri.fullname" $root -}}
{{- $isEngine := has $role (list "prefill" "decode" "colocated") -}}
{{- $tls := include "kaveri.tlsSecret" $root -}}
{{- $hasKeys := and $values.apiKeys.secret (has $role (list "router" "gateway")) -}}
{{- $hasPublicTls := and $values.publicTls.secret (or (eq $role "gateway") (and (eq $role "router") $values.router.public.enabled)) -}}
{{- $hasPublicPort := and (eq $role "router") $values.router.public.enabled -}}
{{- $image := ternary $values.engineImage $values.image (or $isEngine (eq $role "predictor")) -}}
{{- $rdma := dict -}}
{{- if $isEngine }}{{ $rdma = $own.rdma }}{{ end -}}
{{- $port := dict "router" 50051 "gateway" 8000 "predictor" 50052 "prefill" 50052 "decode" 50052 "colocated" 50052 -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $name }}-{{ $role }}
  namespace: {{ $root.Release.Namespace }}
  labels: {{- include "kaveri.labels" . | nindent 4 }}
spec:
  {{- if not (and $isEngine (get ($own.autoscaling | default dict) "enabled")) }}
  replicas: {{ int $own.replicas }}
  {{- end }}
  revisionHistoryLimit: 5
  # A start that loads a model may take as long as this.
  progressDeadlineSeconds: {{ add (int $own.startupSeconds) 600 }}
  selector:
    matchLabels: {{- include "kaveri.selector" . | nindent 6 }}
  strategy:
    type: RollingUpdate
    rollingUpdate: {{- toYaml $own.rollingUpdate | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "kaveri.selector" . | nindent 8 }}
        app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
      {{- with merge (dict) $own.podAnnotations ($rdma.annotations | default dict) }}
      annotations: {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      # A Service named kaveri would give KAVERI_PORT another meaning.
      enableServiceLinks: false
      automountServiceAccountToken: false
      {{- with $values.serviceAccountName }}
      serviceAccountName: {{ . }}
      {{- end }}
      {{- with $values.imagePullSecrets }}
      imagePullSecrets: {{- toYaml . | nindent 8 }}
      {{- end }}
      # Above preStop and drain together: SIGKILL must not end a drain.
      terminationGracePeriodSeconds: {{ add (int $own.preStopSeconds) (int (ceil $own.drainTimeoutSeconds)) 15 }}
      securityContext: {{- include "kaveri.podSecurity" $root | nindent 8 }}
      {{- with $own.nodeSelector }}
      nodeSelector: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $own.tolerations }}
      tolerations: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $own.affinity }}
      affinity: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $own.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      {{- with $values.topologySpread }}
      topologySpreadConstraints:
        {{- range . }}
        - topologyKey: {{ .topologyKey }}
          maxSkew: {{ int .maxSkew }}
          whenUnsatisfiable: {{ .whenUnsatisfiable }}
          labelSelector:
            matchLabels: {{- include "kaveri.selector" $ | nindent 14 }}
          # Pods of an older revision, which are leaving, do not count.
          matchLabelKeys: [pod-template-hash]
        {{- end }}
      {{- end }}
      containers:
        - name: kaveri
          image: {{ include "kaveri.image" (dict "root" $root "image" $image) | quote }}
          imagePullPolicy: {{ $image.pullPolicy }}
          args:
            {{- if eq $role "predictor" }}
            - predictor
            - serve
            {{- else }}
            - {{ $role }}
            {{- end }}
            {{- range $setting, $value := $own.settings }}
            - {{ printf "--%s=%s" (replace "_" "-" $setting) (include "kaveri.text" $value) | quote }}
            {{- end }}
          env:
            # The pod's name: a container that starts again in it takes its id over at once.
            - name: KAVERI_INSTANCE_ID
              valueFrom: {fieldRef: {fieldPath: metadata.name}}
            - name: KAVERI_ADVERTISE_HOST
              valueFrom: {fieldRef: {fieldPath: status.podIP}}
            - {name: KAVERI_CLUSTER_NAME, value: {{ $values.clusterName | quote }}}
            - {name: KAVERI_HOST, value: "::"}
            - {name: KAVERI_PORT, value: {{ get $port $role | quote }}}
            - {name: KAVERI_HEALTH_PORT, value: "9101"}
            {{- if $values.metrics.enabled }}
            - {name: KAVERI_METRICS_PORT, value: "9100"}
            {{- end }}
            - {name: KAVERI_DRAIN_TIMEOUT_S, value: {{ include "kaveri.text" $own.drainTimeoutSeconds | quote }}}
            {{- if $values.redis.existingSecret }}
            - {name: KAVERI_REDIS_URL_FILE, value: /etc/kaveri/redis/url}
            {{- else }}
            - {name: KAVERI_REDIS_URL, value: {{ include "kaveri.redisUrl" $root | quote }}}
            {{- end }}
            {{- if ne $role "gateway" }}
            - {name: KAVERI_MODEL, value: {{ $values.model | quote }}}
            {{- with $values.servedModelName }}
            - {name: KAVERI_SERVED_MODEL_NAME, value: {{ . | quote }}}
            {{- end }}
            {{- end }}
            {{- if $isEngine }}
            - {name: KAVERI_KV_HOST, value: "::"}
            - {name: KAVERI_KV_PORT, value: {{ include "kaveri.kvPort" $root | quote }}}
            - {name: KAVERI_KV_TRANSPORTS, value: {{ include "kaveri.transports" $root | quote }}}
            # Copies of a request's KV go to instances on other nodes.
            - name: KAVERI_FAILURE_DOMAIN
              valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
            {{- end }}
            {{- if $tls }}
            - {name: KAVERI_TLS_CERT, value: /etc/kaveri/tls/tls.crt}
            - {name: KAVERI_TLS_KEY, value: /etc/kaveri/tls/tls.key}
            - {name: KAVERI_TLS_CA, value: /etc/kaveri/tls/ca.crt}
            - {name: KAVERI_TLS_NAME, value: {{ $values.tls.name | quote }}}
            {{- end }}
            {{- if $hasKeys }}
            - {name: KAVERI_KEYS_FILE, value: /etc/kaveri/keys/keys.toml}
            {{- end }}
            {{- if $hasPublicTls }}
            - {name: KAVERI_PUBLIC_TLS_CERT, value: /etc/kaveri/public-tls/tls.crt}
            - {name: KAVERI_PUBLIC_TLS_KEY, value: /etc/kaveri/public-tls/tls.key}
            {{- end }}
            {{- if $hasPublicPort }}
            - {name: KAVERI_PUBLIC_PORT, value: "50443"}
            - {name: KAVERI_PUBLIC_ADDRESS, value: {{ $values.router.public.address | quote }}}
            {{- end }}
            {{- range $setting, $value := $values.settings }}
            - name: KAVERI_{{ upper $setting }}
              value: {{ include "kaveri.text" $value | quote }}
            {{- end }}
            {{- range concat $values.env $own.env }}
            - {{- toYaml . | nindent 14 }}
            {{- end }}
          ports:
            - {name: {{ ternary "http" "grpc" (eq $role "gateway") }}, containerPort: {{ get $port $role }}}
            {{- if and $isEngine (eq (include "kaveri.kvPort" $root) "50053") }}
            - {name: kv, containerPort: 50053}
            {{- end }}
            {{- if $hasPublicPort }}
            - {name: public, containerPort: 50443}
            {{- end }}
            {{- if $values.metrics.enabled }}
            - {name: metrics, containerPort: 9100}
            {{- end }}
            - {name: health, containerPort: 9101}
          # Plain HTTP on a port of its own: the kubelet shows no certificate.
          startupProbe:
            httpGet: {path: /readyz, port: health}
            periodSeconds: 5
            timeoutSeconds: 3
            failureThreshold: {{ max 1 (div (int $own.startupSeconds) 5) }}
          livenessProbe:
            httpGet: {path: /livez, port: health}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 6
          readinessProbe:
            httpGet: {path: /readyz, port: health}
            periodSeconds: 2
            timeoutSeconds: 2
            failureThreshold: 2
          {{- if $own.preStopSeconds }}
          lifecycle:
            preStop:
              sleep: {seconds: {{ int $own.preStopSeconds }}}
          {{- end }}
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities:
              drop: [ALL]
              {{- with $rdma.capabilities }}
              add: {{- toYaml . | nindent 16 }}
              {{- end }}
          resources:
            {{- $resources := deepCopy $own.resources }}
            {{- if $rdma.resource }}
            {{- $limits := merge (dict $rdma.resource (int $rdma.count)) ($resources.limits | default dict) }}
            {{- $resources = merge (dict "limits" $limits) $resources }}
            {{- end }}
            {{- toYaml $resources | nindent 12 }}
          volumeMounts:
            - {name: tmp, mountPath: /tmp}
            {{- if ne $role "gateway" }}
            - {name: models, mountPath: /models}
            {{- end }}
            {{- if $isEngine }}
            - {name: shm, mountPath: /dev/shm}
            {{- end }}
            {{- if $values.redis.existingSecret }}
            - {name: redis, mountPath: /etc/kaveri/redis, readOnly: true}
            {{- end }}
            {{- if $tls }}
            - {name: tls, mountPath: /etc/kaveri/tls, readOnly: true}
            {{- end }}
            {{- if $hasKeys }}
            - {name: keys, mountPath: /etc/kaveri/keys, readOnly: true}
            {{- end }}
            {{- if $hasPublicTls }}
            - {name: public-tls, mountPath: /etc/kaveri/public-tls, readOnly: true}
            {{- end }}
      volumes:
        - name: tmp
          emptyDir: {}
        {{- if ne $role "gateway" }}
        - name: models
          {{- toYaml ($values.models.volume | default (dict "emptyDir" dict)) | nindent 10 }}
        {{- end }}
        {{- if $isEngine }}
        - name: shm
          emptyDir: {medium: Memory, sizeLimit: {{ $own.shmSize }}}
        {{- end }}
        {{- if $values.redis.existingSecret }}
        - name: redis
          secret:
            secretName: {{ $values.redis.existingSecret }}
            defaultMode: 0440
            items: [{key: url, path: url}]
        {{- end }}
        {{- if $tls }}
        - name: tls
          secret: {secretName: {{ $tls }}, defaultMode: 0440}
        {{- end }}
        {{- if $hasKeys }}
        - name: keys
          secret: {secretName: {{ $values.apiKeys.secret }}, defaultMode: 0440}
        {{- end }}
        {{- if $hasPublicTls }}
        - name: public-tls
          secret: {secretName: {{ $values.publicTls.secret }}, defaultMode: 0440}
        {{- end }}
{{- end }}
