package bed

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Machine is one of the bed's machines. Its methods may be called by several goroutines, but Reboot
// by one at a time.
type Machine struct {
	Name string
	IP   string
	// Dir has what outlives a reboot, and the machine's configuration.
	Dir string

	bed *Bed

	mu      sync.Mutex
	init    *exec.Cmd
	release io.Closer // closing it ends the machine
	cgroups []string
	daemons []*Daemon
}

// boot makes the machine's namespaces and returns when commands can be started.
func (m *Machine) boot(ctx context.Context) error {
	spec, err := json.Marshal(machineSpec{Name: m.Name, Dir: m.Dir, Overlay: m.bed.overlay, Writable: []string{os.TempDir(), m.bed.Dir}, Path: m.bed.bin + ":" + os.Getenv("PATH"),
		Env: []string{"KUBECONFIG=" + m.bed.Kubeconfig("admin")}})
	if err != nil {
		return err
	}
	_ = os.Remove(m.socket())
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: m.socket(), Net: "unix"})
	if err != nil {
		return err
	}
	defer listener.Close()
	listener.SetUnlinkOnClose(false)
	socket, err := listener.File()
	if err != nil {
		return err
	}
	defer socket.Close()
	statusRead, status, err := os.Pipe()
	if err != nil {
		return err
	}
	defer statusRead.Close()
	defer status.Close()
	log, err := os.OpenFile(m.bed.logFile(m.Name+"-init"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cgroups, err := makeCgroups(m.bed.id + "-" + m.Name)
	m.cgroups = cgroups
	if err != nil {
		return fmt.Errorf("%w: cgroups: %w", ErrUnable, err)
	}
	if err := m.bed.rememberCgroups(cgroups); err != nil {
		return err
	}

	init := exec.Command("/proc/self/exe")
	init.Args = []string{machineName, "1", string(spec)}
	init.Stdout, init.Stderr, init.ExtraFiles = log, log, []*os.File{socket, status}
	init.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC}
	in, err := init.StdinPipe()
	if err != nil {
		return err
	}
	if err := init.Start(); err != nil {
		return fmt.Errorf("%w: namespaces: %w", ErrUnable, err)
	}
	m.mu.Lock()
	m.init, m.release = init, in
	m.mu.Unlock()
	for _, dir := range cgroups {
		if err := join(dir, strconv.Itoa(init.Process.Pid)); err != nil {
			return fmt.Errorf("%w: cgroups: %w", ErrUnable, err)
		}
	}
	if _, err := in.Write([]byte{1}); err != nil {
		return err
	}
	status.Close()
	stop := context.AfterFunc(ctx, func() { statusRead.SetReadDeadline(time.Now()) })
	defer stop()
	line, err := bufio.NewReader(statusRead).ReadString('\n')
	if line = strings.TrimSpace(line); line != "ok" {
		return fmt.Errorf("%w: process 1 of %s: %s (%v)", ErrUnable, m.Name, line, err)
	}
	return m.connect(ctx)
}

func (m *Machine) socket() string { return filepath.Join(m.Dir, "init.sock") }

// InitPID is the machine's process 1 as the host sees it.
func (m *Machine) InitPID() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.init == nil {
		return 0
	}
	return m.init.Process.Pid
}

// Path gives a path in the machine as one that this process can open: sockets too.
func (m *Machine) Path(path string) string {
	return filepath.Join("/proc", strconv.Itoa(m.InitPID()), "root", path)
}

// allDaemons gives all that were ever started, in that order.
func (m *Machine) allDaemons() []*Daemon {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.daemons)
}

// end ends process 1, and so everything in the machine, and removes its cgroups.
func (m *Machine) end() error {
	m.mu.Lock()
	init, release := m.init, m.release
	m.init, m.release = nil, nil
	m.mu.Unlock()
	if init != nil {
		_ = init.Process.Kill()
		_ = release.Close()
		// The kernel has it wait for all of its PID namespace.
		_ = init.Wait()
	}
	return removeCgroups(m.cgroups, 10*time.Second)
}

// connect puts the machine on the bed's network: a bridge in the control machine.
func (m *Machine) connect(ctx context.Context) error {
	if m == m.bed.Control {
		return m.ip(ctx,
			"addr add "+serviceIP+"/32 dev lo", // the kubernetes Service's address, without a kube-proxy
			"link add br0 type bridge", "addr add "+m.IP+"/24 dev br0", "link set br0 up",
			"route add "+serviceCIDR+" dev br0") // it has no default route; kube-proxy turns the address before it is used
	}
	i := m.number()
	// After a reboot: the kernel removes the pair of the machine that was some time after the end of its last process.
	_ = m.bed.Control.ip(ctx, fmt.Sprintf("link del ve%d", i))
	err := m.bed.Control.ip(ctx,
		fmt.Sprintf("link add ve%d type veth peer name eth0 netns %d", i, m.InitPID()),
		fmt.Sprintf("link set ve%d master br0 up", i),
		fmt.Sprintf("route replace %s via %s", m.podCIDR(), m.IP))
	if err != nil {
		return err
	}
	return m.ip(ctx, "addr add "+m.IP+"/24 dev eth0", "link set eth0 up", "route add default via "+m.bed.Control.IP)
}

// number is N of nodeN.
func (m *Machine) number() int {
	n, _ := strconv.Atoi(strings.TrimPrefix(m.Name, "node"))
	return n
}

func (m *Machine) podCIDR() string { return fmt.Sprintf("10.89.%d.0/24", m.number()) }

// ip runs commands of ip(8) in the machine's network namespace and the host's others.
func (m *Machine) ip(ctx context.Context, commands ...string) error {
	for _, c := range commands {
		err := m.inNetwork(func() error {
			out, err := exec.CommandContext(ctx, "ip", strings.Fields(c)...).CombinedOutput()
			if err != nil {
				return fmt.Errorf("%s: ip %s: %w: %s", m.Name, c, err, strings.TrimSpace(string(out)))
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// inNetwork runs f on a thread that is in the machine's network namespace. The thread is not used again.
func (m *Machine) inNetwork(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", m.InitPID()))
		if err == nil {
			err = unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
			ns.Close()
		}
		if err != nil {
			done <- fmt.Errorf("%s's network: %w", m.Name, err)
			return
		}
		done <- f()
	}()
	return <-done
}

// Dial connects from inside the machine's network: to its own loopback, to pods, to other machines. The
// address must be numeric.
func (m *Machine) Dial(ctx context.Context, network, address string) (conn net.Conn, err error) {
	inner := m.inNetwork(func() error {
		conn, err = (&net.Dialer{}).DialContext(ctx, network, address)
		return nil
	})
	return conn, errors.Join(inner, err)
}

// Cmd is a command to run in a machine.
type Cmd struct {
	Argv  []string
	Env   []string // NAME=value, beside PATH, HOME and KUBECONFIG
	Dir   string   // default /
	Stdin io.Reader
}

// Exec runs a command in the machine and returns its standard output. A status other than 0 is an
// error that has standard error.
func (m *Machine) Exec(ctx context.Context, argv ...string) (string, error) {
	return m.Run(ctx, Cmd{Argv: argv})
}

// Run is Exec with more to say. When ctx ends so do the command and its process group.
func (m *Machine) Run(ctx context.Context, c Cmd) (string, error) {
	var out, errOut strings.Builder
	var copies sync.WaitGroup
	pipe := func(w io.Writer) (*os.File, error) {
		r, f, err := os.Pipe()
		if err == nil {
			copies.Go(func() { _, _ = io.Copy(w, r); r.Close() })
		}
		return f, err
	}
	stdin, err := os.Open(os.DevNull)
	if err != nil {
		return "", err
	}
	defer func() { stdin.Close() }()
	if c.Stdin != nil {
		stdin.Close()
		r, w, err := os.Pipe()
		if err != nil {
			return "", err
		}
		stdin = r
		go func() { _, _ = io.Copy(w, c.Stdin); w.Close() }()
	}
	stdout, err := pipe(&out)
	if err != nil {
		return "", err
	}
	stderr, err := pipe(&errOut)
	if err != nil {
		stdout.Close()
		return "", err
	}
	p, err := m.start(c, stdin, stdout, stderr)
	stdout.Close()
	stderr.Close()
	if err != nil {
		return "", err
	}
	stop := context.AfterFunc(ctx, p.kill)
	status := p.wait()
	stop()
	copied := make(chan struct{})
	go func() { copies.Wait(); close(copied) }()
	select { // a child that it left behind may keep the pipes open
	case <-copied:
	case <-time.After(2 * time.Second):
		return "", fmt.Errorf("%s: %s ended and left a process that holds its output open", m.Name, strings.Join(c.Argv, " "))
	}
	if status != nil {
		err = fmt.Errorf("%s: %s: %w: %s", m.Name, strings.Join(c.Argv, " "), errors.Join(ctx.Err(), status), strings.TrimSpace(errOut.String()))
	}
	return out.String(), err
}

// process is a command that was started in a machine.
type process struct {
	pid     int // in the machine
	conn    *net.UnixConn
	replies *json.Decoder
}

func (m *Machine) start(c Cmd, stdin, stdout, stderr *os.File) (*process, error) {
	fail := func(err error) (*process, error) {
		return nil, fmt.Errorf("%s: %s: %w", m.Name, strings.Join(c.Argv, " "), err)
	}
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: m.socket(), Net: "unix"})
	if err != nil {
		return fail(err)
	}
	req, err := json.Marshal(request{Argv: c.Argv, Env: c.Env, Dir: c.Dir})
	if err == nil {
		_, _, err = conn.WriteMsgUnix(req, unix.UnixRights(int(stdin.Fd()), int(stdout.Fd()), int(stderr.Fd())), nil)
	}
	p := &process{conn: conn, replies: json.NewDecoder(conn)}
	var r reply
	if err == nil {
		err = p.replies.Decode(&r)
	}
	if err == nil && r.Error != "" {
		err = errors.New(r.Error)
	}
	if err != nil {
		conn.Close()
		return fail(err)
	}
	p.pid = r.PID
	return p, nil
}

// wait returns nil for status 0, and how it ended otherwise. It is called once.
func (p *process) wait() error {
	var r reply
	err := p.replies.Decode(&r)
	p.conn.Close()
	if err != nil || !r.Ended {
		return errors.New("was ended with its connection or machine")
	}
	s := syscall.WaitStatus(r.Status)
	switch {
	case s.Signaled():
		return fmt.Errorf("ended by %v", s.Signal())
	case s.ExitStatus() != 0:
		return fmt.Errorf("status %d", s.ExitStatus())
	}
	return nil
}

// kill ends it and its group.
func (p *process) kill() { _ = p.conn.Close() }

func (p *process) signal(s syscall.Signal) error {
	return json.NewEncoder(p.conn).Encode(request{Signal: int(s)})
}

// Shell is a command line that opens a shell in the machine from the host's, in this process's directory.
func (m *Machine) Shell() string {
	dir, err := os.Getwd()
	if err != nil {
		dir = "/"
	}
	return fmt.Sprintf("nsenter -t %d -m -u -i -n -p -C env --chdir=%s PATH=%s:$PATH KUBECONFIG=%s bash", m.InitPID(), dir, m.bed.bin, m.bed.Kubeconfig("admin"))
}
