// Package bypass finds use of GPUs that no ledger knows: a process in a tenant's container that opened the
// vendor's library by its path, or calls the kernel driver itself. It compares what the driver shows of
// processes with what the ledgers say. Core is pure: no I/O, no clock, no goroutine. Watch runs it on this
// machine, and ends processes if it is told to.
//
// It sees, a while after the fact; it prevents nothing. A tenant can write anything into its own ledger, so what
// counts in the end is the limit in the node's record, which it cannot write.
package bypass

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"tranche.dev/tranche/internal/quantity"
)

// Kind of violation.
type Kind string

const (
	// Unregistered: a process in a tenant's container is on a GPU and in no ledger.
	Unregistered Kind = "unregistered"
	// Memory: a tenant's processes hold more than its ledger says.
	Memory Kind = "memory"
	// Limit: a tenant's processes hold more than it may, whatever its ledger says.
	Limit Kind = "limit"
)

// Config is what a Core needs. The zero value has the defaults.
type Config struct {
	// Patience is how long a process may be on a GPU and in no ledger, as seen at every look; default 5 s. A
	// process registers before it has a context, but its number on this machine is found once a second.
	Patience time.Duration
	// MemoryPatience is the same for memory; default 15 s. The driver and a ledger are not read at one instant.
	MemoryPatience time.Duration
	// Calm is how long a violation must not be seen to be over; default 15 s.
	Calm time.Duration
	// Slack in bytes is what a process may hold beyond what it charged and what was measured of its context, and a
	// tenant beyond its limit; default 1 GiB. Modules and local memory are no allocations, and may be large.
	Slack uint64
}

// Account is what is known of a tenant on one GPU, in bytes.
type Account struct {
	// Charged is what its processes have charged, without what was measured beyond.
	Charged uint64
	// Limit from the node's record; 0: none.
	Limit uint64
}

// Tenant is one that is bound, or what is left of one.
type Tenant struct {
	// Name is that of its directory: the allocation's id, for a former binding with more behind a dot.
	Name string
	// Registered are the processes in its ledger, by their numbers on this machine.
	Registered map[int]bool
	GPUs       map[string]Account // by UUID
}

// Process is a living process on a GPU, by the driver.
type Process struct {
	PID   int
	Start uint64
	// Tenant is the name of the allocation in whose container it runs; empty: in none.
	Tenant string
	// Used in bytes; nil: the driver cannot tell.
	Used *uint64
}

// Input is one look at everything.
type Input struct {
	Now     time.Time
	GPUs    map[string][]Process // by UUID
	Tenants []Tenant
}

// Violation is one that lasts, or has ended.
type Violation struct {
	Kind   Kind
	Tenant string
	GPU    string
	// PID and Start name the process; of Memory and Limit the one that holds most.
	PID   int
	Start uint64
	// Used is what is held, Allowed what the ledger or the limit has room for, in bytes; of Unregistered what
	// the driver shows, if it does, and 0.
	Used, Allowed uint64
	Since         time.Time
}

func (v Violation) String() string {
	switch v.Kind {
	case Unregistered:
		return fmt.Sprintf("process %d uses gpu %s (%s) and never registered: it has loaded a driver library other than the slice's",
			v.PID, v.GPU, quantity.Bytes(v.Used))
	case Memory:
		return fmt.Sprintf("gpu %s: %s held, the ledger says %s; process %d holds most", v.GPU, quantity.Bytes(v.Used), quantity.Bytes(v.Allowed), v.PID)
	default:
		return fmt.Sprintf("gpu %s: %s held, the limit is %s; process %d holds most", v.GPU, quantity.Bytes(v.Used), quantity.Bytes(v.Allowed), v.PID)
	}
}

// Foreign is a process on a GPU that belongs to no tenant.
type Foreign struct {
	GPU  string
	PID  int
	Used uint64 // bytes; 0 where the driver cannot tell
}

// Result is what a look showed.
type Result struct {
	Began, Ended []Violation
	// Lasting are all that are in force, those that began included.
	Lasting []Violation
	// Foreign use, once it has lasted for Patience.
	Foreign []Foreign
}

// Core decides. For one goroutine.
type Core struct {
	config Config
	cases  map[key]*suspicion
}

// key of a case: of Memory and Limit without the process, of foreign use without a tenant and a kind.
type key struct {
	kind        Kind
	tenant, gpu string
	pid         int
	start       uint64
}

// suspicion is something that was seen, and may not last.
type suspicion struct {
	violation Violation
	since     time.Time
	last      time.Time // when it was seen last
	began     bool
}

// New checks the configuration and fills in what is not set.
func New(config Config) (*Core, error) {
	if config.Patience < 0 || config.MemoryPatience < 0 || config.Calm < 0 {
		return nil, errors.New("bypass watch: a time is negative")
	}
	config.Patience = cmp.Or(config.Patience, 5*time.Second)
	config.MemoryPatience = cmp.Or(config.MemoryPatience, 15*time.Second)
	config.Calm = cmp.Or(config.Calm, 15*time.Second)
	config.Slack = cmp.Or(config.Slack, 1<<30)
	return &Core{config: config, cases: map[key]*suspicion{}}, nil
}

// Step takes one look in. Results are sorted.
func (c *Core) Step(in Input) Result {
	tenants := map[string]Tenant{}
	for _, t := range in.Tenants {
		tenants[t.Name] = t
	}
	seen := map[key]Violation{}
	for gpu, processes := range in.GPUs {
		held := map[string][]Process{}
		for _, p := range processes {
			switch t := tenants[p.Tenant]; {
			case p.Tenant == "":
				seen[key{gpu: gpu, pid: p.PID, start: p.Start}] = Violation{GPU: gpu, PID: p.PID, Used: used(p)}
			case !t.Registered[p.PID]:
				seen[key{Unregistered, p.Tenant, gpu, p.PID, p.Start}] = Violation{Kind: Unregistered, Tenant: p.Tenant, GPU: gpu,
					PID: p.PID, Start: p.Start, Used: used(p)}
				fallthrough
			default:
				held[p.Tenant] = append(held[p.Tenant], p)
			}
		}
		for name, processes := range held {
			for _, v := range c.memory(tenants[name], gpu, processes) {
				v.Tenant = name
				seen[key{kind: v.Kind, tenant: name, gpu: gpu}] = v
			}
		}
	}
	return c.judge(in.Now, seen)
}

func used(p Process) uint64 {
	if p.Used == nil {
		return 0
	}
	return *p.Used
}

// memory compares what a tenant's processes hold on a GPU with what they may. Those that are in no ledger are
// reported as such, and count only against the limit.
func (c *Core) memory(t Tenant, gpu string, processes []Process) []Violation {
	var all, registered uint64
	var room uint64
	most := processes[0]
	for _, p := range processes {
		all += used(p)
		if t.Registered[p.PID] {
			registered += used(p)
			room += c.config.Slack
		}
		if used(p) > used(most) {
			most = p
		}
	}
	account := t.GPUs[gpu]
	of := func(kind Kind, used, allowed uint64) Violation {
		return Violation{Kind: kind, GPU: gpu, PID: most.PID, Start: most.Start, Used: used, Allowed: allowed}
	}
	var out []Violation
	if over(registered, account.Charged, room) {
		out = append(out, of(Memory, registered, account.Charged))
	}
	if account.Limit != 0 && over(all, account.Limit, c.config.Slack) {
		out = append(out, of(Limit, all, account.Limit))
	}
	return out
}

// over tells whether used is more than allowed and slack together, which may be more than a number holds.
func over(used, allowed, slack uint64) bool { return used > allowed && used-allowed > slack }

func (c *Core) patience(k Kind) time.Duration {
	if k == Memory || k == Limit {
		return c.config.MemoryPatience
	}
	return c.config.Patience
}

// judge brings the cases up to date with what was seen now.
func (c *Core) judge(now time.Time, seen map[key]Violation) Result {
	var r Result
	for k, v := range seen {
		s := c.cases[k]
		if s == nil {
			s = &suspicion{since: now}
			c.cases[k] = s
		}
		v.Since, s.last = s.since, now
		s.violation = v
		if begins := !s.began && now.Sub(s.since) >= c.patience(k.kind); begins {
			s.began = true
			if k.kind != "" {
				r.Began = append(r.Began, v)
			}
		}
	}
	for k, s := range c.cases {
		_, still := seen[k]
		switch {
		case !still && (!s.began || k.kind == ""):
			delete(c.cases, k)
		case !still && now.Sub(s.last) >= c.config.Calm:
			delete(c.cases, k)
			r.Ended = append(r.Ended, s.violation)
		case s.began && k.kind == "":
			r.Foreign = append(r.Foreign, Foreign{GPU: s.violation.GPU, PID: s.violation.PID, Used: s.violation.Used})
		case s.began:
			r.Lasting = append(r.Lasting, s.violation)
		}
	}
	for _, list := range [][]Violation{r.Began, r.Ended, r.Lasting} {
		slices.SortFunc(list, func(a, b Violation) int {
			return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.PID, b.PID))
		})
	}
	slices.SortFunc(r.Foreign, func(a, b Foreign) int { return cmp.Or(cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.PID, b.PID)) })
	return r
}
