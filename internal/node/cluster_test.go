package node

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"tranche.dev/tranche/internal/node/books"
	"tranche.dev/tranche/internal/podspec"
)

// The same event is told once a minute, however often it comes; of a pod whose UID is not known it has none.
func TestEventsOnceAMinute(t *testing.T) {
	client := fake.NewClientset()
	now := time.Unix(1_700_000_000, 0)
	c := newCluster(client, "node", func() time.Time { return now }, func(what string, err error) { t.Errorf("%s: %v", what, err) })
	start := now
	var got []int
	for _, at := range []int{0, 1, 30, 59, 62, 90, 121, 124} {
		now = start.Add(time.Duration(at) * time.Second)
		c.event(podRef(books.Pod{Namespace: "n", Name: "p", UID: "n/p"}), corev1.EventTypeWarning, "GPURefused", "why")
		for w, ok := c.next(); ok; w, ok = c.next() {
			if err := w.do(t.Context()); err != nil {
				t.Error(err)
			}
			got = append(got, at)
		}
	}
	if !reflect.DeepEqual(got, []int{0, 62, 124}) {
		t.Errorf("told at %v s", got)
	}
	list, err := client.CoreV1().Events("n").List(t.Context(), metav1.ListOptions{})
	if err != nil || len(list.Items) != 3 || list.Items[0].InvolvedObject.UID != "" {
		t.Errorf("%+v, %v", list, err)
	}
}

// The node's object is not there yet when the inventory is written first. It gets it all the same, and again when it is made anew.
func TestInventoryIsWrittenAgain(t *testing.T) {
	client := fake.NewClientset()
	var later atomic.Int64
	w := newWorld(t, "t4", 61, func(c *Config) {
		c.client = client
		c.Now = func() time.Time { return time.Now().Add(time.Duration(later.Load())) }
	})
	has := func() bool {
		n, err := client.CoreV1().Nodes().Get(context.Background(), "node", metav1.GetOptions{})
		return err == nil && n.Annotations[podspec.Inventory] != ""
	}
	w.until("the first attempt", func() bool { return len(client.Actions()) > 0 })
	create := func() {
		t.Helper()
		if _, err := client.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	create()
	eventually(t, 20*time.Second, "the inventory", has)
	if err := client.CoreV1().Nodes().Delete(t.Context(), "node", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	create()
	later.Store(int64(republish))
	eventually(t, 20*time.Second, "the inventory of another object", has)
}

// A pod whose webhook does not answer holds up no other write, and however many events wait, the node's inventory is written.
func TestOneWriteHoldsUpNoOther(t *testing.T) {
	client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}})
	client.PrependReactor("patch", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewInternalError(errors.New("failed calling webhook"))
	})
	c := newCluster(client, "node", time.Now, func(string, error) {})
	yes := "yes"
	c.patchPod(books.Pod{Namespace: "n", Name: "p", UID: "u"}, "assigned", map[string]*string{"a": &yes})
	for i := range queueMax + 1 {
		c.event(corev1.ObjectReference{Kind: "Node", Name: "node"}, corev1.EventTypeNormal, "R", fmt.Sprint(i))
	}
	c.patchNode("inventory", nil, map[string]*string{podspec.Inventory: &yes}, nil)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); c.run(ctx) }()
	defer func() { cancel(); <-done }()
	eventually(t, 20*time.Second, "the inventory", func() bool {
		n, err := client.CoreV1().Nodes().Get(ctx, "node", metav1.GetOptions{})
		return err == nil && n.Annotations[podspec.Inventory] == "yes"
	})
}

func TestEventNames(t *testing.T) {
	now := time.Unix(0, 0x1234567890abcdef)
	for _, name := range []string{"p", strings.Repeat("a", 253), strings.Repeat("a", 229) + "-" + strings.Repeat("b", 20), strings.Repeat("a.", 126) + "b"} {
		got := eventName(name, now)
		if problems := validation.IsDNS1123Subdomain(got); len(problems) > 0 {
			t.Errorf("%s: %s: %v", name, got, problems)
		}
	}
}
