package allocation

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"tranche.dev/tranche/internal/supervise"
	"tranche.dev/tranche/internal/tenant"
)

// pages are the mapped files of a binding. Of a former one only the ledger is used.
type pages struct {
	gpus   []string // UUIDs, as the ledger counts them
	ledger *tenant.Ledger
	limits *tenant.Limits // nil for a former binding
	leases *tenant.Leases

	meter  *supervise.Meter
	peak   []uint64
	own    []int64 // overhead of its own processes, without what former ones hold
	claims uint32  // of slots, at the last look
	looks  int
	busy   bool // a process was there at the last look
}

// build makes a binding's directory, readable by all, and its ledger writable by all: the container's
// processes may have any user, and nothing but the ledger is mounted to be written.
func build(dir string, record Record) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	limits, err := tenant.CreateLimits(dir, record.Owner.String(), devices(record.GPUs))
	if err != nil {
		return err
	}
	limits.Close()
	if err := tenant.CreateLedger(dir); err != nil {
		return err
	}
	for file, mode := range map[string]os.FileMode{"": 0o755, tenant.FileLimits: 0o644, tenant.FileLedger: 0o666} {
		if err := os.Chmod(filepath.Join(dir, file), mode); err != nil {
			return err
		}
	}
	return writeRecord(dir, record)
}

func uuids(gpus []GPU) []string {
	out := make([]string, len(gpus))
	for i, g := range gpus {
		out[i] = g.UUID
	}
	return out
}

func openLedger(dir string, gpus []GPU, hosts *tenant.Hosts) (*pages, error) {
	ledger, err := tenant.OpenLedger(dir)
	if err != nil {
		return nil, err
	}
	ledger.SetHosts(hosts)
	return &pages{gpus: uuids(gpus), ledger: ledger, meter: supervise.NewMeter(),
		peak: make([]uint64, len(gpus)), own: make([]int64, len(gpus))}, nil
}

func openPages(dir string, gpus []GPU, hosts *tenant.Hosts) (*pages, error) {
	p, err := openLedger(dir, gpus, hosts)
	if err != nil {
		return nil, err
	}
	d, err := os.Open(dir)
	if err == nil {
		defer d.Close()
		p.limits, err = tenant.OpenLimitsWriterIn(d)
	}
	if err == nil {
		p.leases, err = tenant.OpenLeasesIn(d)
	}
	if err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

// verify opens a new binding and compares what is there with what was asked.
func verify(dir string, record Record, hosts *tenant.Hosts) (*pages, error) {
	p, err := openPages(dir, record.GPUs, hosts)
	if err != nil {
		return nil, err
	}
	written, err := readRecord(dir)
	if err == nil && written.Serial != record.Serial {
		err = fmt.Errorf("%s: binding %d is in place, not %d", dir, written.Serial, record.Serial)
	}
	var found []tenant.Device
	if err == nil {
		found, err = p.limits.Devices()
	}
	if err == nil && !slices.Equal(found, devices(record.GPUs)) {
		err = fmt.Errorf("%s: the limits page reads %+v, not %+v", dir, found, devices(record.GPUs))
	}
	if err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

// follow makes the limits page say what the record does, and tells the arbiter if it did not. A page that
// a writer left half written is mended.
func (p *pages) follow(record Record) error {
	var err error
	fault := tenant.Guard(func() {
		found, unreadable := p.limits.Devices()
		if unreadable == nil && slices.Equal(found, devices(record.GPUs)) {
			return
		}
		if err = p.limits.Set(devices(record.GPUs)); err == nil {
			p.ledger.Ring()
		}
	})
	if fault != nil {
		return fault
	}
	return err
}

// inUse is true while a process of the ledger lives. Of a ledger that its tenant has destroyed nothing can be
// counted any more.
func (p *pages) inUse() bool {
	return tenant.Guard(func() { p.ledger.Slots() }) == nil && p.ledger.InUse()
}

func (p *pages) close() {
	p.ledger.Close()
	if p.limits != nil {
		p.limits.Close()
	}
	if p.leases != nil {
		p.leases.Close()
	}
}
