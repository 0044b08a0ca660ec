package kubelet

import (
	"context"

	"google.golang.org/grpc"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// Held is what kubelet gave one container of one resource.
type Held struct {
	Namespace, Pod, Container string
	Resource                  string
	IDs                       []string
}

// PodResources asks who holds which devices. Safe for concurrent use.
type PodResources struct {
	conn   *grpc.ClientConn
	client podresources.PodResourcesListerClient
}

// NewPodResources uses kubelet's socket, usually /var/lib/kubelet/pod-resources/kubelet.sock.
func NewPodResources(socket string) (*PodResources, error) {
	conn, err := dial(socket)
	if err != nil {
		return nil, err
	}
	return &PodResources{conn: conn, client: podresources.NewPodResourcesListerClient(conn)}, nil
}

// Close ends the connection.
func (p *PodResources) Close() error { return p.conn.Close() }

// List returns all that pods hold, of all resources. Terminal pods are left out by kubelet from 1.34 on;
// init containers always, except those that keep running.
func (p *PodResources) List(ctx context.Context) ([]Held, error) {
	var answer *podresources.ListPodResourcesResponse
	err := retry(ctx, "PodResources List", func(ctx context.Context) (err error) {
		answer, err = p.client.List(ctx, &podresources.ListPodResourcesRequest{})
		return err
	})
	if err != nil {
		return nil, err
	}
	var out []Held
	for _, pod := range answer.GetPodResources() {
		for _, c := range pod.GetContainers() {
			out = appendHeld(out, pod, c)
		}
	}
	return out, nil
}

// appendHeld puts the parts of a resource together, which kubelet lists by NUMA node.
func appendHeld(out []Held, pod *podresources.PodResources, c *podresources.ContainerResources) []Held {
	first := len(out)
next:
	for _, d := range c.GetDevices() {
		for i := first; i < len(out); i++ {
			if out[i].Resource == d.GetResourceName() {
				out[i].IDs = append(out[i].IDs, d.GetDeviceIds()...)
				continue next
			}
		}
		out = append(out, Held{Namespace: pod.GetNamespace(), Pod: pod.GetName(), Container: c.GetName(),
			Resource: d.GetResourceName(), IDs: d.GetDeviceIds()})
	}
	return out
}
