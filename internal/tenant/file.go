package tenant

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// place is a slice directory: a path, or an open directory, which nobody can exchange for another.
type place struct {
	fd   int
	path string // relative to fd
	name string // for messages
}

func at(dir string) place   { return place{fd: unix.AT_FDCWD, path: dir, name: dir} }
func in(dir *os.File) place { return place{fd: int(dir.Fd()), path: ".", name: dir.Name()} }

// open opens a file of the directory; a link is not followed, a pipe not waited on.
func (p place) open(file string, flags int, mode uint32) (*os.File, error) {
	name := filepath.Join(p.name, file)
	for {
		fd, err := unix.Openat(p.fd, filepath.Join(p.path, file), flags|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, mode)
		if err == nil {
			return os.NewFile(uintptr(fd), name), nil
		}
		if err != unix.EINTR {
			return nil, &os.PathError{Op: "open", Path: name, Err: err}
		}
	}
}

// createMapped makes a file of exactly size bytes, readable and writable by its owner only, and
// maps it shared.
func createMapped(dir place, file string, size int) ([]byte, error) {
	f, err := dir.open(file, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := f.Chmod(0o600); err != nil {
		return nil, err
	}
	// Allocated, not sparse: a full file system is an error here, not a SIGBUS in the tenant.
	if err := unix.Fallocate(int(f.Fd()), 0, 0, int64(size)); err != nil {
		return nil, fmt.Errorf("%s: no room for %d bytes: %w", f.Name(), size, err)
	}
	return unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
}

// openMapped maps an existing regular file of at least size bytes. The file is returned open.
func openMapped(dir place, file string, size int, write bool) ([]byte, *os.File, error) {
	mode, prot := unix.O_RDONLY, unix.PROT_READ
	if write {
		mode, prot = unix.O_RDWR, unix.PROT_READ|unix.PROT_WRITE
	}
	f, err := dir.open(file, mode, 0)
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	if err == nil && (!info.Mode().IsRegular() || info.Size() < int64(size)) {
		err = fmt.Errorf("%s is damaged: not a file of %d bytes", f.Name(), size)
	}
	var mem []byte
	if err == nil {
		mem, err = unix.Mmap(int(f.Fd()), 0, size, prot, unix.MAP_SHARED)
	}
	if err != nil {
		_ = f.Close()
		return nil, nil, err
	}
	return mem, f, nil
}
