package charttest

import (
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/plugin/cel"
	"k8s.io/apiserver/pkg/admission/plugin/webhook/matchconditions"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/cel/environment"
	"sigs.k8s.io/yaml"
)

// Which pods an API server 1.29 sends to the webhook.
func TestWebhookConditions(t *testing.T) {
	for _, set := range []struct {
		args []string
		hami bool
	}{{nil, false}, {[]string{"--set", "webhook.hami.enabled=true"}, true}} {
		out := documents(template(t, oldest, set.args...), "MutatingWebhookConfiguration")
		var c admissionv1.MutatingWebhookConfiguration
		if len(out) != 1 || yaml.UnmarshalStrict([]byte(out[0]), &c) != nil || len(c.Webhooks) != 1 {
			t.Fatalf("%q", out)
		}
		w := c.Webhooks[0]
		compiler := cel.NewConditionCompiler(environment.MustBaseEnvSet(version.MajorMinor(1, 29)))
		var conditions []cel.ExpressionAccessor
		for i := range w.MatchConditions {
			conditions = append(conditions, (*matchconditions.MatchCondition)(&w.MatchConditions[i]))
		}
		evaluator := compiler.CompileCondition(conditions, cel.OptionalVariableDeclarations{HasAuthorizer: true}, environment.NewExpressions)
		for _, err := range evaluator.CompilationErrors() {
			t.Fatal(err)
		}
		matcher := matchconditions.NewMatcher(evaluator, w.FailurePolicy, "webhook", "admit", w.Name)
		asks := func(name string) corev1.ResourceList {
			return corev1.ResourceList{corev1.ResourceName(name): resource.MustParse("1")}
		}
		for _, test := range []struct {
			name       string
			init, main corev1.ResourceRequirements
			want       bool
		}{
			{"nothing", corev1.ResourceRequirements{}, corev1.ResourceRequirements{}, false},
			{"a processor", corev1.ResourceRequirements{}, corev1.ResourceRequirements{Limits: asks("cpu"), Requests: asks("cpu")}, false},
			{"a slice", corev1.ResourceRequirements{}, corev1.ResourceRequirements{Limits: asks("tencent.com/vcuda-core")}, true},
			{"memory, in requests", corev1.ResourceRequirements{}, corev1.ResourceRequirements{Limits: asks("cpu"), Requests: asks("tencent.com/vcuda-memory")}, true},
			{"an init container", corev1.ResourceRequirements{Limits: asks("tencent.com/vcuda-core")}, corev1.ResourceRequirements{}, true},
			{"HAMi's", corev1.ResourceRequirements{}, corev1.ResourceRequirements{Limits: asks("nvidia.com/gpumem")}, set.hami},
			{"another's", corev1.ResourceRequirements{}, corev1.ResourceRequirements{Limits: asks("nvidia.com/mig-1g.5gb")}, false},
		} {
			pod := &corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}, ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "a"},
				Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "side"}, {Name: "c", Resources: test.main}}}}
			if len(test.init.Limits) > 0 {
				pod.Spec.InitContainers = []corev1.Container{{Name: "i", Resources: test.init}}
			}
			kind, pods := corev1.SchemeGroupVersion.WithKind("Pod"), schema.GroupVersionResource{Version: "v1", Resource: "pods"}
			attributes := admission.NewAttributesRecord(pod, nil, kind, "a", "p", pods, "", admission.Create, nil, false, &user.DefaultInfo{Name: "u"})
			versioned := &admission.VersionedAttributes{Attributes: attributes, VersionedKind: kind, VersionedObject: admission.NewLazyObject(pod)}
			result := matcher.Match(t.Context(), versioned, nil, nil)
			if result.Error != nil || result.Matches != test.want {
				t.Errorf("%s, HAMi %t: %+v", test.name, set.hami, result)
			}
		}
		for namespace, want := range map[string]bool{"default": true, "kube-system": false, "tranche": false} {
			selector, err := metav1.LabelSelectorAsSelector(w.NamespaceSelector)
			if err != nil || selector.Matches(labels.Set{"kubernetes.io/metadata.name": namespace}) != want || selector.Matches(labels.Set{"kubernetes.io/metadata.name": "x", "tranche.dev/webhook": "ignore"}) {
				t.Errorf("namespace %s: %v", namespace, err)
			}
		}
	}
}

// Rights and objects by where the certificate comes from.
func TestWebhookCertificates(t *testing.T) {
	for _, c := range []struct {
		args  string
		has   []string
		hasnt []string
	}{
		{"webhook.replicas=1", []string{"resources: [secrets], resourceNames: [tranche-webhook-authority], verbs: [get, update]", "--authority-secret=tranche/tranche-webhook-authority"},
			[]string{"cert-manager.io", "resources: [secrets], verbs", "--hami"}},
		{"webhook.certificates=cert-manager", []string{"kind: Issuer", "secretName: tranche-webhook-tls", "inject-ca-from: tranche/tranche-webhook", "automountServiceAccountToken: false"},
			[]string{"resources: [secrets]", "mutatingwebhookconfigurations]", "authority"}},
		{"webhook.certificates=cert-manager,webhook.issuer.kind=ClusterIssuer,webhook.issuer.name=corp", []string{"kind: ClusterIssuer", "name: corp"}, []string{"kind: Issuer"}},
		{"webhook.certificates=secret,webhook.tlsSecret=t,webhook.caBundle=QQ==,webhook.hami.enabled=true", []string{"caBundle: QQ==", "secretName: t", "resources: [nodes], verbs: [list, watch]", "--hami"},
			[]string{"resources: [secrets]", "mutatingwebhookconfigurations]", "automountServiceAccountToken"}},
		{"webhook.enabled=false", nil, []string{"webhook"}},
		{"scheduler.mode=none", nil, []string{"webhook"}},
		{"scheduler.mode=none,webhook.hami.enabled=true", []string{"- \"--scheduler-name=\"\n", "--hami"}, nil},
	} {
		out := template(t, newest, "--set", c.args)
		for _, want := range c.has {
			if !strings.Contains(out, want) {
				t.Errorf("%s: no %q", c.args, want)
			}
		}
		for _, not := range c.hasnt {
			if strings.Contains(out, not) {
				t.Errorf("%s: there is %q", c.args, not)
			}
		}
	}
}
