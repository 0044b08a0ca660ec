package allocation

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"tranche.dev/tranche/internal/bypass"
	"tranche.dev/tranche/internal/state"
	"tranche.dev/tranche/internal/tenant"
)

// GPUUse is what an allocation uses of one GPU.
type GPUUse struct {
	UUID string
	// Memory in bytes, as the limit is held against it. Overhead is the part that NVML showed beyond what
	// processes charged, negative where contexts were charged too high; Former the part that an earlier
	// container of the same pod still holds.
	Memory   uint64
	Overhead int64
	Former   uint64
	// Peak is the highest Memory that was seen, several times a second, since the binding or since this
	// process looks.
	Peak uint64
	state.Account
}

// Process is a process that uses an allocation.
type Process struct {
	tenant.Process     // by its own PID namespace
	HostPID        int // by this one; 0: not known yet
	Command        string
	// Memory is what it was charged of each GPU, in bytes, and GPUTimeNs the GPU time, in the order of the
	// allocation's GPUs.
	Memory    []uint64
	GPUTimeNs []uint64
}

// Use is what a bound allocation uses now.
type Use struct {
	GPUs      []GPUUse
	Processes []Process
}

// Use reads an allocation's. An error says that it is not bound, or that the tenant has destroyed its ledger.
func (s *Store) Use(id string) (Use, error) {
	e := s.hold(id, false)
	if e == nil {
		return Use{}, fmt.Errorf("allocation %s: %w", id, ErrUnbound)
	}
	defer e.mu.Unlock()
	if e.pages == nil {
		return Use{}, fmt.Errorf("allocation %s: %w", id, ErrUnbound)
	}
	record, _ := s.Get(id)
	var out Use
	var slots []tenant.SlotInfo
	err := tenant.Guard(func() {
		former := e.formerUse(record.Owner)
		for dev, uuid := range e.pages.gpus {
			out.GPUs = append(out.GPUs, e.pages.use(dev, former[uuid]))
		}
		slots = e.pages.ledger.Slots()
	})
	if err != nil {
		return Use{}, fmt.Errorf("allocation %s of %s: %w", id, record.Owner, err)
	}
	for _, slot := range slots {
		out.Processes = append(out.Processes, s.process(slot, len(e.pages.gpus)))
	}
	return out, nil
}

func (p *pages) use(dev int, former uint64) GPUUse {
	u := p.ledger.Usage(dev)
	p.peak[dev] = max(p.peak[dev], u.Memory)
	return GPUUse{UUID: p.gpus[dev], Memory: u.Memory, Overhead: u.Overhead - int64(former), Former: former, Peak: p.peak[dev],
		Account: state.ReadAccount(p.ledger, p.leases, dev)}
}

func (s *Store) process(slot tenant.SlotInfo, gpus int) Process {
	out := Process{Process: slot.Process}
	for dev := range gpus {
		out.Memory = append(out.Memory, slot.Dev[dev].Charged)
		out.GPUTimeNs = append(out.GPUTimeNs, slot.Dev[dev].GPUTimeNs)
	}
	if host, ok := s.hosts.Find(slot.PIDNS, slot.Process); ok {
		out.HostPID, out.Command = host, command(host)
	}
	return out
}

// command is the kernel's name of a process; whoever reads it may print it.
func command(pid int) string {
	data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return '?'
		}
		return r
	}, strings.ToValidUTF8(strings.TrimSuffix(string(data), "\n"), "?"))
}

// formerUse is what earlier containers of the owner's pod still hold, by GPU; none of a pod that is not known.
func (e *entry) formerUse(owner Owner) map[string]uint64 {
	out := map[string]uint64{}
	for _, f := range e.former {
		if owner.UID == "" || f.record.Owner.UID != owner.UID {
			continue
		}
		_ = tenant.Guard(func() {
			for dev, uuid := range f.pages.gpus {
				out[uuid] += min(f.pages.ledger.Usage(dev).Memory, memoryMax)
			}
		})
	}
	return out
}

// chargeFormer adds to a binding what earlier containers of its pod hold, as the ledger's overhead. A former
// ledger that was destroyed adds nothing.
func (e *entry) chargeFormer(owner Owner) {
	_ = tenant.Guard(func() {
		former := e.formerUse(owner)
		for dev, uuid := range e.pages.gpus {
			e.pages.ledger.SetOverhead(dev, e.pages.own[dev]+int64(former[uuid]))
		}
	})
}

// Leftover is an earlier binding of which processes live.
type Leftover struct {
	Dir string
	// Record is empty but for the ID if it could not be read.
	Record Record
	// Memory in bytes by GPU.
	Memory map[string]uint64
}

// Leftovers are all that there are: of allocations that were removed or have been bound anew.
func (s *Store) Leftovers() []Leftover {
	var out []Leftover
	for _, e := range s.all() {
		e.mu.Lock()
		for _, f := range e.former {
			l := Leftover{Dir: f.dir, Record: f.record, Memory: map[string]uint64{}}
			_ = tenant.Guard(func() {
				for dev, uuid := range f.pages.gpus {
					l.Memory[uuid] = f.pages.ledger.Usage(dev).Memory
				}
			})
			out = append(out, l)
		}
		e.mu.Unlock()
	}
	return out
}

// dropFormer removes former bindings of which no process lives any more.
func (e *entry) dropFormer() {
	e.former = slices.DeleteFunc(e.former, func(f *former) bool {
		_ = tenant.Guard(func() { f.pages.ledger.Reclaim() })
		if f.pages.inUse() {
			return false
		}
		f.pages.close()
		_ = os.RemoveAll(f.dir)
		return true
	})
}

// Tenants are all bindings as the bypass watch sees them, former ones included.
func (s *Store) Tenants() []bypass.Tenant {
	var out []bypass.Tenant
	for _, e := range s.all() {
		e.mu.Lock()
		if record, _ := s.Get(e.id); e.pages != nil {
			out = append(out, e.pages.tenant(e.id, record.GPUs))
		}
		for _, f := range e.former {
			out = append(out, f.pages.tenant(filepath.Base(f.dir), f.record.GPUs))
		}
		e.mu.Unlock()
	}
	return out
}

// tenant reads the ledger; of one that was destroyed nobody is registered.
func (p *pages) tenant(name string, gpus []GPU) bypass.Tenant {
	t := bypass.Tenant{Name: name, Registered: map[int]bool{}, GPUs: map[string]bypass.Account{}}
	_ = tenant.Guard(func() {
		for _, slot := range p.ledger.Slots() {
			if host, ok := p.ledger.HostOf(slot); ok {
				t.Registered[host] = true
			}
		}
		for dev, g := range gpus {
			a := bypass.Account{Charged: p.ledger.Usage(dev).Charged}
			if g.MemoryLimited {
				a.Limit = g.Memory
			}
			t.GPUs[g.UUID] = a
		}
	})
	return t
}
