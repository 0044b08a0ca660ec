package bed

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"tranche.dev/tranche/test/e2e/image"
)

// Bed is a running cluster.
type Bed struct {
	// Dir has all of its state: log/ has every daemon's output.
	Dir string
	// REST is the administrator's, for clients made by the test; Client is one.
	REST   *rest.Config
	Client kubernetes.Interface
	// Version is Kubernetes', such as v1.37.2.
	Version string
	// Control has etcd, the API server, controller manager and scheduler.
	Control *Machine
	// Nodes are node1, node2, ...
	Nodes []*Machine

	config   Config
	id       string
	bin, cni string
	overlay  bool // the kernel takes an overlay in Dir
	lock     *os.File
	start    time.Time
}

// ErrUnable is in the error of Up where this machine cannot have a bed: not root, no namespaces.
var ErrUnable = errors.New("a bed cannot be made here")

// Up builds what is missing, starts a bed and returns when every node is Ready and pods can be made.
// The program must have called InitMachine. After an error nothing is left.
func Up(ctx context.Context, config Config) (_ *Bed, err error) {
	if err := config.check(); err != nil {
		return nil, err
	}
	if err := able(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnable, err)
	}
	b := &Bed{config: config, start: time.Now()}
	built, err := build(ctx, config.Kubernetes)
	if err != nil {
		return nil, err
	}
	b.say("binaries")
	b.bin, b.cni = filepath.Join(built, "bin"), filepath.Join(built, "cni")
	if err := b.makeDir(filepath.Join(filepath.Dir(built), "run")); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("%w%s", err, b.tails()), b.Down())
		}
	}()
	b.Control = &Machine{Name: "control", IP: controlIP, Dir: filepath.Join(b.Dir, "control"), bed: b}
	for i := range config.Nodes {
		name := fmt.Sprintf("node%d", i+1)
		b.Nodes = append(b.Nodes, &Machine{Name: name, IP: fmt.Sprintf("10.88.0.%d", 11+i), Dir: filepath.Join(b.Dir, name), bed: b})
	}
	for _, m := range b.machines() {
		if err := m.makeDirs(); err != nil {
			return nil, err
		}
	}
	if err := b.writeConfig(); err != nil {
		return nil, err
	}
	if err := b.makeClient(); err != nil {
		return nil, err
	}
	pause := filepath.Join(b.Dir, "pause.tar")
	err = image.Write(pause, image.Image{Name: PauseImage, Entrypoint: []string{"/pause"}, Layers: []image.Layer{{{To: "/pause", From: filepath.Join(b.bin, "pause")}}}})
	if err != nil {
		return nil, err
	}
	if err := b.startControl(ctx); err != nil {
		return nil, err
	}
	images := append([]string{pause}, config.Images...)
	if err := each(b.Nodes, func(m *Machine) error { return m.startNode(ctx, images) }); err != nil {
		return nil, err
	}
	if err := b.WaitReady(ctx); err != nil {
		return nil, err
	}
	err = b.wait(ctx, "the default ServiceAccount", func(ctx context.Context) error {
		_, err := b.Client.CoreV1().ServiceAccounts("default").Get(ctx, "default", metav1.GetOptions{})
		return err
	})
	if err != nil {
		return nil, err
	}
	b.say("up")
	return b, nil
}

// AtLeast is true of Kubernetes 1.minor and newer.
func (b *Bed) AtLeast(minor int) bool { return b.config.minor >= minor }

// able tells why a bed cannot be made here. That the namespaces can be had shows in boot.
func able() error {
	if os.Geteuid() != 0 {
		return errors.New("it needs root")
	}
	for _, tool := range []string{"ip", "mount", "cp", "busybox"} {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("%w: tools/setup.sh e2e installs what is missing", err)
		}
	}
	probe := exec.Command("true")
	probe.SysProcAttr = &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET |
		unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWCGROUP}
	if err := probe.Run(); err != nil {
		return fmt.Errorf("namespaces are not permitted: %w", err)
	}
	return nil
}

// build runs build.sh beside this file and returns the directory that it prints.
func build(ctx context.Context, kubernetes string) (string, error) {
	_, source, _, _ := runtime.Caller(0)
	script := filepath.Join(filepath.Dir(source), "build.sh")
	if !filepath.IsAbs(script) {
		return "", fmt.Errorf("%s: build the test without -trimpath, the bed finds its files by it", script)
	}
	cmd := exec.CommandContext(ctx, script)
	cmd.Env = append(os.Environ(), "K8S="+kubernetes)
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", script, err, strings.TrimSpace(said.String()))
	}
	return strings.TrimSpace(string(out)), nil
}

// makeDir makes the bed's directory, locked while this process lives, and removes what beds of killed
// tests left.
func (b *Bed) makeDir(all string) error {
	if err := os.MkdirAll(all, 0o755); err != nil {
		return err
	}
	for _, hidden := range []string{"/etc/", "/var/lib/", "/var/log/", "/run/", "/var/run/", "/dev/", "/sys/", "/proc/"} {
		if strings.HasPrefix(all+"/", hidden) {
			return fmt.Errorf("%s is under %s, which machines have their own of: set XDG_CACHE_HOME", all, hidden)
		}
	}
	old, err := filepath.Glob(filepath.Join(all, "bed-*"))
	if err != nil {
		return err
	}
	for _, dir := range old {
		if lock, err := lockDir(dir); err == nil {
			gone := &Bed{Dir: dir, lock: lock}
			if err := gone.remove(); err != nil {
				b.config.Say("bed: a former one: %v", err)
			}
		}
	}
	// Locked before another sweeper can see it.
	dir, err := os.MkdirTemp(all, "new-")
	if err != nil {
		return err
	}
	if b.lock, err = lockDir(dir); err != nil {
		return err
	}
	b.id = "bed-" + strings.TrimPrefix(filepath.Base(dir), "new-")
	b.Dir = filepath.Join(all, b.id)
	if err := os.Rename(dir, b.Dir); err != nil {
		return err
	}
	b.overlay = overlayWorks(b.Dir)
	return nil
}

func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// rememberCgroups notes cgroups in a file for whoever sweeps after this process was killed.
func (b *Bed) rememberCgroups(dirs []string) error {
	f, err := os.OpenFile(filepath.Join(b.Dir, "cgroups"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteString(strings.Join(dirs, "\n") + "\n")
	return errors.Join(err, f.Close())
}

// remove removes what is left when all machines have ended.
func (b *Bed) remove() error {
	text, err := os.ReadFile(filepath.Join(b.Dir, "cgroups"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	err = removeCgroups(strings.Fields(string(text)), 10*time.Second)
	return errors.Join(err, os.RemoveAll(b.Dir), b.lock.Close())
}

// makeDirs makes what the machine keeps over a reboot.
func (m *Machine) makeDirs() error {
	for _, d := range []string{"etc", "etc.work", "var/lib/kubelet/manifests", "var/log", "pki", "cni", "home"} {
		if err := os.MkdirAll(filepath.Join(m.Dir, d), 0o755); err != nil {
			return err
		}
	}
	if m.bed.overlay {
		return nil
	}
	if out, err := exec.Command("cp", "-a", "/etc", m.Dir).CombinedOutput(); err != nil {
		return fmt.Errorf("copy /etc: %w: %s", err, out)
	}
	return nil
}

// overlayWorks tries an overlay in a directory. The kernel refuses some file systems, as a container's
// own overlay.
func overlayWorks(dir string) bool {
	probe := filepath.Join(dir, "overlay")
	defer os.RemoveAll(probe)
	options := "lowerdir=/etc"
	for _, d := range []string{"upperdir", "workdir", "merged"} {
		if os.MkdirAll(filepath.Join(probe, d), 0o755) != nil {
			return false
		}
		if d != "merged" {
			options += "," + d + "=" + filepath.Join(probe, d)
		}
	}
	// In a mount namespace of its own, so that nothing is left if we are killed here.
	cmd := exec.Command("mount", "-t", "overlay", "-o", options, "overlay", filepath.Join(probe, "merged"))
	cmd.SysProcAttr = &unix.SysProcAttr{Unshareflags: unix.CLONE_NEWNS}
	return cmd.Run() == nil
}

// snapshotter is containerd's: native copies where an overlay cannot be had.
func (b *Bed) snapshotter() string {
	if b.overlay {
		return "overlayfs"
	}
	return "native"
}

func (b *Bed) makeClient() error {
	config, err := clientcmd.BuildConfigFromFlags("", b.Kubeconfig("admin"))
	if err != nil {
		return err
	}
	config.Dial = b.Control.Dial
	config.QPS, config.Burst = 200, 400
	b.REST = config
	b.Client, err = kubernetes.NewForConfig(config)
	return err
}

func (b *Bed) startControl(ctx context.Context) error {
	m := b.Control
	if err := m.boot(ctx); err != nil {
		return err
	}
	b.say("control machine")
	if _, err := m.Start("etcd", b.etcdArgv()...); err != nil {
		return err
	}
	if _, err := m.Start("kube-apiserver", b.apiserverArgv()...); err != nil {
		return err
	}
	if err := b.WaitAPIServer(ctx); err != nil {
		return err
	}
	version, err := b.Client.Discovery().ServerVersion()
	if err != nil {
		return err
	}
	b.Version = version.GitVersion
	b.say("API server " + b.Version)
	if _, err := m.Start("kube-controller-manager", b.controllersArgv()...); err != nil {
		return err
	}
	if _, err := m.Start("kube-scheduler", b.schedulerArgv()...); err != nil {
		return err
	}
	return m.startProxy(ctx)
}

// startProxy starts kube-proxy, if the kernel has what it needs: addresses of Services work then.
func (m *Machine) startProxy(ctx context.Context) error {
	if m.bed.config.NoProxy {
		return nil
	}
	if out, err := m.Exec(ctx, "nft", "add table ip bed-probe; delete table ip bed-probe"); err != nil {
		return fmt.Errorf("%w: kube-proxy needs nft (tools/setup.sh e2e installs it) and nf_tables in the kernel; Config.NoProxy does without: %w: %s", ErrUnable, err, out)
	}
	_, err := m.Start("kube-proxy", m.bed.proxyArgv(m)...)
	return err
}

// WaitAPIServer returns when the API server is ready.
func (b *Bed) WaitAPIServer(ctx context.Context) error {
	return b.wait(ctx, "the API server", func(ctx context.Context) error {
		_, err := b.Client.CoreV1().RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
		return err
	})
}

func (m *Machine) startNode(ctx context.Context, images []string) error {
	if err := m.boot(ctx); err != nil {
		return err
	}
	if _, err := m.Start("containerd", "containerd", "--config="+filepath.Join(m.Dir, "containerd.toml")); err != nil {
		return err
	}
	if err := m.waitContainerd(ctx); err != nil {
		return err
	}
	for _, tar := range images {
		if err := m.ImportImage(ctx, tar); err != nil {
			return err
		}
	}
	m.bed.say(m.Name + ": images")
	if _, err := m.Start("kubelet", m.bed.kubeletArgv(m)...); err != nil {
		return err
	}
	return m.startProxy(ctx)
}

func (m *Machine) waitContainerd(ctx context.Context) error {
	return m.bed.wait(ctx, m.Name+"'s containerd", func(ctx context.Context) error {
		_, err := m.Exec(ctx, "ctr", "version")
		return err
	})
}

// ImportImage imports an OCI tar into the node's containerd.
func (m *Machine) ImportImage(ctx context.Context, tar string) error {
	_, err := m.Exec(ctx, "ctr", "-n", "k8s.io", "images", "import", "--local", "--snapshotter", m.bed.snapshotter(), tar)
	return err
}

// RestartKubelet restarts a node's kubelet with more lines of configuration than the bed's ("" for
// none). The node stays Ready meanwhile as far as the API server knows.
func (m *Machine) RestartKubelet(more string) error {
	d := m.Daemon("kubelet")
	d.Stop()
	text := m.bed.kubeletText(m.bed.config.KubeletConfig + more)
	if err := os.WriteFile(filepath.Join(m.Dir, "kubelet.yaml"), []byte(text), 0o644); err != nil {
		return err
	}
	return d.Start()
}

// RestartScheduler restarts kube-scheduler with more lines of configuration in place of the bed's.
func (b *Bed) RestartScheduler(more string) error {
	d := b.Control.Daemon("kube-scheduler")
	d.Stop()
	if err := os.WriteFile(b.conf("scheduler.yaml"), []byte(b.schedulerText(more)), 0o644); err != nil {
		return err
	}
	return d.Start()
}

// Reboot ends the machine as a loss of power would, keeping its disk, and starts it and its daemons
// again. It returns when they are started, not when the node is Ready. Pods' own cgroups, network and
// /run are gone, as on a real machine. The control machine cannot be rebooted.
func (m *Machine) Reboot(ctx context.Context) error {
	if m == m.bed.Control {
		return errors.New("the control machine has the bed's network: stop and start its daemons instead")
	}
	var again []*Daemon
	for _, d := range m.allDaemons() {
		if d.suspend() {
			again = append(again, d)
		}
	}
	if err := m.end(); err != nil {
		return err
	}
	if err := m.boot(ctx); err != nil {
		return err
	}
	for _, d := range again {
		if err := d.Start(); err != nil {
			return err
		}
		if d.Name == "containerd" {
			if err := m.waitContainerd(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

// WaitReady returns when every node is Ready.
func (b *Bed) WaitReady(ctx context.Context) error {
	for _, m := range b.Nodes {
		err := b.wait(ctx, m.Name+" to be Ready", func(ctx context.Context) error {
			node, err := b.Client.CoreV1().Nodes().Get(ctx, m.Name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			for _, c := range node.Status.Conditions {
				if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
					return nil
				} else if c.Type == corev1.NodeReady {
					err = errors.New(c.Message)
				}
			}
			return err
		})
		if err != nil {
			return err
		}
		b.say(m.Name + " Ready")
	}
	return nil
}

// wait polls until f is happy, until ctx ends, and two minutes at most where ctx has no deadline.
func (b *Bed) wait(ctx context.Context, what string, f func(context.Context) error) error {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, 2*time.Minute)
		defer cancel()
	}
	for {
		once, done := context.WithTimeout(ctx, 10*time.Second)
		err := f(once)
		done()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waited for %s: %w: %w", what, ctx.Err(), err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// Program is the file of a program that the bed was built with: kubectl, kube-scheduler, helm, ...
func (b *Bed) Program(name string) string {
	path := filepath.Join(b.bin, name)
	if real, err := filepath.EvalSymlinks(path); err == nil {
		return real
	}
	return path
}

// Kubectl runs kubectl in the control machine as administrator.
func (b *Bed) Kubectl(ctx context.Context, args ...string) (string, error) {
	return b.Control.Exec(ctx, append([]string{"kubectl"}, args...)...)
}

// Down ends the bed and removes everything.
func (b *Bed) Down() error {
	for _, m := range b.machines() {
		for _, d := range m.allDaemons() {
			d.suspend()
		}
	}
	err := each(b.machines(), (*Machine).end)
	if os.Getenv("BED_KEEP") != "" {
		b.config.Say("bed: kept %s", b.Dir)
		return err
	}
	return errors.Join(err, b.remove())
}

func (b *Bed) machines() []*Machine {
	if b.Control == nil {
		return nil
	}
	return append([]*Machine{b.Control}, b.Nodes...)
}

func (b *Bed) say(what string) {
	b.config.Say("bed: %5.1f s %s", time.Since(b.start).Seconds(), what)
}

// tails gives the end of every log, for an error before any test could look.
func (b *Bed) tails() string {
	logs, _ := filepath.Glob(b.logFile("*"))
	var out strings.Builder
	for _, path := range logs {
		fmt.Fprintf(&out, "\n--- %s\n%s", filepath.Base(path), Tail(path, 15))
	}
	return out.String()
}

// Tail gives the last lines of a file, or why it cannot.
func Tail(path string, lines int) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// each runs f for all machines at once.
func each(machines []*Machine, f func(*Machine) error) error {
	errs := make([]error, len(machines))
	var all sync.WaitGroup
	for i, m := range machines {
		all.Go(func() { errs[i] = f(m) })
	}
	all.Wait()
	return errors.Join(errs...)
}
