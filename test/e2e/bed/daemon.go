package bed

import (
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"
)

// restartDelay is how long a daemon that ended stays away, as with systemd's RestartSec.
const restartDelay = 300 * time.Millisecond

// endWithin is how long a signal has to end a daemon before its group is killed.
const endWithin = 10 * time.Second

// Daemon is a command that is started again whenever it ends, and after a reboot, until Stop. What it
// writes goes to Log. Safe for concurrent use.
type Daemon struct {
	Name string
	Log  string // a file of the host

	machine *Machine
	cmd     Cmd

	mu      sync.Mutex
	changed *sync.Cond // of what follows
	wanted  bool       // Stop and suspend clear it
	looping bool
	process *process // nil while none runs
	starts  int
	ended   error // how it ended last
}

// Start starts a daemon in the machine. Its name is its log's, and unique in the machine.
func (m *Machine) Start(name string, argv ...string) (*Daemon, error) {
	return m.StartCmd(name, Cmd{Argv: argv})
}

// StartCmd is Start with more to say; standard input is empty.
func (m *Machine) StartCmd(name string, c Cmd) (*Daemon, error) {
	d := &Daemon{Name: name, Log: m.bed.logFile(m.Name + "-" + name), machine: m, cmd: c}
	d.changed = sync.NewCond(&d.mu)
	m.mu.Lock()
	for _, other := range m.daemons {
		if other.Name == name {
			m.mu.Unlock()
			return nil, fmt.Errorf("%s already has a daemon %s: use its Start", m.Name, name)
		}
	}
	m.daemons = append(m.daemons, d)
	m.mu.Unlock()
	return d, d.Start()
}

// Daemon gives one by name, or nil: kubelet and containerd on a node; etcd, kube-apiserver,
// kube-controller-manager and kube-scheduler on the control machine; and what Start started.
func (m *Machine) Daemon(name string) *Daemon {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, d := range m.daemons {
		if d.Name == name {
			return d
		}
	}
	return nil
}

// Start starts a daemon that was stopped; it does nothing for one that was not. An error means that it
// could not be started even once.
func (d *Daemon) Start() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for d.looping && !d.wanted {
		d.changed.Wait()
	}
	if d.wanted {
		return nil
	}
	if err := d.once(); err != nil {
		return err
	}
	d.wanted, d.looping = true, true
	go d.loop()
	return nil
}

// once starts the process; the lock is held.
func (d *Daemon) once() error {
	log, err := os.OpenFile(d.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	defer null.Close()
	d.process, err = d.machine.start(d.cmd, null, log, log)
	d.starts++
	d.changed.Broadcast()
	return err
}

func (d *Daemon) loop() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for {
		if p := d.process; p != nil {
			d.mu.Unlock()
			err := p.wait()
			d.mu.Lock()
			d.process, d.ended = nil, err
			d.changed.Broadcast()
		}
		if d.wanted {
			d.mu.Unlock()
			time.Sleep(restartDelay)
			d.mu.Lock()
		}
		if !d.wanted {
			d.looping = false
			d.changed.Broadcast()
			return
		}
		if err := d.once(); err != nil {
			d.ended = err
		}
	}
}

// Stop sends SIGTERM, after 10 s SIGKILL to the process group, and returns when the process has ended.
// It is not started again.
func (d *Daemon) Stop() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.wanted = false
	if p := d.process; p != nil {
		_ = p.signal(syscall.SIGTERM)
		defer time.AfterFunc(endWithin, p.kill).Stop()
	}
	for d.looping {
		d.changed.Wait()
	}
}

// Halt ends the process group with SIGKILL, as a crash that nobody repairs, and returns when the
// process has ended. It is not started again.
func (d *Daemon) Halt() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.wanted = false
	if d.process != nil {
		d.process.kill()
	}
	for d.looping {
		d.changed.Wait()
	}
}

// Kill sends a signal and returns when the process has ended of it, or of SIGKILL 10 s later; it is
// started again after 300 ms. Where none runs it is an error.
func (d *Daemon) Kill(s syscall.Signal) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := d.process
	if p == nil {
		return fmt.Errorf("%s on %s is not running: %w", d.Name, d.machine.Name, d.ended)
	}
	if err := p.signal(s); err != nil {
		return err
	}
	defer time.AfterFunc(endWithin, p.kill).Stop()
	for d.process == p {
		d.changed.Wait()
	}
	return nil
}

// Signal only sends a signal, such as SIGHUP or SIGSTOP.
func (d *Daemon) Signal(s syscall.Signal) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.process == nil {
		return fmt.Errorf("%s on %s is not running: %w", d.Name, d.machine.Name, d.ended)
	}
	return d.process.signal(s)
}

// PID is the process's id in its machine, 0 while none runs. Starts counts how often it was started.
func (d *Daemon) PID() (pid, starts int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.process != nil {
		pid = d.process.pid
	}
	return pid, d.starts
}

// SetCmd changes the command for the next start.
func (d *Daemon) SetCmd(c Cmd) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.cmd = c
}

// Cmd is the command.
func (d *Daemon) Cmd() Cmd {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.cmd
}

// suspend keeps a daemon from being started, and tells whether it was to be.
func (d *Daemon) suspend() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	was := d.wanted
	d.wanted = false
	return was
}
