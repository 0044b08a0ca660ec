package driverview

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// tempPrefix starts the name of a view that is being made.
const tempPrefix = ".making-"

const lockName = ".lock"

// lockBase makes the base directory and holds it against other processes.
func lockBase(base string) (unlock func(), err error) {
	if err := os.MkdirAll(base, 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(base, lockName), os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		if err = unix.Flock(int(f.Fd()), unix.LOCK_EX); err != unix.EINTR {
			break
		}
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return func() { _ = f.Close() }, nil
}

// make writes the view into dir: aside, and renamed once it is whole and on the disk. Of a view that
// is there only what is missing or of the wrong size or kind is written again, each at once, so a
// container that uses it never sees less than it had.
func (p plan) make(dir string, rep *Report) error {
	if _, err := os.Lstat(dir); err == nil {
		return p.write(dir, rep)
	}
	temp, err := os.MkdirTemp(filepath.Dir(dir), tempPrefix)
	if err != nil {
		return err
	}
	err = p.write(temp, rep)
	if err == nil {
		err = syncFS(temp)
	}
	if err == nil {
		err = os.Rename(temp, dir)
	}
	if err != nil {
		_ = os.RemoveAll(temp)
	}
	return err
}

func (p plan) write(dir string, rep *Report) error {
	for _, d := range []string{"", "bin", "lib", "lib64", driverDir} {
		d = filepath.Join(dir, d)
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
		info, err := os.Stat(d)
		if err == nil && info.Mode().Perm() != 0o755 { // whatever the umask
			err = os.Chmod(d, 0o755)
		}
		if err != nil {
			return err
		}
	}
	for _, e := range p.sorted() {
		at := filepath.Join(dir, e.path)
		if e.isAt(at) {
			continue
		}
		if err := e.put(at, rep); err != nil {
			return fmt.Errorf("%s: %w", e.path, err)
		}
	}
	return nil
}

// isAt says whether the entry is in place already.
func (e entry) isAt(at string) bool {
	info, err := os.Lstat(at)
	if err != nil {
		return false
	}
	switch {
	case e.link != "":
		target, err := os.Readlink(at)
		return err == nil && target == e.link
	case !info.Mode().IsRegular():
		return false
	case e.file != nil:
		return info.Size() == e.file.info.Size()
	}
	data, err := os.ReadFile(at)
	return err == nil && bytes.Equal(data, e.data)
}

// put makes the entry under another name and renames it.
func (e entry) put(at string, rep *Report) error {
	if info, err := os.Lstat(at); err == nil && info.IsDir() {
		if err := os.RemoveAll(at); err != nil {
			return err
		}
	}
	temp := filepath.Join(filepath.Dir(at), tempPrefix+filepath.Base(at))
	err := os.RemoveAll(temp)
	switch {
	case err != nil:
	case e.link != "":
		err = os.Symlink(e.link, temp)
	case e.file != nil:
		err = e.file.linkOrCopy(temp, rep)
	default:
		if err = os.WriteFile(temp, e.data, 0o755); err == nil {
			err = os.Chmod(temp, 0o755)
		}
	}
	if err == nil {
		err = os.Rename(temp, at)
	}
	if err != nil {
		_ = os.Remove(temp)
	}
	return err
}

// linkOrCopy makes a hard link, which takes no room and shares the page cache with the host; across
// mounts there is none, so a copy.
func (f *file) linkOrCopy(to string, rep *Report) error {
	if os.Link(f.local, to) == nil {
		rep.Linked++
		return nil
	}
	n, err := copyFile(f.local, to, f.info.Mode().Perm()|0o444)
	if err == nil && n != f.info.Size() {
		err = fmt.Errorf("%s changed while it was copied", f.path)
	}
	rep.Copied++
	rep.CopiedBytes += n
	return err
}

func copyFile(from, to string, mode os.FileMode) (n int64, err error) {
	in, err := os.Open(from)
	if err != nil {
		return 0, err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return 0, err
	}
	n, err = io.Copy(out, in)
	return n, errors.Join(err, out.Chmod(mode), out.Close())
}

// syncFS puts what was written below dir on the disk: a name must not outlive its content.
func syncFS(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.Syncfs(int(f.Fd())); err != nil {
		return fmt.Errorf("sync %s: %w", dir, err)
	}
	return nil
}
