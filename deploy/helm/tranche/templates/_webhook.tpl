{{/* Is the webhook of use? With another scheduler than ours only for HAMi's pods. */}}
{{- define "tranche.webhook" -}}
{{- if and .Values.webhook.enabled (or (eq .Values.scheduler.mode "own") .Values.webhook.hami.enabled) -}}
yes
{{- end -}}
{{- end -}}

{{/* The resources that pods are sent to it for, as a list in CEL. */}}
{{- define "tranche.webhookResources" -}}
{{- $names := list (printf "%s/vcuda-core" .Values.resourceDomain) (printf "%s/vcuda-memory" .Values.resourceDomain) -}}
{{- if .Values.webhook.hami.enabled -}}
{{- $names = concat $names (list "nvidia.com/gpu" "nvidia.com/gpumem" "nvidia.com/gpumem-percentage" "nvidia.com/gpucores" "nvidia.com/priority") -}}
{{- end -}}
[{{ range $i, $n := $names }}{{ if $i }}, {{ end }}{{ $n | quote }}{{ end }}]
{{- end -}}
