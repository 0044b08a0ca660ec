package scheduler

import (
	"bytes"
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	extender "k8s.io/kube-scheduler/extender/v1"
)

// The names in a request are part of its body, whose memory is the next request's: nothing of them may stay in
// the core.
func TestCoreKeepsNothingOfABody(t *testing.T) {
	nodes := []*corev1.Node{testNode("node-a", 2, "T4", 16*gib), testNode("node-b", 2, "V100", 16*gib), testNode("node-c", 1, "T4", 16*gib)}
	for _, exact := range []bool{false, true} {
		c := testCore(t, CoreConfig{Evict: true, Exact: exact}, nodes...)
		api := &fakeAPI{}
		s := ready(c, api)
		h := s.Handler()
		spoilt := 0
		do := func(verb string, in any) string {
			t.Helper()
			w := serve(t, h, verb, in)
			s.Wait()
			answer := w.Body.String()
			if w.Code != http.StatusOK || strings.Contains(answer, "####") {
				t.Fatalf("%s: %d %s", verb, w.Code, answer)
			}
			for range 8 {
				x, ok := s.buffers.Get().(*scratch)
				if !ok {
					break
				}
				if b := x.body[:cap(x.body)]; len(x.body) > 0 {
					spoilt++
					copy(b, bytes.Repeat([]byte{'#'}, len(b)))
				}
			}
			return answer
		}
		ask := func(p *corev1.Pod, names ...string) {
			t.Helper()
			do("predicates", extender.ExtenderArgs{Pod: p, NodeNames: &names})
			do("priorities", extender.ExtenderArgs{Pod: p, NodeNames: &names})
		}
		all := []string{"node-c", "gone-x", "node-a", "node-b"}
		for i, p := range []*corev1.Pod{testPod("one", 60, 8), testPod("two", 60, 8), testPod("none", 300, 8), testPod("odd", 30, 0)} {
			if i == 1 {
				c.PodSeen(p)
			}
			ask(p, all...)
			do("priorities-others", extender.ExtenderArgs{Pod: &corev1.Pod{ObjectMeta: p.ObjectMeta}, NodeNames: &all})
		}
		for name, n := range c.nodes {
			for i := range n.gpus {
				placeBound(c, testPod(fmt.Sprint(name, "-low-", i), 50, 8), name, i)
			}
		}
		ask(priority(testPod("high", 90, 8), 5), all...)
		if len(api.evicted) == 0 || spoilt == 0 {
			t.Errorf("exact %v: %d evicted, %d bodies spoilt: nothing was looked at", exact, len(api.evicted), spoilt)
		}
		if found := findText(reflect.ValueOf(c), "####", map[uintptr]bool{}, "core"); found != "" {
			t.Errorf("exact %v: %s is part of a body that was answered", exact, found)
		}
	}
}

// findText is where a text is in any string that a value leads to, left out what is valid until the next decision
// only; empty: nowhere.
func findText(v reflect.Value, text string, seen map[uintptr]bool, path string) string {
	switch v.Kind() {
	case reflect.String:
		if strings.Contains(v.String(), text) {
			return path
		}
	case reflect.Pointer, reflect.Interface:
		if v.IsNil() || v.Kind() == reflect.Pointer && seen[v.Pointer()] {
			return ""
		}
		if v.Kind() == reflect.Pointer {
			seen[v.Pointer()] = true
		}
		return findText(v.Elem(), text, seen, path)
	case reflect.Struct:
		for i := range v.NumField() {
			name := v.Type().Field(i).Name
			if path == "core.cluster" && name == "last" {
				continue
			}
			if found := findText(v.Field(i), text, seen, path+"."+name); found != "" {
				return found
			}
		}
	case reflect.Slice, reflect.Array:
		for i := range v.Len() {
			if found := findText(v.Index(i), text, seen, path); found != "" {
				return found
			}
		}
	case reflect.Map:
		for _, k := range v.MapKeys() {
			if found := findText(k, text, seen, path+" key"); found != "" {
				return found
			}
			if found := findText(v.MapIndex(k), text, seen, path+"[]"); found != "" {
				return found
			}
		}
	}
	return ""
}
