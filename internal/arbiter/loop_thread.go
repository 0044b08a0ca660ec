package arbiter

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// turnThread makes the calling goroutine's thread one that wakes up promptly: its timers are precise, the
// scheduler gives it short slices, which it grants soon (Linux 6.12; no right is needed), and where this
// process may it goes before others. The thread ends with the goroutine, which must not unlock it.
func turnThread() {
	runtime.LockOSThread()
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0)
	attr, err := unix.SchedGetAttr(0, 0)
	if err != nil || attr.Policy != unix.SCHED_NORMAL {
		return
	}
	attr.Runtime = 100_000
	attr.Flags |= unix.SCHED_FLAG_RESET_ON_FORK
	asked := attr.Nice
	attr.Nice = min(asked, -15)
	if unix.SchedSetAttr(0, attr, 0) != nil {
		attr.Nice = asked
		_ = unix.SchedSetAttr(0, attr, 0)
	}
}
