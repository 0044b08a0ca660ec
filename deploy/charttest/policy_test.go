package charttest

import (
	"context"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/plugin/cel"
	"k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	"k8s.io/apiserver/pkg/admission/plugin/webhook/matchconditions"
	apiservercel "k8s.io/apiserver/pkg/apis/cel"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/cel/environment"
	"sigs.k8s.io/yaml"
)

// policy compiles the chart's policy as an API server 1.30 does, the first that has it.
func policy(t *testing.T) (validating.Validator, *admissionv1.ValidatingAdmissionPolicy) {
	t.Helper()
	out := documents(template(t, "1.30.0", "--set", "node.labels.pool=shared"), "ValidatingAdmissionPolicy")
	if len(out) != 1 {
		t.Fatalf("%d policies", len(out))
	}
	p := &admissionv1.ValidatingAdmissionPolicy{}
	if err := yaml.UnmarshalStrict([]byte(out[0]), p); err != nil {
		t.Fatal(err)
	}
	compiler, err := cel.NewCompositedCompiler(environment.MustBaseEnvSet(version.MajorMinor(1, 30)))
	if err != nil {
		t.Fatal(err)
	}
	options := cel.OptionalVariableDeclarations{HasAuthorizer: true}
	for _, v := range p.Spec.Variables {
		if r := compiler.CompileAndStoreVariable(&validating.Variable{Name: v.Name, Expression: v.Expression}, options, environment.NewExpressions); r.Error != nil {
			t.Fatalf("variable %s: %v", v.Name, r.Error)
		}
	}
	compile := func(what string, list []cel.ExpressionAccessor) cel.ConditionEvaluator {
		e := compiler.CompileCondition(list, options, environment.NewExpressions)
		for _, err := range e.CompilationErrors() {
			t.Fatalf("%s: %v", what, err)
		}
		return e
	}
	var conditions, validations []cel.ExpressionAccessor
	for i := range p.Spec.MatchConditions {
		conditions = append(conditions, (*matchconditions.MatchCondition)(&p.Spec.MatchConditions[i]))
	}
	messages := make([]cel.ExpressionAccessor, len(p.Spec.Validations))
	for i, v := range p.Spec.Validations {
		validations = append(validations, &validating.ValidationCondition{Expression: v.Expression, Message: v.Message})
		if v.MessageExpression != "" {
			messages[i] = &validating.MessageExpressionCondition{MessageExpression: v.MessageExpression}
		}
	}
	matcher := matchconditions.NewMatcher(compile("conditions", conditions), p.Spec.FailurePolicy, "policy", "validate", p.Name)
	return validating.NewValidator(compile("validations", validations), matcher, compile("annotations", nil), compile("messages", messages), p.Spec.FailurePolicy, nil), p
}

func TestPolicy(t *testing.T) {
	v, _ := policy(t)
	node := func(name string, labels, annotations map[string]string) *corev1.Node {
		return &corev1.Node{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}, ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels, Annotations: annotations}}
	}
	pod := func(on string, annotations map[string]string) *corev1.Pod {
		return &corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}, ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "a", Annotations: annotations}, Spec: corev1.PodSpec{NodeName: on}}
	}
	event := func(from string) *corev1.Event {
		return &corev1.Event{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Event"}, ObjectMeta: metav1.ObjectMeta{Name: "e", Namespace: "a"}, ReportingInstance: from}
	}
	tainted := node("n1", nil, nil)
	tainted.Spec.Taints = []corev1.Taint{{Key: "k", Effect: corev1.TaintEffectNoSchedule}}
	labelled := pod("n1", nil)
	labelled.Labels = map[string]string{"app": "other"}
	m := func(kv ...string) map[string]string {
		out := map[string]string{}
		for i := 0; i < len(kv); i += 2 {
			out[kv[i]] = kv[i+1]
		}
		return out
	}
	const account = "system:serviceaccount:tranche:tranche-node"
	tests := []struct {
		name     string
		user, on string
		old, new runtime.Object
		denied   string // "": it may
	}{
		{"inventory and a label of ours", account, "n1", node("n1", m("a", "b"), m("x", "y")), node("n1", m("a", "b", "pool", "shared"), m("x", "y", "tranche.dev/inventory", "{}")), ""},
		{"inventory where there was no annotation", account, "n1", node("n1", nil, nil), node("n1", nil, m("tranche.dev/inventory", "{}")), ""},
		{"another node", account, "n1", node("n2", nil, nil), node("n2", nil, m("tranche.dev/inventory", "{}")), "the account of node n1 must not write node n2"},
		{"another label", account, "n1", node("n1", nil, nil), node("n1", m("node-role.kubernetes.io/control-plane", ""), nil), "labels that are not Tranche's: node-role.kubernetes.io/control-plane"},
		{"a label removed", account, "n1", node("n1", m("a", "b"), nil), node("n1", nil, nil), "labels that are not Tranche's: a"},
		{"another annotation", account, "n1", node("n1", nil, m("x", "y")), node("n1", nil, m("x", "z")), "annotations that are not Tranche's: x"},
		{"a taint", account, "n1", node("n1", nil, nil), tainted, "only labels and annotations"},
		{"a token without a node", account, "", node("n1", nil, nil), node("n1", nil, nil), "does not tell its node"},
		{"somebody else", "admin", "", node("n1", nil, nil), tainted, ""},

		{"where a pod's GPUs are", account, "n1", pod("n1", nil), pod("n1", m("tranche.dev/gpus", "{}", "tencent.com/gpu-assigned", "true", "tencent.com/predicate-gpu-idx-12", "0")), ""},
		{"a pod's limits", account, "n1", pod("n1", nil), pod("n1", m("tranche.dev/cores", "100")), "annotations that are not Tranche's: tranche.dev/cores"},
		{"nearly an annotation of ours", account, "n1", pod("n1", nil), pod("n1", m("tencentXcom/predicate-gpu-idx-0", "0")), "annotations that are not Tranche's"},
		{"a pod of another node", account, "n1", pod("n2", nil), pod("n2", m("tranche.dev/gpus", "{}")), "must not write pods of other nodes"},
		{"a pod without a node", account, "n1", pod("", nil), pod("", m("tranche.dev/gpus", "{}")), "must not write pods of other nodes"},
		{"a pod's label", account, "n1", pod("n1", nil), labelled, "labels that are not Tranche's: app"},

		{"an event", account, "n1", nil, event("n1"), ""},
		{"an event of another", account, "n1", nil, event("n2"), "must not tell events of other nodes"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			who := &user.DefaultInfo{Name: test.user}
			if test.on != "" {
				who.Extra = map[string][]string{"authentication.kubernetes.io/node-name": {test.on}}
			}
			kind := test.new.GetObjectKind().GroupVersionKind()
			resource := schema.GroupVersionResource{Version: "v1", Resource: strings.ToLower(kind.Kind) + "s"}
			accessor, ok := test.new.(metav1.Object)
			if !ok {
				t.Fatal("no object")
			}
			operation := admission.Update
			if test.old == nil {
				operation = admission.Create
			}
			a := admission.NewAttributesRecord(test.new, test.old, kind, accessor.GetNamespace(), accessor.GetName(), resource, "", operation, nil, false, who)
			result := v.Validate(context.Background(), resource, &admission.VersionedAttributes{Attributes: a, VersionedKind: kind, VersionedObject: admission.NewLazyObject(test.new), VersionedOldObject: admission.NewLazyObject(test.old)},
				nil, nil, apiservercel.RuntimeCELCostBudget, nil)
			var denied []string
			for _, d := range result.Decisions {
				if d.Action == validating.ActionDeny {
					denied = append(denied, d.Message)
				}
			}
			switch {
			case test.denied == "" && len(denied) > 0:
				t.Errorf("denied: %q", denied)
			case test.denied != "" && (len(denied) == 0 || !strings.Contains(denied[0], test.denied)):
				t.Errorf("denied %q, want %q", denied, test.denied)
			}
		})
	}
}
