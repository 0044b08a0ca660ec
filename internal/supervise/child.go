// Package supervise looks after a running slice: it waits for the command as if it were the command,
// gives back what dead processes held, and measures what the ledger cannot see.
package supervise

import (
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Signals passes the signals that are sent to this process on to a child. They are caught before the child
// starts, so that none ends this process and leaves the child alone.
type Signals struct {
	caught chan os.Signal
	over   chan struct{}
}

// Catch catches them from now on, until Stop.
func Catch() *Signals {
	s := &Signals{caught: make(chan os.Signal, 16), over: make(chan struct{})}
	for _, sig := range []os.Signal{unix.SIGINT, unix.SIGQUIT, unix.SIGTERM, unix.SIGHUP, unix.SIGUSR1, unix.SIGUSR2, unix.SIGALRM} {
		// An ignored signal stays ignored (nohup).
		if !signal.Ignored(sig) {
			signal.Notify(s.caught, sig)
		}
	}
	return s
}

// Forward passes on what came before the child was there, and what comes. The child is in our process
// group, so what the terminal sends reaches it by itself from now on and is only swallowed here.
func (s *Signals) Forward(child *os.Process) {
	for len(s.caught) > 0 {
		_ = child.Signal(<-s.caught)
	}
	go func() {
		for {
			select {
			case sig := <-s.caught:
				fromTerminal := (sig == unix.SIGINT || sig == unix.SIGQUIT) && inForeground()
				if !fromTerminal {
					_ = child.Signal(sig)
				}
			case <-s.over:
				return
			}
		}
	}()
}

// Stop ends it.
func (s *Signals) Stop() {
	signal.Stop(s.caught)
	close(s.over)
}

// inForeground is true when a terminal's keys send signals to our process group.
func inForeground() bool {
	tty, err := os.OpenFile("/dev/tty", os.O_RDONLY|unix.O_NOCTTY|unix.O_NONBLOCK, 0)
	if err != nil {
		return false
	}
	defer tty.Close()
	group, err := unix.IoctlGetInt(int(tty.Fd()), unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}

// Exit ends this process as the child ended: with its status, or by the same signal.
func Exit(state *os.ProcessState) {
	ws, ok := state.Sys().(syscall.WaitStatus)
	if !ok || !ws.Signaled() {
		os.Exit(state.ExitCode())
	}
	die(ws.Signal())
	os.Exit(128 + int(ws.Signal()))
}

// die sends a signal to ourselves with its default action, without a core file of our own. Not
// through os/signal: the Go runtime keeps handlers for some and prints stacks.
func die(sig syscall.Signal) {
	_ = unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{})
	_ = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
	setAction(sig, &action{})
	_ = unix.Kill(os.Getpid(), sig)
	time.Sleep(100 * time.Millisecond)
}

// StopSelf stops this process as the terminal would have, had the signal not been caught (os/signal cannot
// take its handler back), and returns when it is continued.
func StopSelf() {
	caught := setAction(unix.SIGTSTP, &action{})
	_ = unix.Kill(os.Getpid(), unix.SIGTSTP)
	setAction(unix.SIGTSTP, &caught)
}

// action is the kernel's struct sigaction on x86-64 and arm64; zero is the default action.
type action struct {
	handler, flags, restorer uintptr
	mask                     uint64
}

func setAction(sig syscall.Signal, to *action) (before action) {
	_, _, _ = unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(sig), uintptr(unsafe.Pointer(to)), uintptr(unsafe.Pointer(&before)), 8, 0, 0)
	return before
}

// StartStatus is the exit status of a shell for a command that cannot be started.
func StartStatus(err error) int {
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) {
		return 127
	}
	return 126
}
