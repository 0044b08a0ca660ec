package state

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"tranche.dev/tranche/internal/tenant"
)

// Own is a slice of the calling process: it holds the lock that keeps the reservation valid.
type Own struct {
	Slice
	lock *os.File
	last string
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
	o := &Own{Slice: Slice{ID: id, Dir: filepath.Join(r.Root, id), Info: info, UID: os.Getuid(), Mine: true, Alive: true}}
	err := o.write(limits)
	if err != nil {
		o.Remove()
		return nil, err
	}
	return o, nil
}

func (o *Own) write(limits []tenant.Device) error {
	if err := os.Mkdir(o.Dir, 0o755); err != nil {
		return err
	}
	if err := os.Chmod(o.Dir, 0o755); err != nil {
		return err
	}
	page, err := tenant.CreateLimits(o.Dir, o.Info.Name, limits)
	if err != nil {
		return err
	}
	page.Close()
	if err := tenant.CreateLedger(o.Dir); err != nil {
		return err
	}
	data, err := json.Marshal(o.Info)
	if err != nil {
		return err
	}
	o.lock, err = os.OpenFile(filepath.Join(o.Dir, infoFile), os.O_RDWR|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o644)
	if err != nil {
		return err
	}
	if err := o.lock.Chmod(0o644); err != nil {
		return err
	}
	if err := unix.FcntlFlock(o.lock.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Len: 1}); err != nil {
		return err
	}
	_, err = o.lock.Write(data)
	return err
}

// SetUse publishes who runs; equal content is not written again.
func (o *Own) SetUse(u Use) {
	data, err := json.Marshal(u)
	if err != nil || string(data) == o.last {
		return
	}
	tmp := filepath.Join(o.Dir, ".use")
	if os.WriteFile(tmp, data, 0o644) == nil && os.Chmod(tmp, 0o644) == nil && os.Rename(tmp, filepath.Join(o.Dir, useFile)) == nil {
		o.last = string(data)
	}
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
	o.remove()
}
