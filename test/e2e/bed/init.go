package bed

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// The files that process 1 gets beside standard input, which ends when the test does.
const (
	fdSocket = 3 + iota // listens for requests
	fdStatus            // to it goes one line: "ok", or why the machine could not be made
)

const machineName = "bed-machine"

// machineSpec is what process 1 needs to know.
type machineSpec struct {
	Name     string
	Dir      string   // of the machine on the host
	Overlay  bool     // /etc is an overlay over the host's, else a copy
	Writable []string // what it may write of the host's file system
	Path     string   // PATH of its commands
	Env      []string
}

// InitMachine is called first of all in main, or TestMain, of every program that calls Up: where the
// program was started as a machine's process 1 it does not return.
func InitMachine() {
	if len(os.Args) < 2 || os.Args[0] != machineName {
		return
	}
	// The stage is in the second argument: before and after the cgroup namespace, which must be made
	// by a process that is in its cgroups already, and is the calling thread's until exec.
	var err error
	if os.Args[1] == "1" {
		err = enterCgroupNamespace()
	} else {
		err = beMachine(os.Args[2])
	}
	fmt.Fprintln(os.NewFile(fdStatus, "status"), err)
	os.Exit(1)
}

func enterCgroupNamespace() error {
	runtime.LockOSThread()
	if _, err := io.ReadFull(os.Stdin, make([]byte, 1)); err != nil {
		return fmt.Errorf("the test went away: %w", err)
	}
	if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
		return fmt.Errorf("cgroup namespace: %w", err)
	}
	return unix.Exec("/proc/self/exe", []string{machineName, "2", os.Args[2]}, os.Environ())
}

func beMachine(specText string) error {
	var spec machineSpec
	if err := json.Unmarshal([]byte(specText), &spec); err != nil {
		return err
	}
	unix.CloseOnExec(fdSocket)
	unix.CloseOnExec(fdStatus)
	if err := mounts(spec); err != nil {
		return err
	}
	if err := unix.Sethostname([]byte(spec.Name)); err != nil {
		return err
	}
	if err := os.Setenv("PATH", spec.Path); err != nil {
		return err
	}
	if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		return fmt.Errorf("ip link set lo up: %w: %s", err, out)
	}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
		return err
	}
	f := os.NewFile(fdSocket, "socket")
	listener, err := net.FileListener(f)
	if err != nil {
		return err
	}
	in := &initd{env: append([]string{"PATH=" + spec.Path, "HOME=" + filepath.Join(spec.Dir, "home")}, spec.Env...), running: map[int]chan unix.WaitStatus{}}
	go in.reap()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	status := os.NewFile(fdStatus, "status")
	fmt.Fprintln(status, "ok")
	status.Close()
	for {
		conn, err := listener.Accept()
		if err != nil {
			return err
		}
		go in.serve(conn.(*net.UnixConn))
	}
}

// sysctls are what kubelet wants and would write, for the whole host. It is shown files that have them.
func sysctls() map[string]string {
	return map[string]string{"vm/overcommit_memory": "1", "vm/panic_on_oom": "0", "kernel/panic": "10", "kernel/panic_on_oops": "1",
		"kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000"}
}

// mounts makes the machine's file system out of the host's. What is neither the machine's own nor
// Writable cannot be written, so that nothing strays onto the host.
func mounts(spec machineSpec) error {
	dir := spec.Dir
	var failed error
	mount := func(source, target, kind string, flags uintptr, data string) {
		if failed != nil {
			return
		}
		if err := unix.Mount(source, target, kind, flags, data); err != nil {
			failed = fmt.Errorf("mount %s on %s: %w", source, target, err)
		}
	}
	mkdir := func(path string) {
		if failed == nil {
			failed = os.MkdirAll(path, 0o755)
		}
	}
	mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	for _, w := range spec.Writable {
		mount(w, w, "", unix.MS_BIND|unix.MS_REC, "")
	}
	mount("none", "/", "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, "")
	mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	mount("sysfs", "/sys", "sysfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	if failed != nil {
		return failed
	}
	if err := mountCgroups(mount, mkdir); err != nil {
		return err
	}
	for _, d := range []string{"var/lib", "var/log"} {
		mount(filepath.Join(dir, d), "/"+d, "", unix.MS_BIND, "")
	}
	if etc := filepath.Join(dir, "etc"); spec.Overlay {
		mount("overlay", "/etc", "overlay", 0, fmt.Sprintf("lowerdir=/etc,upperdir=%s,workdir=%s.work", etc, etc))
	} else {
		mount(etc, "/etc", "", unix.MS_BIND, "")
	}
	mount("tmpfs", "/run", "tmpfs", unix.MS_NOSUID, "mode=755")
	mkdir("/run/lock")
	mkdir("/run/cdi")
	for name, value := range sysctls() {
		file := filepath.Join(dir, "sysctl", strings.ReplaceAll(name, "/", "."))
		mkdir(filepath.Dir(file))
		if failed == nil {
			failed = os.WriteFile(file, []byte(value+"\n"), 0o644)
		}
		if target := "/proc/sys/" + name; exists(target) {
			mount(file, target, "", unix.MS_BIND, "")
		}
	}
	if failed == nil {
		failed = devices(mount, mkdir)
	}
	// Pods may want mounts to travel in both directions.
	mount("none", "/", "", unix.MS_REC|unix.MS_SHARED, "")
	return failed
}

func exists(path string) bool { _, err := os.Lstat(path); return err == nil }

// mountCgroups mounts each hierarchy anew: in the cgroup namespace each shows the machine's part only.
func mountCgroups(mount func(source, target, kind string, flags uintptr, data string), mkdir func(string)) error {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return err
	}
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	const top = "/sys/fs/cgroup"
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	if len(lines) == 1 {
		mount("cgroup2", top, "cgroup2", flags, "")
		if err := evacuate(top, "init"); err != nil {
			return err
		}
		return delegate(top)
	}
	mount("tmpfs", top, "tmpfs", flags, "mode=755")
	for _, line := range lines {
		f := strings.SplitN(line, ":", 3)
		if len(f) != 3 {
			return fmt.Errorf("/proc/self/cgroup: %q is not id:controllers:path", line)
		}
		name := strings.TrimPrefix(f[1], "name=")
		switch {
		case f[1] == "":
			mkdir(top + "/unified")
			mount("cgroup2", top+"/unified", "cgroup2", flags, "")
		case name != f[1]:
			mkdir(top + "/" + name)
			mount("cgroup", top+"/"+name, "cgroup", flags, "none,"+f[1])
		default:
			mkdir(top + "/" + name)
			mount("cgroup", top+"/"+name, "cgroup", flags, name)
		}
	}
	return nil
}

// devices makes a /dev of the machine's own, so that what is made in it is made nowhere else.
func devices(mount func(source, target, kind string, flags uintptr, data string), mkdir func(string)) error {
	mount("tmpfs", "/dev", "tmpfs", unix.MS_NOSUID, "mode=755")
	for _, d := range []struct {
		name         string
		major, minor uint32
		mode         uint32
	}{
		{"null", 1, 3, 0o666}, {"zero", 1, 5, 0o666}, {"full", 1, 7, 0o666}, {"random", 1, 8, 0o666},
		{"urandom", 1, 9, 0o666}, {"kmsg", 1, 11, 0o644}, {"tty", 5, 0, 0o666},
	} {
		path := "/dev/" + d.name
		if err := unix.Mknod(path, unix.S_IFCHR|d.mode, int(unix.Mkdev(d.major, d.minor))); err != nil {
			return fmt.Errorf("mknod %s: %w", path, err)
		}
		if err := os.Chmod(path, os.FileMode(d.mode)); err != nil {
			return err
		}
	}
	for name, to := range map[string]string{"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1",
		"stderr": "/proc/self/fd/2", "ptmx": "pts/ptmx"} {
		if err := os.Symlink(to, "/dev/"+name); err != nil {
			return err
		}
	}
	mkdir("/dev/pts")
	mount("devpts", "/dev/pts", "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620,gid=5")
	mkdir("/dev/shm")
	mount("tmpfs", "/dev/shm", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777")
	mkdir("/dev/mqueue")
	mount("mqueue", "/dev/mqueue", "mqueue", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	return nil
}

// A connection is one command. First comes a request, with the descriptors of its standard input,
// output and error; answered by a reply with its process id, or an error. Then any number of signals.
// A reply that it ended is the last. Who closes the connection kills the command and its group.
type request struct {
	Argv   []string `json:",omitempty"`
	Env    []string `json:",omitempty"`
	Dir    string   `json:",omitempty"`
	Signal int      `json:",omitempty"`
}

type reply struct {
	PID    int    `json:",omitempty"`
	Error  string `json:",omitempty"`
	Ended  bool   `json:",omitempty"`
	Status int    `json:",omitempty"` // as wait(2) gives it
}

// initd starts commands and reaps whatever process 1 has to.
type initd struct {
	env []string

	mu      sync.Mutex // held from before a fork until its child is in running
	running map[int]chan unix.WaitStatus
}

func (in *initd) reap() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGCHLD)
	for {
		for {
			in.mu.Lock()
			var status unix.WaitStatus
			pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
			if c := in.running[pid]; err == nil && pid > 0 && c != nil {
				c <- status
				delete(in.running, pid)
			}
			in.mu.Unlock()
			if err == nil && pid > 0 || errors.Is(err, unix.EINTR) {
				continue
			}
			break
		}
		<-signals
	}
}

func (in *initd) serve(conn *net.UnixConn) {
	defer conn.Close()
	send := func(r reply) { _ = json.NewEncoder(conn).Encode(r) }
	req, files, more, err := receive(conn)
	if err != nil {
		send(reply{Error: err.Error()})
		return
	}
	pid, ended, err := in.start(req, files)
	for _, fd := range files {
		_ = unix.Close(fd)
	}
	if err != nil {
		send(reply{Error: err.Error()})
		return
	}
	send(reply{PID: pid})
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		for {
			var r request
			if more.Decode(&r) != nil {
				return
			}
			in.kill(pid, unix.Signal(r.Signal), false)
		}
	}()
	select {
	case status := <-ended:
		send(reply{Ended: true, Status: int(status)})
	case <-closed:
		in.kill(pid, unix.SIGKILL, true)
		<-ended
	}
}

// kill sends a signal to a command that has not been reaped, or to its group.
func (in *initd) kill(pid int, s unix.Signal, group bool) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.running[pid] == nil {
		return
	}
	if group {
		pid = -pid
	}
	_ = unix.Kill(pid, s)
}

func (in *initd) start(req request, files []int) (pid int, ended chan unix.WaitStatus, err error) {
	if len(files) != 3 || len(req.Argv) == 0 {
		return 0, nil, fmt.Errorf("%d descriptors and %d words, want 3 and a command", len(files), len(req.Argv))
	}
	path, err := exec.LookPath(req.Argv[0])
	if err != nil {
		return 0, nil, err
	}
	attr := syscall.ProcAttr{Dir: cmp.Or(req.Dir, "/"), Env: slices.Concat(in.env, req.Env), Sys: &syscall.SysProcAttr{Setsid: true}}
	for _, fd := range files {
		attr.Files = append(attr.Files, uintptr(fd))
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	pid, err = syscall.ForkExec(path, req.Argv, &attr)
	if err != nil {
		return 0, nil, fmt.Errorf("%s: %w", path, err)
	}
	ended = make(chan unix.WaitStatus, 1)
	in.running[pid] = ended
	return pid, ended, nil
}

// receive reads the first request and the descriptors that came with it; more has what follows.
func receive(conn *net.UnixConn) (req request, files []int, more *json.Decoder, err error) {
	buf, oob := make([]byte, 64<<10), make([]byte, unix.CmsgSpace(3*4))
	n, oobn, _, _, err := conn.ReadMsgUnix(buf, oob)
	if err != nil {
		return req, nil, nil, err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil {
		return req, nil, nil, err
	}
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			return req, nil, nil, err
		}
		files = append(files, fds...)
	}
	more = json.NewDecoder(io.MultiReader(bytes.NewReader(buf[:n]), conn))
	return req, files, more, more.Decode(&req)
}
