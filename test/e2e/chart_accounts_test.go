package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"tranche.dev/tranche/internal/podspec"
)

// The accounts may what docs/install.md says, and a node's account writes nothing of another node.
func chartAccounts(t *testing.T, c *chart) {
	t.Run("Rights", func(t *testing.T) { chartRights(t, c) })
	t.Run("OwnNode", func(t *testing.T) { chartOwnNode(t, c) })
}

// rights are what kubectl auth can-i --list tells of an account in a namespace, a line for each verb, but for what every account
// of the namespace has.
func (c *chart) rights(t *testing.T, account, namespace string) map[string]bool {
	t.Helper()
	list := func(account string) map[string]bool {
		config := rest.CopyConfig(c.b.REST)
		config.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:" + chartNamespace + ":" + account,
			Groups: []string{"system:serviceaccounts", "system:serviceaccounts:" + chartNamespace, "system:authenticated"}}
		client, err := kubernetes.NewForConfig(config)
		if err != nil {
			t.Fatal(err)
		}
		review, err := client.AuthorizationV1().SelfSubjectRulesReviews().Create(t.Context(),
			&authorizationv1.SelfSubjectRulesReview{Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: namespace}}, metav1.CreateOptions{})
		if err != nil || review.Status.Incomplete {
			t.Fatalf("%v, %+v", err, review)
		}
		out := map[string]bool{}
		for _, r := range review.Status.ResourceRules {
			words(out, r.APIGroups, r.Resources, r.ResourceNames, r.Verbs)
		}
		for _, r := range review.Status.NonResourceRules {
			words(out, []string{""}, r.NonResourceURLs, nil, r.Verbs)
		}
		return out
	}
	out := list(account)
	for line := range list("default") {
		delete(out, line)
	}
	return out
}

// words adds a line for each thing that a rule allows: "patch nodes", "get leases.coordination.k8s.io/tranche".
func words(to map[string]bool, groups, resources, names, verbs []string) {
	if len(names) == 0 {
		names = []string{""}
	}
	for _, group := range groups {
		for _, resource := range resources {
			for _, name := range names {
				for _, verb := range verbs {
					what := resource
					if group != "" {
						what += "." + group
					}
					if name != "" {
						what += "/" + name
					}
					to[verb+" "+what] = true
				}
			}
		}
	}
}

// documented are the lines of docs/install.md on an account's rights, by namespace; "" holds in all of them.
func documented(t *testing.T, account string) map[string]map[string]bool {
	t.Helper()
	text, err := os.ReadFile("../../docs/install.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text1, _ := strings.Cut(string(text), "<!-- rights: "+account+" -->\n```\n")
	block, _, ok := strings.Cut(text1, "```\n")
	if !ok {
		t.Fatalf("docs/install.md does not have the rights of %s", account)
	}
	out := map[string]map[string]bool{}
	for line := range strings.Lines(block) {
		line, _, _ = strings.Cut(strings.TrimSpace(line), " # ")
		line, namespace, _ := strings.Cut(strings.TrimSpace(line), " in ")
		verbs, what, ok := strings.Cut(line, " ")
		if !ok {
			t.Fatalf("docs/install.md: %q", line)
		}
		if out[namespace] == nil {
			out[namespace] = map[string]bool{}
		}
		for verb := range strings.SplitSeq(verbs, ",") {
			out[namespace][verb+" "+what] = true
		}
	}
	return out
}

func chartRights(t *testing.T, c *chart) {
	kube := map[string]bool{} // of kube-scheduler, whose account is the extender's
	for _, name := range []string{"system:kube-scheduler", "system:volume-scheduler"} {
		role, err := c.b.Client.RbacV1().ClusterRoles().Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		add(kube, role.Rules)
	}
	wantRights(t, c, nil, "tranche-node")
	wantRights(t, c, kube, "tranche-scheduler")
}

// wantRights compares an account's rights with what the documentation says, in each namespace that matters. It may have others
// as well.
func wantRights(t *testing.T, c *chart, others map[string]bool, account string) {
	t.Helper()
	says := documented(t, account)
	for _, namespace := range []string{"default", chartNamespace, "kube-system"} {
		want := map[string]bool{}
		maps.Copy(want, says[""])
		maps.Copy(want, says[namespace])
		has := c.rights(t, account, namespace)
		for _, line := range slices.Sorted(maps.Keys(want)) {
			if !has[line] {
				t.Errorf("%s in %s may not %s, as docs/install.md says", account, namespace, line)
			}
		}
		for _, line := range slices.Sorted(maps.Keys(has)) {
			if !want[line] && !others[line] {
				t.Errorf("%s in %s may %s, which docs/install.md does not say", account, namespace, line)
			}
		}
	}
}

func add(to map[string]bool, rules []rbacv1.PolicyRule) {
	for _, r := range rules {
		words(to, r.APIGroups, r.Resources, r.ResourceNames, r.Verbs)
	}
}

// The account with the token of the node's own pod, which tells the API server the node.
func chartOwnNode(t *testing.T, c *chart) {
	if !c.b.AtLeast(30) {
		t.Skip("Kubernetes 1.30 is the first that serves ValidatingAdmissionPolicy: docs/install.md says what that means")
	}
	on, off := c.b.Nodes[0].Name, c.b.Nodes[1].Name
	pod := c.nodePod(t, on)
	files, err := filepath.Glob(c.b.Nodes[0].Path("/var/lib/kubelet/pods/" + string(pod.UID) + "/volumes/kubernetes.io~projected/*/token"))
	if err != nil || len(files) != 1 {
		t.Fatalf("tokens of %s: %q, %v", pod.Name, files, err)
	}
	token, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	config := rest.AnonymousClientConfig(c.b.REST)
	config.BearerToken = string(token)
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	here, there := c.b.CreatePod(t, sleeper("here", on)), c.b.CreatePod(t, sleeper("there", off))
	node := func(name, patch string) error {
		_, err := client.CoreV1().Nodes().Patch(t.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
		return err
	}
	ofPod := func(name, patch string) error {
		_, err := client.CoreV1().Pods("default").Patch(t.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
		return err
	}
	event := func(from string) error {
		e := &corev1.Event{ObjectMeta: metav1.ObjectMeta{GenerateName: "e", Namespace: "default"}, InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: here.Name},
			Reason: "Test", Message: "test", Type: corev1.EventTypeNormal, ReportingController: "tranche", ReportingInstance: from, Action: "test", EventTime: metav1.NowMicro()}
		_, err := client.CoreV1().Events("default").Create(t.Context(), e, metav1.CreateOptions{})
		return err
	}
	own, err := c.b.Client.CoreV1().Nodes().Get(t.Context(), on, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	inventory, err := json.Marshal(own.Annotations[podspec.Inventory] + " ") // the same, written
	if err != nil {
		t.Fatal(err)
	}
	const ours = `{"metadata": {"annotations": {"tranche.dev/gpus": "{}"}}}`
	// A policy is in force some time after it was made.
	c.nodes[0].waitFor(t, "the policy", soon, func() error {
		if err := node(off, `{"metadata": {"annotations": {"tranche.dev/inventory": "{}"}}}`); err == nil {
			return fmt.Errorf("the account of %s wrote %s", on, off)
		}
		return nil
	})
	tests := []struct {
		name string
		err  error
		want string // empty: it may
	}{
		{"its node", node(on, `{"metadata": {"annotations": {"tranche.dev/inventory": `+string(inventory)+`}}}`), ""},
		{"another node", node(off, `{"metadata": {"annotations": {"tranche.dev/inventory": "{}"}}}`), "the account of node " + on + " must not write node " + off},
		{"its node's labels", node(on, `{"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}}`), "labels that are not Tranche's"},
		{"its node's taints", node(on, `{"spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]}}`), "only labels and annotations"},
		{"its node's status", func() error {
			_, err := client.CoreV1().Nodes().Patch(t.Context(), on, types.MergePatchType, []byte(`{"status": {"capacity": {"tencent.com/vcuda-core": "1"}}}`), metav1.PatchOptions{}, "status")
			return err
		}(), "forbidden"},
		{"a pod there", ofPod(here.Name, ours), ""},
		{"a pod elsewhere", ofPod(there.Name, ours), "must not write pods of other nodes"},
		{"a pod's limits", ofPod(here.Name, `{"metadata": {"annotations": {"tranche.dev/cores": "100"}}}`), "annotations that are not Tranche's: tranche.dev/cores"},
		{"an event", event(on), ""},
		{"another's event", event(off), "must not tell events of other nodes"},
		{"deletion", client.CoreV1().Pods("default").Delete(t.Context(), here.Name, metav1.DeleteOptions{}), "forbidden"},
		{"secrets", func() error {
			_, err := client.CoreV1().Secrets("").List(t.Context(), metav1.ListOptions{})
			return err
		}(), "forbidden"},
	}
	for _, test := range tests {
		switch {
		case test.want == "" && test.err != nil:
			t.Errorf("%s: %v", test.name, test.err)
		case test.want != "" && (test.err == nil || !strings.Contains(test.err.Error(), test.want)):
			t.Errorf("%s: %v, want %q", test.name, test.err, test.want)
		}
	}
}
