package state

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"tranche.dev/tranche/internal/tenant"
)

// Own is a slice of the calling process: it holds the lock that keeps the reservation valid.
type Own struct {
	Slice
	registry *Registry
	dir      *os.File
	lock     *os.File
	last     string
	seen     unix.Stat_t // the record of the last change that was taken
}

// NewID returns a name for a slice directory.
func NewID() string {
	var b [8]byte
	_, _ = rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// Create records a slice. The machine's lock is held, and what info asks for has been found free.
func (r *Registry) Create(id string, info Info, limits []tenant.Device) (*Own, error) {
	info.Version, info.PIDNS, info.Leader = version, tenant.PIDNamespace(), tenant.Self()
	info.Command = shorten(info.Command)
	info.Name = strings.ToValidUTF8(info.Name[:min(len(info.Name), nameMax)], "")
	o := &Own{Slice: Slice{ID: id, Dir: filepath.Join(r.Root, id), Info: info, UID: os.Getuid(), Mine: true, Alive: true}, registry: r}
	err := o.write(limits)
	if err != nil {
		o.Remove()
		return nil, err
	}
	return o, nil
}

// Directory is the slice's, open. Its path may mean another one by now.
func (o *Own) Directory() *os.File { return o.dir }

func (o *Own) write(limits []tenant.Device) error {
	if err := o.makeDirectory(); err != nil {
		return err
	}
	page, err := tenant.CreateLimitsIn(o.dir, o.Info.Name, limits)
	if err != nil {
		return err
	}
	page.Close()
	if err := tenant.CreateLedgerIn(o.dir); err != nil {
		return err
	}
	data, err := encode(o.Info)
	if err != nil {
		return err
	}
	if o.lock, err = createIn(o.dir, infoFile); err != nil {
		return err
	}
	if err := unix.FcntlFlock(o.lock.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Len: 1}); err != nil {
		return err
	}
	_, err = o.lock.Write(data)
	return err
}

// makeDirectory makes the directory and keeps it open: a fresh one of ours, whatever the owner of
// the registry's directory did meanwhile.
func (o *Own) makeDirectory() error {
	root, err := o.registry.directory()
	if err != nil {
		return err
	}
	if err := unix.Mkdirat(int(root.Fd()), o.ID, 0o700); err != nil {
		return &os.PathError{Op: "mkdir", Path: o.Dir, Err: err}
	}
	dir, uid, err := o.registry.openSlice(o.ID)
	if err != nil {
		return err
	}
	if uid != os.Getuid() {
		_ = dir.Close()
		return fmt.Errorf("%s was exchanged by the owner of %s", o.Dir, o.registry.Root)
	}
	o.dir = dir
	return dir.Chmod(0o755)
}

// createIn makes a file of a slice that all can read.
func createIn(dir *os.File, name string) (*os.File, error) {
	f, err := openIn(dir, name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL, 0o644)
	if err != nil {
		return nil, err
	}
	if err := f.Chmod(0o644); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// encode refuses what readers would.
func encode(v any) ([]byte, error) {
	var buf bytes.Buffer
	e := json.NewEncoder(&buf)
	e.SetEscapeHTML(false)
	err := e.Encode(v)
	if err == nil && buf.Len() > fileMax {
		err = fmt.Errorf("a record of %d bytes, at most %d can be", buf.Len(), fileMax)
	}
	return buf.Bytes(), err
}

// SetUse publishes who runs; equal content is not written again.
func (o *Own) SetUse(u Use) {
	data, err := encode(u)
	if err != nil || string(data) == o.last {
		return
	}
	if o.replace(useFile, data) == nil {
		o.last = string(data)
	}
}

// replace puts a file in place at once.
func (o *Own) replace(name string, data []byte) error {
	return replaceIn(o.dir, name, ".new", data, os.Getuid())
}

// replaceIn puts a file of uid's in place at once; tmp is its name until then.
func replaceIn(dir *os.File, name, tmp string, data []byte, uid int) error {
	fd := int(dir.Fd())
	if err := unix.Unlinkat(fd, tmp, 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := createIn(dir, tmp)
	if err != nil {
		return err
	}
	if uid != os.Getuid() {
		err = f.Chown(uid, -1)
	}
	if err == nil {
		_, err = f.Write(data)
	}
	if e := f.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = unix.Renameat(fd, tmp, fd, name)
	}
	return err
}

// Release ends the supervision: the reservation stays while the processes in use.json live.
func (o *Own) Release() {
	if o.lock != nil {
		_ = o.lock.Close()
	}
}

// Remove takes the slice out of the registry, with its libraries.
func (o *Own) Remove() {
	o.Release()
	if o.dir == nil {
		return
	}
	defer o.dir.Close()
	if o.inPlace() {
		o.registry.remove(o.Slice)
		return
	}
	removeLibraries(o.Slice)
	// Renamed by the owner of the registry: what is in its place is not ours to remove.
	for _, name := range []string{infoFile, useFile, setFile, tenant.FileLimits, tenant.FileLedger} {
		_ = unix.Unlinkat(int(o.dir.Fd()), name, 0)
	}
}

func (o *Own) inPlace() bool {
	now, _, err := o.registry.openSlice(o.ID)
	if err != nil {
		return false
	}
	defer now.Close()
	a, errA := statOf(now)
	b, errB := statOf(o.dir)
	return errA == nil && errB == nil && sameFile(a, b)
}
