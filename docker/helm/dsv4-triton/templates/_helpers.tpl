{{- define "dsv4.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{- define "dsv4.selector" -}}
app.kubernetes.io/name: dsv4-triton
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "dsv4.labels" -}}
{{ include "dsv4.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "dsv4.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag }}
{{- end }}

{{- define "dsv4.modelPath" -}}
/models/{{ .Values.model.path }}
{{- end }}

{{- define "dsv4.scheme" -}}
{{ ternary "HTTPS" "HTTP" (ne .Values.tls.existingSecret "") }}
{{- end }}

{{- define "dsv4.apiKeySecret" -}}
{{- if .Values.apiKeys.existingSecret -}}
{{ .Values.apiKeys.existingSecret }}
{{- else if .Values.apiKeys.keys -}}
{{ include "dsv4.name" . }}-api-keys
{{- end -}}
{{- end }}

{{- define "dsv4.weightsClaim" -}}
{{ .Values.weights.existingClaim | default (printf "%s-weights" (include "dsv4.name" .)) }}
{{- end }}

{{/* Arguments of `dsv4 serve`. */}}
{{- define "dsv4.serveArguments" -}}
- serve
- --host=0.0.0.0
- --backend={{ .Values.backend }}
- --exit-timeout-secs={{ .Values.lifecycle.drainSeconds }}
- --drain-seconds={{ .Values.lifecycle.drainSeconds }}
{{- if .Values.model.path }}
- --model={{ include "dsv4.modelPath" . }}
- --served-model-name={{ .Values.model.servedName }}
{{- end }}
{{- if eq .Values.backend "npu" }}
- --devices={{ until (int .Values.npu.count) | join "," }}
{{- end }}
{{- range $flag, $value := .Values.serve }}
{{- if kindIs "bool" $value }}
{{- if $value }}
- --{{ $flag }}
{{- end }}
{{- else if kindIs "float64" $value }}
- --{{ $flag }}={{ printf "%.0f" $value }}
{{- else }}
- {{ printf "--%s=%v" $flag $value | quote }}
{{- end }}
{{- end }}
{{- if .Values.tls.existingSecret }}
# What follows belongs to the proxy.
- --
- --tls-certificate=/etc/dsv4/tls/tls.crt
- --tls-key=/etc/dsv4/tls/tls.key
{{- end }}
{{- end }}

{{/* What every container of this chart may not do. */}}
{{- define "dsv4.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "dsv4.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
{{- if eq .Values.backend "npu" }}
supplementalGroups: [{{ .Values.npu.deviceGroup }}]
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* Volumes of the server pod. */}}
{{- define "dsv4.volumes" -}}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.sharedMemory }}
- name: tmp
  emptyDir: {}
- name: cache
{{- if .Values.cache.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ .Values.cache.existingClaim }}
{{- else }}
  emptyDir:
    sizeLimit: {{ .Values.cache.size }}
{{- end }}
{{- if .Values.model.path }}
- name: weights
{{- if eq .Values.weights.source "hostPath" }}
  hostPath:
    path: {{ .Values.weights.hostPath }}
    type: Directory
{{- else }}
  persistentVolumeClaim:
    claimName: {{ include "dsv4.weightsClaim" . }}
    readOnly: true
{{- end }}
{{- end }}
{{- if .Values.tls.existingSecret }}
- name: tls
  secret:
    secretName: {{ .Values.tls.existingSecret }}
{{- end }}
{{- if and (eq .Values.backend "npu") .Values.npu.mountDriver }}
- name: driver
  hostPath: { path: /usr/local/Ascend/driver, type: Directory }
- name: dcmi
  hostPath: { path: /usr/local/dcmi, type: Directory }
- name: npu-smi
  hostPath: { path: /usr/local/bin/npu-smi, type: File }
- name: install-info
  hostPath: { path: /etc/ascend_install.info, type: File }
{{- end }}
{{- end }}

{{- define "dsv4.volumeMounts" -}}
- name: shm
  mountPath: /dev/shm
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /var/cache/dsv4
{{- if .Values.model.path }}
- name: weights
  mountPath: /models
  readOnly: true
{{- end }}
{{- if .Values.tls.existingSecret }}
- name: tls
  mountPath: /etc/dsv4/tls
  readOnly: true
{{- end }}
{{- if and (eq .Values.backend "npu") .Values.npu.mountDriver }}
- name: driver
  mountPath: /usr/local/Ascend/driver
  readOnly: true
- name: dcmi
  mountPath: /usr/local/dcmi
  readOnly: true
- name: npu-smi
  mountPath: /usr/local/bin/npu-smi
  readOnly: true
- name: install-info
  mountPath: /etc/ascend_install.info
  readOnly: true
{{- end }}
{{- end }}

{{/* Requests equal limits: devices cannot be shared, and memory pressure must not evict a server of this size. */}}
{{- define "dsv4.amounts" -}}
cpu: {{ .Values.resources.cpu | quote }}
memory: {{ .Values.resources.memory }}
{{- if eq .Values.backend "npu" }}
{{ .Values.npu.resourceName }}: {{ .Values.npu.count | quote }}
{{- end }}
{{- end }}

{{- define "dsv4.resources" -}}
requests: {{- include "dsv4.amounts" . | nindent 2 }}
limits: {{- include "dsv4.amounts" . | nindent 2 }}
{{- end }}
