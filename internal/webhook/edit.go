package webhook

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// Operation is one of a JSON patch (RFC 6902).
type Operation struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value,omitempty"`
}

// editor changes a pod and writes down how.
type editor struct {
	pod *corev1.Pod
	ops []Operation
}

// container is one of the editor's pod.
type container struct {
	*corev1.Container
	path string
}

// containers are those of the pod, init containers first. Ephemeral ones ask for no resources.
func (e *editor) containers() []container {
	var out []container
	add := func(list []corev1.Container, field string) {
		for i := range list {
			out = append(out, container{&list[i], fmt.Sprintf("/spec/%s/%d", field, i)})
		}
	}
	add(e.pod.Spec.InitContainers, "initContainers")
	add(e.pod.Spec.Containers, "containers")
	return out
}

func (e *editor) add(path string, value any) {
	e.ops = append(e.ops, Operation{"add", path, value})
}

// escape makes a key a part of a JSON pointer (RFC 6901).
func escape(key string) string { return strings.NewReplacer("~", "~0", "/", "~1").Replace(key) }

func (e *editor) schedulerName(name string) {
	if e.pod.Spec.SchedulerName != name {
		e.pod.Spec.SchedulerName = name
		e.add("/spec/schedulerName", name)
	}
}

func (e *editor) annotate(key, value string) {
	if old, ok := e.pod.Annotations[key]; ok && old == value {
		return
	}
	if e.pod.Annotations == nil {
		e.pod.Annotations = map[string]string{}
		e.add("/metadata/annotations", map[string]string{})
	}
	e.pod.Annotations[key] = value
	e.add("/metadata/annotations/"+escape(key), value)
}

// list is a container's limits or its requests, and its place in the pod.
type list struct {
	of   *corev1.ResourceList
	path string
}

func (c container) lists() []list {
	return []list{{&c.Resources.Limits, c.path + "/resources/limits"}, {&c.Resources.Requests, c.path + "/resources/requests"}}
}

// set asks for a resource, in limits and requests: they must be equal for one that Kubernetes does not know.
func (e *editor) set(c container, name string, value int64) {
	q := *resource.NewQuantity(value, resource.DecimalSI)
	for _, l := range c.lists() {
		if *l.of == nil {
			*l.of = corev1.ResourceList{}
			e.add(l.path, map[string]string{})
		}
		(*l.of)[corev1.ResourceName(name)] = q
		e.add(l.path+"/"+escape(name), q.String())
	}
}

// drop asks for a resource no more.
func (e *editor) drop(c container, name string) {
	for _, l := range c.lists() {
		if _, ok := (*l.of)[corev1.ResourceName(name)]; ok {
			delete(*l.of, corev1.ResourceName(name))
			e.ops = append(e.ops, Operation{Op: "remove", Path: l.path + "/" + escape(name)})
		}
	}
}
