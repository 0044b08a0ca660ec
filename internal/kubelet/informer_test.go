package kubelet

import (
	"maps"
	"slices"
	"strconv"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// told notes what an informer tells.
type told struct{ changed, gone []string }

func (e *told) Changed(pod *corev1.Pod) { e.changed = append(e.changed, string(pod.UID)) }
func (e *told) Gone(uid types.UID)      { e.gone = append(e.gone, string(uid)) }

// Pods are in the order in which they came to the node, whatever becomes of them later; those that were there at the start are
// before them.
func TestOrder(t *testing.T) {
	p, e := &APIPods{order: map[types.UID]uint64{}}, &told{}
	h := p.handler(e)
	pod := func(name string, uid string, version int) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(uid), ResourceVersion: strconv.Itoa(version)}}
	}
	h.OnAdd(pod("old", "z", 90), true)
	h.OnAdd(pod("first", "y", 100), false)
	h.OnAdd(pod("second", "x", 101), false)
	h.OnUpdate(pod("first", "y", 100), pod("first", "y", 102))
	odd := pod("odd", "w", 0)
	odd.ResourceVersion = "not a number"
	h.OnAdd(odd, false)
	h.OnUpdate(pod("first", "y", 102), pod("first", "again", 110)) // its deletion was missed
	if want := map[types.UID]uint64{"z": 0, "x": 101, "w": 101, "again": 110}; !maps.Equal(p.order, want) {
		t.Errorf("order %v, want %v", p.order, want)
	}
	h.OnDelete(pod("second", "x", 120))
	if want := []string{"z", "y", "x", "y", "w", "again"}; !slices.Equal(e.changed, want) || !slices.Equal(e.gone, []string{"y", "x"}) || p.Order("x") != 0 {
		t.Errorf("%+v, order %v", e, p.order)
	}
}
