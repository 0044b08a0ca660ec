// check reads YAML documents and decodes each, strictly, into the Go types of the Kubernetes version that it was
// built with: a field that this version does not have is an error. It writes one line for each document. Kinds that
// are not Kubernetes' own are listed with a question mark.
package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	schedulerv1 "k8s.io/kube-scheduler/config/v1"
	"sigs.k8s.io/yaml"
)

func main() {
	if err := check(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func check(in io.Reader, out io.Writer) error {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{admissionv1.AddToScheme, appsv1.AddToScheme, corev1.AddToScheme, networkingv1.AddToScheme,
		policyv1.AddToScheme, rbacv1.AddToScheme, schedulingv1.AddToScheme, schedulerv1.AddToScheme} {
		if err := add(scheme); err != nil {
			return err
		}
	}
	decoder := json.NewSerializerWithOptions(json.DefaultMetaFactory, scheme, scheme, json.SerializerOptions{Yaml: true, Strict: true})
	documents := utilyaml.NewYAMLReader(bufio.NewReader(in))
	var failed []error
	for {
		text, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return errors.Join(failed...)
		}
		if err != nil {
			return err
		}
		var head struct {
			metav1.TypeMeta   `json:",inline"`
			metav1.ObjectMeta `json:"metadata"`
		}
		if err := yaml.Unmarshal(text, &head); err != nil {
			return err
		}
		if head.Kind == "" && strings.TrimSpace(strings.Join(withoutComments(string(text)), "")) == "" {
			continue
		}
		name := fmt.Sprintf("%s %s %s", head.APIVersion, head.Kind, head.Name)
		object, _, err := decoder.Decode(text, nil, nil)
		if runtime.IsNotRegisteredError(err) && !strings.HasSuffix(head.GroupVersionKind().Group, "k8s.io") && strings.Contains(head.APIVersion, ".") {
			fmt.Fprintln(out, "?", name)
			continue
		}
		if err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", name, err))
			continue
		}
		fmt.Fprintln(out, " ", name)
		failed = append(failed, nested(name, object, decoder))
		if m, ok := object.(*corev1.ConfigMap); ok && m.Data["scheduler.yaml"] != "" {
			name += ", scheduler.yaml"
			if object, _, err = decoder.Decode([]byte(m.Data["scheduler.yaml"]), nil, nil); err != nil {
				failed = append(failed, fmt.Errorf("%s: %w", name, err))
				continue
			}
			failed = append(failed, nested(name, object, decoder))
		}
	}
}

// nested decodes the arguments of kube-scheduler's plugins.
func nested(name string, object runtime.Object, decoder runtime.Decoder) error {
	c, ok := object.(*schedulerv1.KubeSchedulerConfiguration)
	if !ok {
		return nil
	}
	if err := c.DecodeNestedObjects(decoder); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

func withoutComments(text string) []string {
	var out []string
	for line := range strings.Lines(text) {
		if t := strings.TrimSpace(line); t != "---" && !strings.HasPrefix(t, "#") {
			out = append(out, t)
		}
	}
	return out
}
