package state

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Watch tells when slices come and go. For one goroutine.
type Watch struct {
	file *os.File // nil: the kernel does not tell
}

// unwatched is how long Wait waits where the kernel does not tell of changes.
const unwatched = 50 * time.Millisecond

// Watch begins to watch. It never fails: at worst Wait is a short sleep.
func (r *Registry) Watch() *Watch {
	w := &Watch{}
	dir, err := r.directory()
	if err != nil {
		return w
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return w
	}
	const events = unix.IN_CREATE | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_ONLYDIR
	if _, err := unix.InotifyAddWatch(fd, fmt.Sprintf("/proc/self/fd/%d", dir.Fd()), events); err != nil {
		_ = unix.Close(fd)
		return w
	}
	w.file = os.NewFile(uintptr(fd), "inotify")
	return w
}

// Wait returns after a change, at the latest after d or when ctx ends.
func (w *Watch) Wait(ctx context.Context, d time.Duration) {
	if w.file == nil || w.read(ctx, d) != nil {
		select {
		case <-ctx.Done():
		case <-time.After(min(d, unwatched)):
		}
	}
}

// read takes what the kernel told; an error says that it tells nothing.
func (w *Watch) read(ctx context.Context, d time.Duration) error {
	if err := w.file.SetReadDeadline(time.Now().Add(d)); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = w.file.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	var buf [4096]byte
	_, err := w.file.Read(buf[:])
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil
	}
	return err
}

// Close ends the watch.
func (w *Watch) Close() {
	if w.file != nil {
		_ = w.file.Close()
	}
}
