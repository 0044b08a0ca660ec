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

// Forward passes the signals that are sent to this process on to the child until stop is called.
// The child is in our process group, so what the terminal sends reaches it by itself and is only
// swallowed here.
func Forward(child *os.Process) (stop func()) {
	signals := make(chan os.Signal, 16)
	for _, s := range []os.Signal{unix.SIGINT, unix.SIGQUIT, unix.SIGTERM, unix.SIGHUP, unix.SIGUSR1, unix.SIGUSR2, unix.SIGALRM} {
		// An ignored signal stays ignored (nohup).
		if !signal.Ignored(s) {
			signal.Notify(signals, s)
		}
	}
	done := make(chan struct{})
	go func() {
		for {
			select {
			case s := <-signals:
				fromTerminal := (s == unix.SIGINT || s == unix.SIGQUIT) && inForeground()
				if !fromTerminal {
					_ = child.Signal(s)
				}
			case <-done:
				return
			}
		}
	}()
	return func() { signal.Stop(signals); close(done) }
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
	var dfl struct {
		handler, flags, restorer uintptr
		mask                     uint64
	}
	_, _, _ = unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(sig), uintptr(unsafe.Pointer(&dfl)), 0, 8, 0, 0)
	_ = unix.Kill(os.Getpid(), sig)
	time.Sleep(100 * time.Millisecond)
}

// StartStatus is the exit status of a shell for a command that cannot be started.
func StartStatus(err error) int {
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) {
		return 127
	}
	return 126
}
