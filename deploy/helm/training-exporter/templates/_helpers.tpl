{{- define "training-exporter.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-{{ .Chart.Name }}{{ end }}
{{- end }}

{{- define "training-exporter.labels" -}}
app.kubernetes.io/name: training-exporter
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "training-exporter.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* What a scrape of ours may have, and the names that the rules go by. Takes a dict of root and job. */ -}}
{{- define "training-exporter.endpoint" -}}
- port: train-metrics
  path: /metrics
  interval: {{ .root.Values.podMonitor.interval }}
  scrapeTimeout: {{ .root.Values.podMonitor.scrapeTimeout }}
  honorLabels: false
  relabelings:
    # The alerts go by this name; without it `job` is namespace/name.
    - {targetLabel: job, replacement: {{ .job }}, action: replace}
    # One instance for each node: by it a run and the GPUs of its node meet.
    - {sourceLabels: [__meta_kubernetes_pod_node_name], targetLabel: instance, action: replace}
{{- end }}

{{- /* The sidecar, an entry of initContainers: starts before the trainer and does not keep a Job alive. */ -}}
{{- define "training-exporter.sidecar" -}}
- name: exporter
  image: {{ include "training-exporter.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  restartPolicy: Always
  args: [--config.file=/etc/training-exporter/config.yaml, --feed.dir=/run/training]
  ports: [{name: train-metrics, containerPort: 20909}]
  {{- if dig "gpu" "enabled" true .Values.sidecar.config | not }}
  env:
    - {name: NVIDIA_VISIBLE_DEVICES, value: void}
  {{- end }}
  startupProbe: {httpGet: {path: /-/ready, port: train-metrics}, periodSeconds: 1, failureThreshold: 30}
  livenessProbe: {httpGet: {path: /-/healthy, port: train-metrics}, periodSeconds: 10, timeoutSeconds: 3}
  # Prometheus sees the final values if it scrapes before the sidecar is stopped.
  lifecycle: {preStop: {exec: {command: [sleep, "20"]}}}
  resources: {{- toYaml .Values.sidecar.resources | nindent 4 }}
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL]}
  volumeMounts:
    - {name: training-feed, mountPath: /run/training}
    - {name: training-exporter, mountPath: /etc/training-exporter, readOnly: true}
{{- end }}

{{- /* Entries of the pod's volumes. */ -}}
{{- define "training-exporter.sidecar.volumes" -}}
# Counts against the memory limits of the pod. A feed file is a few hundred KiB.
- {name: training-feed, emptyDir: {medium: Memory, sizeLimit: 64Mi}}
- {name: training-exporter, configMap: {name: {{ include "training-exporter.name" . }}-sidecar}}
{{- end }}

{{- /* Entries of the trainer's env. */ -}}
{{- define "training-exporter.trainer.env" -}}
- {name: EXPORTER_FEED_DIR, value: /run/training}
- {name: EXPORTER_AUTO, value: "1"}
{{- end }}

{{- /* Entries of the trainer's volumeMounts. */ -}}
{{- define "training-exporter.trainer.volumeMounts" -}}
- {name: training-feed, mountPath: /run/training}
{{- end }}
