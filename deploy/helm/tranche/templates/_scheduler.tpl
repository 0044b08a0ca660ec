{{/* kube-scheduler's part about the extender: context, url, tls. */}}
{{- define "tranche.extender" -}}
{{- $s := .context.Values.scheduler -}}
extenders:
  - urlPrefix: {{ .url }}/scheduler
    filterVerb: predicates
    prioritizeVerb: priorities
    bindVerb: bind
    preemptVerb: preemption
    weight: {{ int $s.weight }}
    httpTimeout: 15s
    # Names are enough: the extender watches nodes itself.
    nodeCacheCapable: true
    # Without the extender a pod waits; it does not go where there is no room.
    ignorable: false
    managedResources:
      - name: {{ .context.Values.resourceDomain }}/vcuda-core
      - name: {{ .context.Values.resourceDomain }}/vcuda-memory
    {{- if .tls }}
    {{- include "tranche.extenderTLS" .context | nindent 4 }}
  # Pods without GPUs, so that they take no CPU and memory that GPUs will need. Leave it out to spare a call for each of them.
  - urlPrefix: {{ .url }}/scheduler
    prioritizeVerb: priorities-others
    weight: {{ int $s.weight }}
    httpTimeout: 5s
    nodeCacheCapable: true
    ignorable: true
    {{- include "tranche.extenderTLS" .context | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* How the cluster's scheduler calls the extender, whose certificate it knows and which knows its. */}}
{{- define "tranche.extenderTLS" -}}
enableHTTPS: true
tlsConfig:
  serverName: {{ .Release.Name }}-scheduler.{{ .Release.Namespace }}.svc
  caFile: /etc/kubernetes/tranche/ca.crt
  certFile: /etc/kubernetes/tranche/tls.crt
  keyFile: /etc/kubernetes/tranche/tls.key
{{- end -}}

{{- define "tranche.schedulerConfig" -}}
{{- $s := .Values.scheduler -}}
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection:
  qps: 300
  burst: 600
leaderElection:
  leaderElect: true
  resourceNamespace: {{ .Release.Namespace }}
  resourceName: {{ .Release.Name }}-kube-scheduler
# The extender ranks the nodes it is shown: show it all.
percentageOfNodesToScore: 100
profiles:
  - schedulerName: {{ $s.name | quote }}
    plugins:
      # What a pod asks for wins over packing.
      multiPoint:
        enabled:
          - {name: NodeAffinity, weight: 20}
          - {name: PodTopologySpread, weight: 20}
          - {name: InterPodAffinity, weight: 20}
          - {name: TaintToleration, weight: 20}
    pluginConfig:
      # Without this, replicas are spread over nodes and zones though nobody asked for it.
      - name: PodTopologySpread
        args:
          defaultingType: List
          defaultConstraints: []
{{ include "tranche.extender" (dict "context" . "url" (printf "http://127.0.0.1:%v" $s.service.port) "tls" false) }}
{{- end -}}
