package state

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// Mandate makes this process the arbiter of its user's slices, root's of all. It ends with the process,
// however that ends.
type Mandate struct {
	registry *Registry
	file     *os.File
	name     string
}

// ErrHeld says that another process is the arbiter.
var ErrHeld = errors.New("another process is the arbiter")

func arbiterFile(uid int) string { return fmt.Sprintf("arbiter-%d", uid) }

// TryMandate makes this process the arbiter if nobody is.
func (r *Registry) TryMandate() (*Mandate, error) { return r.mandate(unix.F_OFD_SETLK) }

// WaitMandate waits until this process can be the arbiter. The wait cannot be broken off; who has no use
// of it any more gives the mandate back.
func (r *Registry) WaitMandate() (*Mandate, error) { return r.mandate(unix.F_OFD_SETLKW) }

func (r *Registry) mandate(how int) (*Mandate, error) {
	name := arbiterFile(os.Getuid())
	for range 100 {
		f, err := r.openMandate(name)
		if err != nil {
			return nil, err
		}
		m := &Mandate{registry: r, file: f, name: name}
		err = m.lock(how)
		if err == nil && m.inPlace() {
			return m, nil
		}
		_ = f.Close()
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
			return nil, ErrHeld
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f.Name(), err)
		}
	}
	return nil, fmt.Errorf("%s/%s comes and goes", r.Root, name)
}

func (m *Mandate) lock(how int) error {
	for {
		err := unix.FcntlFlock(m.file.Fd(), how, &unix.Flock_t{Type: unix.F_WRLCK, Len: 1})
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// openMandate opens the file whose lock is the mandate: readable by its owner only, so that nobody else
// can hold the lock.
func (r *Registry) openMandate(name string) (*os.File, error) {
	dir, err := r.directory()
	if err != nil {
		return nil, err
	}
	for range 20 {
		f, err := openIn(dir, name, unix.O_RDWR|unix.O_NONBLOCK, 0)
		if errors.Is(err, fs.ErrNotExist) {
			f, err = openIn(dir, name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_NONBLOCK, 0o600)
			if errors.Is(err, fs.ErrExist) {
				continue
			}
		}
		if err != nil {
			return nil, err
		}
		st, err := statOf(f)
		if err == nil && (st.Mode&unix.S_IFMT != unix.S_IFREG || int(st.Uid) != os.Getuid()) {
			err = fmt.Errorf("%s is not a file of this user; its owner or root can remove it", f.Name())
		}
		if err == nil && st.Mode&0o7777 != 0o600 {
			err = f.Chmod(0o600)
		}
		if err != nil {
			_ = f.Close()
			return nil, err
		}
		return f, nil
	}
	return nil, fmt.Errorf("%s/%s comes and goes", r.Root, name)
}

// inPlace is true when the file that was locked is the one that others will find.
func (m *Mandate) inPlace() bool {
	var now unix.Stat_t
	was, err := statOf(m.file)
	if err == nil {
		err = unix.Fstatat(int(m.registry.dir.Fd()), m.name, &now, unix.AT_SYMLINK_NOFOLLOW)
	}
	return err == nil && sameFile(was, now)
}

// Close ends the mandate. last: nobody waits for it, so the file goes too. Who waits all the same sees
// that its file is no longer in place, and makes a new one.
func (m *Mandate) Close(last bool) {
	if last && m.inPlace() {
		_ = unix.Unlinkat(int(m.registry.dir.Fd()), m.name, 0)
	}
	_ = m.file.Close()
}

// HasArbiter tells whether a user has or had an arbiter here that may still live.
func (r *Registry) HasArbiter(uid int) bool {
	var st unix.Stat_t
	dir, err := r.directory()
	if err == nil {
		err = unix.Fstatat(int(dir.Fd()), arbiterFile(uid), &st, unix.AT_SYMLINK_NOFOLLOW)
	}
	return err == nil && int(st.Uid) == uid
}
