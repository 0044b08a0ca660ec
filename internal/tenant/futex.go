package tenant

import (
	"errors"
	"math"
	"runtime/debug"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Of futex(2). Not the private kind: the words lie in shared pages.
const (
	futexWake       = 1
	futexWaitBitset = 9 // its time is absolute, CLOCK_MONOTONIC
	futexAny        = math.MaxUint32
)

// Forever is a time to wait until that never comes.
const Forever = math.MaxInt64

// FutexWait sleeps while *word has the value, until it is woken or the time (NowNs) has come; it may
// return for no reason. An error says that the word cannot be waited on.
func FutexWait(word *uint32, value uint32, until int64) error {
	var timeout *unix.Timespec
	if until != Forever {
		ts := unix.NsecToTimespec(max(until+timeNamespace().monotonicNs, 0))
		timeout = &ts
	}
	_, _, errno := unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWaitBitset, uintptr(value),
		uintptr(unsafe.Pointer(timeout)), 0, futexAny)
	switch errno {
	case 0, unix.EAGAIN, unix.EINTR, unix.ETIMEDOUT:
		return nil
	}
	return errno
}

// FutexWake wakes all who sleep on the word.
func FutexWake(word *uint32) {
	_, _, _ = unix.RawSyscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWake, math.MaxInt32, 0, 0, 0)
}

var errCut = errors.New("a file of the slice was cut short while it was mapped")

// Guard calls f, which reads or writes mapped pages. Their owner may cut the files short meanwhile;
// then it returns an error, where a plain access would end this process.
func Guard(f func()) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch fault := recover().(type) {
		case nil:
		case interface{ Addr() uintptr }:
			err = errCut
		default:
			panic(fault)
		}
	}()
	f()
	return nil
}
