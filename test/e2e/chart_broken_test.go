package e2e

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A broken installation says what is wrong where its user looks: in events, and in what kubectl describe shows of pods. docs/operations.md
// has the same texts.
func chartBroken(t *testing.T, c *chart) {
	on := c.b.Nodes[0].Name
	for _, n := range c.b.Nodes[1:] {
		label(t, c.b, n.Name, "null")
	}
	simulated := []string{"--set", "simulated=" + chartGPUs}
	for _, test := range []struct {
		name   string
		values []string
		look   func(context.Context) (string, error) // what the user sees
		want   []string
	}{
		{"no driver", nil, func(ctx context.Context) (string, error) { return c.eventsOf(ctx, "default", "Node", on) },
			[]string{"GPUNoDriver: no NVIDIA driver on this host"}},
		{"wrong kubelet path", append(simulated, "--set", "node.kubeletDir=/var/lib/elsewhere"),
			func(ctx context.Context) (string, error) {
				return c.eventsOf(ctx, chartNamespace, "Pod", "tranche-node-")
			},
			[]string{"FailedMount: ", "hostPath type check failed", "/var/lib/elsewhere/device-plugins is not a directory"}},
		{"image of another version", append(simulated, "--set", "node.extraArgs={--of-the-next-version}"), c.endOfNode,
			[]string{"unknown flag: --of-the-next-version", "chart and image must be of the same version", "this is tranche "}},
		{"image that is not there", append(simulated, "--set-string", "image.tag=9"),
			func(ctx context.Context) (string, error) {
				return c.eventsOf(ctx, chartNamespace, "Pod", "tranche-node-")
			},
			[]string{"ErrImageNeverPull: ", "tranche.local/chart:9"}},
		{"extender unreachable", append(simulated, "--set", "scheduler.extraArgs={--address=127.0.0.1:1}"),
			func(ctx context.Context) (string, error) { return c.eventsOf(ctx, "default", "Pod", "waits") },
			[]string{"FailedScheduling: ", "127.0.0.1:3456", "connection refused"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c.install(t, test.values...)
			if strings.HasPrefix(test.name, "extender") {
				c.b.CreatePod(t, podOf("waits", container("c", "exec sleep 100000", 30, 8))+"  schedulerName: tranche-scheduler\n")
			}
			told := phase(t, "until it is told")
			ctx, cancel := context.WithTimeoutCause(t.Context(), soon, fmt.Errorf("not told within %v", soon))
			defer cancel()
			for {
				text, err := test.look(ctx)
				missing := ""
				for _, want := range test.want {
					if !strings.Contains(text, want) {
						missing = want
					}
				}
				if err == nil && missing == "" {
					break
				}
				select {
				case <-ctx.Done():
					t.Fatalf("%v: no %q in\n%s\n%v\n%s", context.Cause(ctx), missing, text, err, c.explain(t))
				case <-time.After(250 * time.Millisecond):
				}
			}
			told()
		})
	}
}

// eventsOf are the events of objects whose name begins so, a line each.
func (c *chart) eventsOf(ctx context.Context, namespace, kind, name string) (string, error) {
	list, err := c.b.Client.CoreV1().Events(namespace).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.kind=" + kind})
	if err != nil {
		return "", err
	}
	var out strings.Builder
	for _, e := range list.Items {
		if strings.HasPrefix(e.InvolvedObject.Name, name) {
			fmt.Fprintf(&out, "%s: %s\n", e.Reason, e.Message)
		}
	}
	return out.String(), nil
}

// endOfNode is the message of a node's container that ended, as kubectl describe shows it.
func (c *chart) endOfNode(ctx context.Context) (string, error) {
	list, err := c.b.Client.CoreV1().Pods(chartNamespace).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=node"})
	if err != nil {
		return "", err
	}
	for _, p := range list.Items {
		for _, s := range p.Status.ContainerStatuses {
			for _, state := range []corev1.ContainerState{s.State, s.LastTerminationState} {
				if state.Terminated != nil {
					return state.Terminated.Message, nil
				}
			}
		}
	}
	return "", errors.New("no container of a node ended")
}
