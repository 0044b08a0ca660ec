package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// tranche is a command of the programs under test, with this bench's own state.
func (b *Bench) tranche(args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(b.Bin, "tranche"), args...)
	cmd.Env = append(os.Environ(), "TRANCHE_STATE_DIR="+b.stateDir())
	return cmd
}

// set changes the share of a running tenant.
func (b *Bench) set(name string, cores int) error {
	args := append([]string{"set", name, "--cores", fmt.Sprint(cores)}, b.machine.WhichFlags()...)
	if out, err := b.tranche(args...).CombinedOutput(); err != nil {
		return fmt.Errorf("tranche set %s: %w: %s", name, err, out)
	}
	return nil
}

// Arbiter is what `tranche ps` says about it: how long it took from its waking up to a turn given, and from a
// process's asking for one where it was given at once.
type Arbiter struct {
	Handovers  uint64 `json:"handovers"`
	P50        int64  `json:"handover_p50_ns"`
	P99        int64  `json:"handover_p99_ns"`
	Requests   uint64 `json:"requests"`
	RequestP50 int64  `json:"request_p50_ns"`
	RequestP99 int64  `json:"request_p99_ns"`
}

// asked is what the arbiter says now; zero where there is none.
func (b *Bench) asked() (a Arbiter) {
	out, err := b.tranche(append([]string{"ps", "-o", "json"}, b.machine.WhichFlags()...)...).Output()
	var rows []struct {
		Arbiter *Arbiter `json:"arbiter"`
	}
	if err != nil || json.Unmarshal(out, &rows) != nil {
		return a
	}
	for _, r := range rows {
		if r.Arbiter != nil && r.Arbiter.Handovers > a.Handovers {
			a = *r.Arbiter
		}
	}
	return a
}

// Of struct tr_leases, the second page of a slice's limits file (include/tranche_abi.h).
const (
	leasesAt    = 4096
	leasesMagic = 0x53455341454c5254
)

// arbiterOf reads which process arbitrates, by one slice's leases; 0: none.
func arbiterOf(limits string) int {
	f, err := os.Open(limits)
	if err != nil {
		return 0
	}
	defer f.Close()
	var head [24]byte // magic, beat, pid
	if _, err := f.ReadAt(head[:], leasesAt); err != nil || binary.LittleEndian.Uint64(head[:]) != leasesMagic {
		return 0
	}
	if binary.LittleEndian.Uint64(head[8:]) == 0 {
		return 0
	}
	return int(binary.LittleEndian.Uint32(head[16:]))
}

// arbiter is the process that arbitrates, by the slices of this bench; 0: none. Where slices name
// different ones, one that is alive.
func (b *Bench) arbiter() int {
	found := 0
	_ = filepath.WalkDir(b.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.Name() != "limits" {
			return nil
		}
		if pid := arbiterOf(path); pid != 0 && alive(pid) {
			found = pid
		}
		return nil
	})
	return found
}

// takeover waits until another process than the one that died arbitrates: ms.
func (b *Bench) takeover(dead int) float64 {
	begin := time.Now()
	for time.Since(begin) < 2*time.Second {
		if pid := b.arbiter(); pid != 0 && pid != dead {
			return float64(time.Since(begin).Microseconds()) / 1000
		}
		time.Sleep(time.Millisecond)
	}
	return 1e9
}
