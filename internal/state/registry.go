package state

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// Registry is one machine's. Of one that Open did not make, the directory is opened at the first
// use, by one goroutine.
type Registry struct {
	Root string
	dir  *os.File
}

// Open makes the directory if need be. A shared one is writable by all users, and sticky; root
// makes it its own.
func Open(root string, shared bool) (*Registry, error) {
	mode := uint32(0o700)
	if shared {
		mode = sharedMode
	}
	if err := os.MkdirAll(filepath.Dir(root), 0o755); err != nil {
		return nil, err
	}
	var err error
	for range 20 {
		made := unix.Mkdir(root, mode)
		if made != nil && !errors.Is(made, fs.ErrExist) {
			return nil, &os.PathError{Op: "mkdir", Path: root, Err: made}
		}
		r := &Registry{Root: root}
		if err = r.check(shared, made == nil); err == nil {
			return r, nil
		}
		if !errors.Is(err, errNotAll) && !errors.Is(err, fs.ErrPermission) {
			break
		}
		// Its maker is about to open it to all.
		time.Sleep(5 * time.Millisecond)
	}
	return nil, err
}

const sharedMode = 0o777 | unix.S_ISVTX

var errNotAll = errors.New("not writable by all users; its owner or root can repair it with chmod 1777")

// check opens the directory and sees to it that a shared one can be used by all, and that none can
// remove another's slices, its owner excepted.
func (r *Registry) check(shared, made bool) error {
	dir, err := r.directory()
	if err != nil {
		return err
	}
	st, err := statOf(dir)
	if err != nil {
		return err
	}
	fd, mine := int(dir.Fd()), int(st.Uid) == os.Getuid()
	switch {
	case !shared && !mine:
		return fmt.Errorf("%s is not a directory of this user", r.Root)
	case !shared && made:
		return unix.Fchmod(fd, 0o700)
	case !shared:
		return nil
	case st.Mode&0o022 != 0 && st.Mode&unix.S_ISVTX == 0:
		return fmt.Errorf("%s is writable by others and not sticky; remove it", r.Root)
	}
	// In a user namespace root may not; then it is as any other user.
	if os.Getuid() == 0 && !mine {
		mine = unix.Fchown(fd, 0, 0) == nil
	}
	if st.Mode&0o7777 == sharedMode || mine && unix.Fchmod(fd, sharedMode) == nil {
		return nil
	}
	return fmt.Errorf("%s is %w", r.Root, errNotAll)
}

// directory is the registry's, opened once.
func (r *Registry) directory() (*os.File, error) {
	if r.dir != nil {
		return r.dir, nil
	}
	fd, err := unix.Open(r.Root, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil, fmt.Errorf("%s is a file or a link, not a directory; remove it", r.Root)
	}
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: r.Root, Err: err}
	}
	r.dir = os.NewFile(uintptr(fd), r.Root)
	return r.dir, nil
}

// openIn opens what is in an open directory; a link is not followed.
func openIn(dir *os.File, name string, flags int, mode uint32) (*os.File, error) {
	path := filepath.Join(dir.Name(), name)
	for {
		fd, err := unix.Openat(int(dir.Fd()), name, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC, mode)
		if err == nil {
			return os.NewFile(uintptr(fd), path), nil
		}
		if err != unix.EINTR {
			return nil, &os.PathError{Op: "open", Path: path, Err: err}
		}
	}
}

func statOf(f *os.File) (st unix.Stat_t, err error) {
	err = unix.Fstat(int(f.Fd()), &st)
	return st, err
}

func sameFile(a, b unix.Stat_t) bool { return a.Dev == b.Dev && a.Ino == b.Ino }

// RemoveDead removes slices that are over, as far as the caller may. The machine's lock is held.
func (r *Registry) RemoveDead(slices []Slice) {
	for _, s := range slices {
		if !s.Alive && (s.Mine || os.Getuid() == 0) {
			r.remove(s)
		}
	}
	r.removeUnfinished()
}

func (r *Registry) remove(s Slice) {
	// The record last: it is what leads to the libraries, should this be cut short.
	removeLibraries(s)
	r.removeTree(s.ID)
}

func removeLibraries(s Slice) {
	// Only a path that this program itself would have chosen; root leaves others' libraries alone.
	if s.Mine && filepath.Base(s.Info.Libraries) == s.ID && filepath.Base(filepath.Dir(s.Info.Libraries)) == "slices" {
		_ = os.RemoveAll(s.Info.Libraries)
	}
}

// removeTree removes a directory of the registry, whatever the path of the registry means by now.
func (r *Registry) removeTree(id string) {
	dir, err := r.directory()
	if err != nil {
		return
	}
	root, err := os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", dir.Fd()))
	if err != nil {
		return
	}
	defer root.Close()
	_ = root.RemoveAll(id)
}

// removeUnfinished removes directories of the caller that never became a slice: their maker died
// under the lock that the caller holds now. What somebody uses all the same stays.
func (r *Registry) removeUnfinished() {
	names, _ := r.names()
	for _, name := range names {
		if _, ok := r.read(name); ok {
			continue
		}
		if dir, uid, err := r.openSlice(name); err == nil {
			if uid == os.Getuid() && !used(dir) {
				r.removeTree(name)
			}
			_ = dir.Close()
		}
	}
}

// used is true when a supervisor or a process holds something in the directory.
func used(dir *os.File) bool {
	if ledgerInUse(dir) {
		return true
	}
	info, err := openIn(dir, infoFile, unix.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return false
	}
	defer info.Close()
	return writeLocked(info)
}
