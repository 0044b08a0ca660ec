{{/* Labels that choose pods: context, component. */}}
{{- define "tranche.selector" -}}
app.kubernetes.io/name: tranche
app.kubernetes.io/instance: {{ .context.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels of every object. */}}
{{- define "tranche.labels" -}}
{{ include "tranche.selector" . }}
app.kubernetes.io/version: {{ .context.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .context.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .context.Chart.Name .context.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "tranche.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{/* The cluster's version as an image's tag: v1.37.2 of v1.37.2-gke.100. */}}
{{- define "tranche.kubeTag" -}}
{{ .Values.scheduler.kubeScheduler.tag | default (regexFind "^v[0-9]+\\.[0-9]+\\.[0-9]+" .Capabilities.KubeVersion.Version) }}
{{- end -}}

{{/* Is the policy for nodes' accounts to be rendered? Its condition needs the node's name in the token. */}}
{{- define "tranche.policy" -}}
{{- if or (eq .Values.admissionPolicy "always") (and (eq .Values.admissionPolicy "auto") (semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version)) -}}
yes
{{- end -}}
{{- end -}}

{{/* What a pod without privileges must not have. */}}
{{- define "tranche.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end -}}
