package webhook

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// Quantities that cannot be computed are refused wherever a pod has some; text that looks like one elsewhere is no matter.
func TestQuantities(t *testing.T) {
	for body, fine := range map[string]bool{
		`{"spec":{"containers":[{"name":"c","resources":{"limits":{"cpu":"1e3","memory":"1E"}},"args":["12e3456789"]}]}}`:             true,
		`{"metadata":{"annotations":{"a":"1e2000000000"},"labels":{"limits":"x"}}}`:                                                   true,
		`{"spec":{"containers":[{"resources":{"limits":{"nvidia.com/gpu":"1e-2000000000"}}}]}}`:                                       false,
		`{"spec":{"containers":[{"resources":{"limits":{"nvidia.com/gpu":1e2000000000}}}]}}`:                                          false,
		`{"spec":{"initContainers":[{"resources":{"Requests":{"cpu":"1E+2000000000"}}}]}}`:                                            false,
		`{"spec":{"overhead":{"cpu":"1e-2000000000"}}}`:                                                                               false,
		`{"spec":{"volumes":[{"emptyDir":{"sizeLimit":"1e2000000000"}}]}}`:                                                            false,
		`{"spec":{"containers":[{"env":[{"valueFrom":{"resourceFieldRef":{"divisor":"1e2000000000"}}}]}]}}`:                           false,
		`{"spec":{"volumes":[{"ephemeral":{"volumeClaimTemplate":{"spec":{"resources":{"requests":{"storage":"1e2000000000"}}}}}}]}}`: false,
	} {
		if err := checkQuantities([]byte(body)); (err == nil) != fine {
			t.Errorf("%s: %v", body, err)
		}
	}
	s := NewServer(&Mutator{}, func() []GPU { return nil }, quiet(), "")
	pod := `{"spec":{"containers":[{"name":"c","resources":{"limits":{"tencent.com/vcuda-core":"1e-2000000000"}}}]}}`
	body, err := json.Marshal(map[string]any{"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": map[string]any{
		"uid": "u", "operation": "CREATE", "resource": map[string]string{"version": "v1", "resource": "pods"}, "object": json.RawMessage(pod)}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.review(body); err == nil || !strings.Contains(err.Error(), "exponent") {
		t.Error(err)
	}
}

// Every quantity of a pod's type is below one of the fields that are looked at.
func TestQuantityFields(t *testing.T) {
	found := 0
	var walk func(of reflect.Type, path []string, within bool)
	walk = func(of reflect.Type, path []string, within bool) {
		if of == reflect.TypeFor[resource.Quantity]() {
			if found++; !within {
				t.Errorf("%s is not looked at", strings.Join(path, "."))
			}
			return
		}
		switch of.Kind() {
		case reflect.Pointer, reflect.Slice, reflect.Map:
			walk(of.Elem(), path, within)
		case reflect.Struct:
			if len(path) > 20 {
				return
			}
			for i := range of.NumField() {
				f := of.Field(i)
				name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
				walk(f.Type, append(slices.Clone(path), name), within || slices.Contains(quantityFields(), name))
			}
		}
	}
	walk(reflect.TypeFor[corev1.Pod](), nil, false)
	if found < 10 {
		t.Errorf("%d quantities in a pod", found)
	}
}
