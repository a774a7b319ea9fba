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
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- define "training-exporter.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "training-exporter.name" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end }}

{{- /* Probes of a container; takes a dict of root and startFailures. The kubelet has no certificate and no password. */ -}}
{{- define "training-exporter.probes" -}}
{{- if .root.Values.webConfig.secretName -}}
startupProbe: {tcpSocket: {port: train-metrics}, periodSeconds: 1, failureThreshold: {{ .startFailures }}}
readinessProbe: {tcpSocket: {port: train-metrics}, periodSeconds: 10, timeoutSeconds: 3}
livenessProbe: {tcpSocket: {port: train-metrics}, periodSeconds: 10, timeoutSeconds: 3}
{{- else -}}
startupProbe: {httpGet: {path: /-/ready, port: train-metrics}, periodSeconds: 1, failureThreshold: {{ .startFailures }}}
readinessProbe: {httpGet: {path: /-/ready, port: train-metrics}, periodSeconds: 10, timeoutSeconds: 3}
livenessProbe: {httpGet: {path: /-/healthy, port: train-metrics}, periodSeconds: 10, timeoutSeconds: 3}
{{- end -}}
{{- end }}

{{- /* Endpoint of a PodMonitor, with the labels that the rules need. Takes a dict of root and job. */ -}}
{{- define "training-exporter.endpoint" -}}
- port: train-metrics
  path: /metrics
  interval: {{ .root.Values.podMonitor.interval }}
  scrapeTimeout: {{ .root.Values.podMonitor.scrapeTimeout }}
  honorLabels: false
  {{- with .root.Values.podMonitor.endpoint }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  relabelings:
    # The alerts select this name; the default of `job` is namespace/name.
    - {targetLabel: job, replacement: {{ .job }}, action: replace}
    # One instance for each node: rules join a run with the GPUs of the node by this label.
    - {sourceLabels: [__meta_kubernetes_pod_node_name], targetLabel: instance, action: replace}
{{- end }}

{{- /* The sidecar, an entry of initContainers: starts before the trainer and does not keep a Job alive. */ -}}
{{- define "training-exporter.sidecar" -}}
- name: exporter
  image: {{ include "training-exporter.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  restartPolicy: Always
  args:
    - --config.file=/etc/training-exporter/config.yaml
    - --feed.dir=/run/training
    {{- if .Values.webConfig.secretName }}
    - --web.config.file=/etc/training-exporter-web/web.yml
    {{- end }}
  ports: [{name: train-metrics, containerPort: 20909}]
  env:
    {{- if dig "gpu" "enabled" true .Values.sidecar.config }}
    - {name: NVIDIA_VISIBLE_DEVICES, value: all}
    {{- else }}
    - {name: NVIDIA_VISIBLE_DEVICES, value: void}
    {{- end }}
    {{- with .Values.sidecar.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- include "training-exporter.probes" (dict "root" . "startFailures" 30) | nindent 2 }}
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
    {{- if .Values.webConfig.secretName }}
    - {name: training-exporter-web, mountPath: /etc/training-exporter-web, readOnly: true}
    {{- end }}
    {{- with .Values.sidecar.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{- /* Entries of the pod's volumes. */ -}}
{{- define "training-exporter.sidecar.volumes" -}}
# Counts against the memory limits of the pod. A feed file is a few hundred KiB.
- {name: training-feed, emptyDir: {medium: Memory, sizeLimit: 64Mi}}
- {name: training-exporter, configMap: {name: {{ include "training-exporter.name" . }}-sidecar}}
{{- with .Values.webConfig.secretName }}
- {name: training-exporter-web, secret: {secretName: {{ . }}}}
{{- end }}
{{- with .Values.sidecar.extraVolumes }}
{{ toYaml . }}
{{- end }}
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
