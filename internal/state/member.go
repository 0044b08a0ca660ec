package state

import (
	"errors"
	"os"
)

// Errors of OpenMember.
var (
	// ErrNotYet: not a slice; it may be in the making.
	ErrNotYet = errors.New("not a slice")
	// ErrNoMember: not one that the caller's arbiter serves.
	ErrNoMember = errors.New("not served")
)

// IDs lists what is named as a slice: slices, what is to become one, and what is left of others.
func (r *Registry) IDs() ([]string, error) { return r.names() }

// OpenMember opens a living slice that the caller's arbiter serves: its own, root's arbiter serves all.
// A slice within another one takes part through that one. The caller closes the directory.
func (r *Registry) OpenMember(id string) (Slice, *os.File, error) {
	s, ok := r.read(id)
	switch {
	case !s.Mine && os.Getuid() != 0:
		return s, nil, ErrNoMember
	case !ok:
		return s, nil, ErrNotYet
	case s.Info.Parent != "" || !s.Alive:
		return s, nil, ErrNoMember
	}
	dir, uid, err := r.openSlice(id)
	if err == nil && uid != s.UID {
		_ = dir.Close()
		err = ErrNoMember
	}
	return s, dir, err
}

// Get reads one slice; false when there is none of this id.
func (r *Registry) Get(id string) (Slice, bool) { return r.read(id) }

// Alive is true while somebody can use the slice.
func (r *Registry) Alive(id string) bool {
	s, ok := r.read(id)
	return ok && s.Alive
}
