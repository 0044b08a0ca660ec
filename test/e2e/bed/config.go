package bed

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

const (
	serviceCIDR = "10.96.0.0/24"
	serviceIP   = "10.96.0.1" // of the Service kubernetes
	controlIP   = "10.88.0.1"
	// PauseImage holds pods' namespaces.
	PauseImage = "tranche.local/pause:1"
)

// Config of a bed.
type Config struct {
	// Nodes is how many nodes there are, 1 to 9; 0 is 1.
	Nodes int
	// KubeletConfig has more lines of YAML for every kubelet's KubeletConfiguration.
	KubeletConfig string
	// SchedulerConfig has more lines of YAML for the KubeSchedulerConfiguration. The scheduler is in the
	// control machine: so is an extender at 127.0.0.1.
	SchedulerConfig string
	// FeatureGates of every Kubernetes program.
	FeatureGates map[string]bool
	// RuntimeConfig is the API server's, as in "resource.k8s.io/v1beta2=true".
	RuntimeConfig []string
	// Images are OCI tars to import on every node.
	Images []string
	// NoProxy leaves kube-proxy out: of Services only `kubernetes` works.
	NoProxy bool
	// Kubernetes is the version, such as "1.37", one of modules/kubernetes-*; "" is $K8S, else the newest.
	Kubernetes string
	// Say gets a line per step, with its time. nil says nothing.
	Say func(format string, args ...any)

	minor int // of Kubernetes
}

// newest is the Kubernetes that the bed has if nobody says otherwise.
const newest = "1.37"

func (c *Config) check() error {
	if c.Nodes == 0 {
		c.Nodes = 1
	}
	if c.Nodes < 1 || c.Nodes > 9 {
		return fmt.Errorf("%d nodes: 1 to 9 can be had", c.Nodes)
	}
	c.Kubernetes = cmp.Or(c.Kubernetes, os.Getenv("K8S"), newest)
	if n, err := fmt.Sscanf(c.Kubernetes, "1.%d", &c.minor); n != 1 {
		return fmt.Errorf("version %q of Kubernetes is not 1.N: %w", c.Kubernetes, err)
	}
	if c.Say == nil {
		c.Say = func(string, ...any) {}
	}
	return nil
}

// gates gives the flag for the feature gates, if any.
func (c *Config) gates() []string {
	var gates []string
	for name, on := range c.FeatureGates {
		gates = append(gates, fmt.Sprintf("%s=%t", name, on))
	}
	if gates == nil {
		return nil
	}
	slices.Sort(gates)
	return []string{"--feature-gates=" + strings.Join(gates, ",")}
}

func (b *Bed) kubeconfigText(user string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: bed, cluster: {server: "https://%[1]s:443", certificate-authority: %[2]s/ca.crt}}]
users: [{name: u, user: {client-certificate: %[2]s/%[3]s.crt, client-key: %[2]s/%[3]s.key}}]
contexts: [{name: c, context: {cluster: bed, user: u}}]
current-context: c
`, controlIP, b.pki(), user)
}

// containerdText: what is not said is containerd's default. Without CAP_SYS_RESOURCE nothing can lower
// oom_score_adj, and runc fails: hence restrict_oom_score_adj.
func (b *Bed) containerdText(m *Machine) string {
	return fmt.Sprintf(`version = 3
root = '/var/lib/containerd'
state = '/run/containerd'
disabled_plugins = ['io.containerd.snapshotter.v1.devmapper', 'io.containerd.snapshotter.v1.zfs', 'io.containerd.snapshotter.v1.btrfs', 'io.containerd.snapshotter.v1.blockfile', 'io.containerd.snapshotter.v1.erofs', 'io.containerd.tracing.processor.v1.otlp', 'io.containerd.internal.v1.opt']
[grpc]
  address = '/run/containerd/containerd.sock'
[plugins.'io.containerd.cri.v1.images']
  snapshotter = '%[1]s'
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = '%[2]s'
[plugins.'io.containerd.cri.v1.runtime']
  enable_cdi = true
  disable_apparmor = true
  restrict_oom_score_adj = true
  cdi_spec_dirs = ['/etc/cdi', '/var/run/cdi']
[plugins.'io.containerd.cri.v1.runtime'.containerd]
  default_runtime_name = 'runc'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = 'io.containerd.runc.v2'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
  BinaryName = '%[3]s/runc'
  SystemdCgroup = false
[plugins.'io.containerd.cri.v1.runtime'.cni]
  bin_dirs = ['%[4]s']
  conf_dir = '%[5]s/cni'
`, b.snapshotter(), PauseImage, b.bin, b.cni, m.Dir)
}

func (m *Machine) cniText() string {
	return fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "bed", "plugins": [{"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false,
 "hairpinMode": true, "ipam": {"type": "host-local", "dataDir": "/var/lib/cni/ipam", "ranges": [[{"subnet": "%s"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
`, m.podCIDR())
}

// kubeletText: kubelet 1.35 and newer refuse cgroup version 1 unless told otherwise.
func (b *Bed) kubeletText(more string) string {
	return fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: cgroupfs
failCgroupV1: false
failSwapOn: false
oomScoreAdj: 0
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: %s/ca.crt}}
authorization: {mode: Webhook}
address: 0.0.0.0
resolvConf: %s
makeIPTablesUtilChains: false
serializeImagePulls: false
staticPodPath: /var/lib/kubelet/manifests
podLogsDir: /var/log/pods
volumePluginDir: /var/lib/kubelet/volumeplugins
evictionHard: {memory.available: 100Mi, nodefs.available: 1%%, imagefs.available: 1%%, nodefs.inodesFree: 1%%}
imageGCHighThresholdPercent: 100
syncFrequency: 10s
nodeStatusUpdateFrequency: 5s
`, b.pki(), b.conf("resolv.conf")) + more
}

// proxyText: conntrack's limits are the host's. A pod's answer to another on its node would pass the node by where bridges
// do not ask the firewall (br_netfilter): masqueraded it cannot.
func (b *Bed) proxyText(m *Machine) string {
	gate := ""
	if !b.AtLeast(31) {
		gate = "featureGates: {NFTablesProxyMode: true}\n"
	}
	return fmt.Sprintf(`apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
clientConnection: {kubeconfig: %s}
bindAddress: %s
clusterCIDR: 10.89.0.0/16
healthzBindAddress: 127.0.0.1:10256
metricsBindAddress: 127.0.0.1:10249
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
nftables: {masqueradeAll: true, minSyncPeriod: 100ms}
%s`, b.Kubeconfig("proxy"), m.IP, gate)
}

func (b *Bed) schedulerText(more string) string {
	return fmt.Sprintf(`apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection: {leaderElect: false}
clientConnection: {kubeconfig: %s}
`, b.Kubeconfig("scheduler")) + more
}

// writeConfig writes certificates and every program's configuration.
func (b *Bed) writeConfig() error {
	for _, d := range []string{b.pki(), b.conf(""), filepath.Join(b.Dir, "log"), filepath.Join(b.Dir, "etcd")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	ca, err := newAuthority(b.pki())
	if err != nil {
		return err
	}
	if err := ca.keyPair("sa"); err != nil {
		return err
	}
	if err := ca.server("apiserver", "localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "127.0.0.1", controlIP, serviceIP); err != nil {
		return err
	}
	users := [][3]string{{"admin", "admin", "system:masters"}, {"controllers", "system:kube-controller-manager", ""}, {"scheduler", "system:kube-scheduler", ""}, {"proxy", "system:kube-proxy", ""}}
	for _, m := range b.Nodes {
		users = append(users, [3]string{m.Name, "system:node:" + m.Name, "system:nodes"})
	}
	files := map[string]string{b.conf("resolv.conf"): "nameserver 127.0.0.1\n", b.conf("scheduler.yaml"): b.schedulerText(b.config.SchedulerConfig)}
	for _, u := range users {
		if err := ca.client(u[0], u[1], u[2]); err != nil {
			return err
		}
		files[b.Kubeconfig(u[0])] = b.kubeconfigText(u[0])
	}
	for _, m := range b.machines() {
		files[filepath.Join(m.Dir, "proxy.yaml")] = b.proxyText(m)
	}
	for _, m := range b.Nodes {
		files[filepath.Join(m.Dir, "containerd.toml")] = b.containerdText(m)
		files[filepath.Join(m.Dir, "cni", "10-bed.conflist")] = m.cniText()
		files[filepath.Join(m.Dir, "kubelet.yaml")] = b.kubeletText(b.config.KubeletConfig)
	}
	for path, text := range files {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

func (b *Bed) pki() string             { return filepath.Join(b.Dir, "pki") }
func (b *Bed) conf(name string) string { return filepath.Join(b.Dir, "conf", name) }

// Kubeconfig is the path of a user's: admin, controllers, scheduler, node1, ... It holds on this
// machine and in the bed's, but the address in it is the control machine's: see Machine.Dial.
func (b *Bed) Kubeconfig(user string) string { return b.conf(user + ".kubeconfig") }

func (b *Bed) logFile(name string) string { return filepath.Join(b.Dir, "log", name+".log") }

func (b *Bed) etcdArgv() []string {
	return []string{"etcd", "--data-dir=" + filepath.Join(b.Dir, "etcd"), "--unsafe-no-fsync",
		"--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
		"--listen-peer-urls=http://127.0.0.1:2380", "--initial-advertise-peer-urls=http://127.0.0.1:2380",
		"--initial-cluster=default=http://127.0.0.1:2380"}
}

// apiserverArgv: port 443 is the Service kubernetes' own, so programs in pods find it.
func (b *Bed) apiserverArgv() []string {
	pki := b.pki()
	argv := []string{"kube-apiserver", "--etcd-servers=http://127.0.0.1:2379", "--bind-address=0.0.0.0", "--secure-port=443",
		"--advertise-address=" + controlIP, "--service-cluster-ip-range=" + serviceCIDR, "--tls-cert-file=" + pki + "/apiserver.crt",
		"--tls-private-key-file=" + pki + "/apiserver.key", "--client-ca-file=" + pki + "/ca.crt",
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file=" + pki + "/sa.pub",
		"--service-account-signing-key-file=" + pki + "/sa.key", "--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
		"--kubelet-client-certificate=" + pki + "/admin.crt", "--kubelet-client-key=" + pki + "/admin.key",
		"--kubelet-preferred-address-types=InternalIP", "--cert-dir=" + pki, "--profiling=false"}
	if len(b.config.RuntimeConfig) > 0 {
		argv = append(argv, "--runtime-config="+strings.Join(b.config.RuntimeConfig, ","))
	}
	return append(argv, b.config.gates()...)
}

// controllersArgv: with the default of 20 requests a second the first ServiceAccount takes 5 s.
func (b *Bed) controllersArgv() []string {
	return append([]string{"kube-controller-manager", "--kubeconfig=" + b.Kubeconfig("controllers"), "--leader-elect=false",
		"--use-service-account-credentials=true", "--service-account-private-key-file=" + b.pki() + "/sa.key",
		"--root-ca-file=" + b.pki() + "/ca.crt", "--cluster-signing-cert-file=" + b.pki() + "/ca.crt",
		"--cluster-signing-key-file=" + b.pki() + "/ca.key", "--kube-api-qps=300", "--kube-api-burst=600",
		"--bind-address=127.0.0.1", "--profiling=false"}, b.config.gates()...)
}

func (b *Bed) schedulerArgv() []string {
	return append([]string{"kube-scheduler", "--config=" + b.conf("scheduler.yaml"), "--bind-address=127.0.0.1",
		"--authentication-kubeconfig=" + b.Kubeconfig("scheduler"), "--authorization-kubeconfig=" + b.Kubeconfig("scheduler"),
		"-v=2"}, b.config.gates()...)
}

// proxyArgv: the control machine is no node. Its kube-proxy takes a node's name, as it waits for a Node object.
func (b *Bed) proxyArgv(m *Machine) []string {
	node := m
	if m == b.Control {
		node = b.Nodes[0]
	}
	return append([]string{"kube-proxy", "--config=" + filepath.Join(m.Dir, "proxy.yaml"), "--hostname-override=" + node.Name, "-v=2"}, b.config.gates()...)
}

func (b *Bed) kubeletArgv(m *Machine) []string {
	return append([]string{"kubelet", "--config=" + filepath.Join(m.Dir, "kubelet.yaml"), "--kubeconfig=" + b.Kubeconfig(m.Name),
		"--hostname-override=" + m.Name, "--node-ip=" + m.IP, "--root-dir=/var/lib/kubelet",
		"--cert-dir=" + filepath.Join(m.Dir, "pki"), "-v=2"}, b.config.gates()...)
}
