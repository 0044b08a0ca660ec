package state

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"tranche.dev/tranche/internal/tenant"
)

// Change is what a running slice was changed to. Whoever changes it writes the record under the machine's
// lock; the slice's supervisor, which alone writes the limits page, sees it and follows. So the page
// has one writer, that repairs what it left half written or is gone with the slice, and a change whose
// author dies is still made.
type Change struct {
	// Number grows by one with each change.
	Number uint64 `json:"number"`
	// GPUs take the place of Info.GPUs.
	GPUs []GPU `json:"gpus"`
	// Limits are for the limits page.
	Limits []tenant.Device `json:"limits"`
}

// fits is false for what cannot be a change of a slice with these GPUs.
func (c Change) fits(gpus []GPU) bool {
	if c.Number == 0 || len(c.GPUs) != len(gpus) || len(c.Limits) != len(gpus) {
		return false
	}
	for i, g := range c.GPUs {
		d := c.Limits[i]
		if !g.valid() || g.UUID != gpus[i].UUID || d.UUID != g.UUID || d.Cores < 1 || d.Cores > 100 || d.CoresCeiling < d.Cores ||
			d.CoresCeiling > 100 || d.Weight < 0 || d.Weight > 1000 {
			return false
		}
	}
	return true
}

func readChange(dir *os.File, uid int) (Change, error) {
	var c Change
	f, err := openPlain(dir, setFile, uid)
	if err != nil {
		return c, err
	}
	defer f.Close()
	return c, decode(f, &c)
}

// Change records what a slice of the caller's, or for root of anybody, is changed to. The machine's lock
// is held. The number is set here, and returned.
func (r *Registry) Change(s Slice, to Change) (uint64, error) {
	dir, uid, err := r.openSlice(s.ID)
	if err != nil {
		return 0, err
	}
	defer dir.Close()
	before, _ := readChange(dir, uid)
	to.Number = before.Number + 1
	if uid != s.UID || !to.fits(s.Info.GPUs) {
		return 0, errors.New("the slice is another one by now")
	}
	data, err := encode(to)
	if err != nil {
		return 0, err
	}
	return to.Number, replaceIn(dir, setFile, ".set", data, uid)
}

// Pages opens the limits and the ledger of a slice, for who may read them.
func (r *Registry) Pages(s Slice) (*tenant.Limits, *tenant.Ledger, error) {
	dir, _, err := r.openSlice(s.ID)
	if err != nil {
		return nil, nil, err
	}
	defer dir.Close()
	var limits *tenant.Limits
	var ledger *tenant.Ledger
	if fault := tenant.Guard(func() {
		if limits, err = tenant.OpenLimitsIn(dir); err != nil {
			return
		}
		if ledger, err = tenant.OpenLedgerIn(dir); err != nil {
			limits.Close()
		}
	}); fault != nil {
		err = fault
	}
	return limits, ledger, err
}

// Changed returns a change that was recorded since the last call; false if there is none.
func (o *Own) Changed() (Change, bool) {
	var st unix.Stat_t
	if unix.Fstatat(int(o.dir.Fd()), setFile, &st, unix.AT_SYMLINK_NOFOLLOW) != nil || sameFile(st, o.seen) && st.Mtim == o.seen.Mtim {
		return Change{}, false
	}
	o.seen = st
	c, err := readChange(o.dir, os.Getuid())
	return c, err == nil && c.fits(o.Info.GPUs)
}
