package state

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

const (
	lockFile = "lock"
	lockWait = 10 * time.Second
)

// Lock takes the machine's lock; the returned function gives it back.
func (r *Registry) Lock() (func(), error) {
	deadline := time.Now().Add(lockWait)
	for {
		f, err := r.openLock()
		if err != nil {
			return nil, err
		}
		err = waitFor(f, deadline)
		if err == nil && r.isLock(f) {
			return func() { _ = f.Close() }, nil
		}
		_ = f.Close()
		if err != nil {
			return nil, fmt.Errorf("%s is locked by another process for %v (`fuser -v` shows it): %w", f.Name(), lockWait, err)
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("%s comes and goes", f.Name())
		}
	}
}

func waitFor(f *os.File, deadline time.Time) error {
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) || time.Now().After(deadline) {
			return err
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// isLock is true when the file that was locked is the one that others will find.
func (r *Registry) isLock(f *os.File) bool {
	var now unix.Stat_t
	was, err := statOf(f)
	if err == nil {
		err = unix.Fstatat(int(r.dir.Fd()), lockFile, &now, unix.AT_SYMLINK_NOFOLLOW)
	}
	return err == nil && sameFile(was, now)
}

// openLock opens the lock file, for reading, as no more is needed and other users' files in a sticky
// directory may not be opened for creation (fs.protected_regular).
func (r *Registry) openLock() (*os.File, error) {
	dir, err := r.directory()
	if err != nil {
		return nil, err
	}
	for try := range 20 {
		var f *os.File
		f, err = openIn(dir, lockFile, unix.O_RDONLY|unix.O_NONBLOCK, 0)
		switch {
		case err == nil:
			if st, e := statOf(f); e != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
				_ = f.Close()
				return nil, fmt.Errorf("%s is not a regular file; %s", f.Name(), r.whoseLock("remove it"))
			}
			return f, nil
		case errors.Is(err, fs.ErrNotExist):
			err = makeLock(dir)
		case errors.Is(err, unix.ELOOP):
			return nil, fmt.Errorf("%s/%s is a link; %s", r.Root, lockFile, r.whoseLock("remove it"))
		case errors.Is(err, fs.ErrPermission) && try < 19:
			// Its maker is about to open it to all.
			time.Sleep(5 * time.Millisecond)
		}
		if err != nil && !errors.Is(err, fs.ErrPermission) {
			return nil, err
		}
	}
	if errors.Is(err, fs.ErrPermission) {
		return nil, fmt.Errorf("%w; %s", err, r.whoseLock("make it readable for all (chmod 644)"))
	}
	return nil, fmt.Errorf("%s/%s comes and goes", r.Root, lockFile)
}

func makeLock(dir *os.File) error {
	made, err := openIn(dir, lockFile, unix.O_RDONLY|unix.O_CREAT|unix.O_EXCL, 0o644)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err == nil {
		err = made.Chmod(0o644)
		_ = made.Close()
	}
	return err
}

// whoseLock says who can do something about the lock file.
func (r *Registry) whoseLock(what string) string {
	var st unix.Stat_t
	if unix.Fstatat(int(r.dir.Fd()), lockFile, &st, unix.AT_SYMLINK_NOFOLLOW) == nil && int(st.Uid) != os.Getuid() {
		return fmt.Sprintf("its owner, %s, or root can %s", Slice{UID: int(st.Uid)}.User(), what)
	}
	return what
}
