package node

import "testing"

// What cannot work is refused at the start, by name.
func TestConfigRefuses(t *testing.T) {
	for _, c := range []struct {
		config Config
		want   string
	}{
		{Config{NodeName: "node", DisplaySocket: "gpu.sock"}, "gpu.sock: not an absolute path"},
		{Config{NodeName: "node", PodResourcesSocket: "kubelet.sock"}, "kubelet.sock: not an absolute path"},
		{Config{NodeName: "node", PodsSocket: "pods.sock"}, "pods.sock: not an absolute path"},
		{Config{NodeName: "../x"}, `node name "../x": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')`},
	} {
		if err := c.config.complete(); err == nil || err.Error() != c.want {
			t.Errorf("%v\nwant\n%s", err, c.want)
		}
	}
}
