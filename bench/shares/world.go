package main

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdlib.h>
#include "world.h"

static const char *w_open(const char *path, const struct share_api **out)
{
	void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (lib == NULL)
		return dlerror();
	const struct share_api *(*get)(void);
	*(void **)&get = dlsym(lib, "share_world");
	if (get == NULL)
		return dlerror();
	*out = get();
	return NULL;
}
typedef const struct share_api *api;
static const char *w_start(api a, const struct share_conf *c) { return a->start(c); }
static int64_t w_now(api a) { return a->now(); }
static int64_t w_run(api a, int64_t until) { return a->run(until); }
static uint32_t w_heard(api a) { return a->heard(); }
static void w_listen(api a, bool on) { a->listen(on); }
static int64_t w_hop(api a) { return a->hop(); }
static int32_t w_tenant(api a, const struct share_limits *l) { return a->tenant(l); }
static void w_set_limits(api a, int32_t t, const struct share_limits *l) { a->set_limits(t, l); }
static int32_t w_process(api a, int32_t t, int32_t limiter) { return a->process(t, limiter); }
static int32_t w_program(api a, int32_t p, const struct share_program *w) { return a->program(p, w); }
static void w_kill(api a, int32_t p) { a->kill(p); }
static void w_reclaim(api a, int32_t p) { a->reclaim(p); }
static int32_t w_reports(api a, int32_t t, int32_t g, struct share_report *out, int32_t max, uint64_t *time)
{
	return a->reports(t, g, out, max, time);
}
static void w_lease_get(api a, int32_t t, int32_t g, struct share_lease *l) { a->lease_get(t, g, l); }
static void w_lease_set(api a, int32_t t, int32_t g, const struct share_lease *l) { a->lease_set(t, g, l); }
static void w_beat(api a, bool alive) { a->beat(alive); }
static void w_usage(api a, int32_t t, int32_t g, struct share_usage *u) { a->usage(t, g, u); }
static int64_t w_busy(api a, int32_t p, int32_t g) { return a->busy(p, g); }
static int64_t w_switched(api a, int32_t g) { return a->switched(g); }
static void w_stats(api a, int32_t p, struct share_stats *s) { a->stats(p, s); }
static void w_stats_reset(api a) { a->stats_reset(); }
static int64_t w_breaches(api a) { return a->breaches(); }
*/
import "C"

import (
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"tranche.dev/tranche/internal/arbiter"
)

// ms and us are in ns of virtual time.
const (
	us    = int64(1000)
	ms    = 1000 * us
	sec   = 1000 * ms
	never = int64(1<<63 - 1)
)

// Machine is what a world is made of. Times in ns.
type Machine struct {
	Seed           uint64
	GPUs           int
	DVFS           bool
	Trace          int // 1: a time line on stderr; 2: with every launch
	Slice, Switch  int64
	Launch         int64
	Wake, WakeTail int64
	Hop, HopTail   int64
	// Threads lose the processor for about Stall, about StallEvery apart; 0: never.
	StallEvery, Stall int64
}

func (m Machine) withDefaults() Machine {
	set := func(v *int64, to int64) {
		if *v == 0 {
			*v = to
		}
	}
	set(&m.Slice, ms)
	set(&m.Switch, 80*us)
	set(&m.Launch, 4*us)
	set(&m.Wake, 30*us)
	set(&m.WakeTail, 20*us)
	set(&m.Hop, 25*us)
	set(&m.HopTail, 15*us)
	m.GPUs = max(m.GPUs, 1)
	return m
}

// World is the machine in virtual time of world.h. One per process of ours, on one OS thread.
type World struct {
	api     C.api
	reports [64]C.struct_share_report
}

// openWorld starts the machine of dir (world.so, process.so). process is the file name of the copy of the
// meter that its processes load.
func openWorld(dir, process string, m Machine) (*World, error) {
	w := &World{}
	path := C.CString(dir + "/world.so")
	defer C.free(unsafe.Pointer(path))
	if why := C.w_open(path, (**C.struct_share_api)(unsafe.Pointer(&w.api))); why != nil {
		return nil, fmt.Errorf("%s (`make shares` builds it)", C.GoString(why))
	}
	so := C.CString(dir + "/" + process)
	defer C.free(unsafe.Pointer(so))
	conf := C.struct_share_conf{seed: C.uint64_t(m.Seed), process: so, gpus: C.int32_t(m.GPUs),
		slice_ns: C.int64_t(m.Slice), switch_ns: C.int64_t(m.Switch), launch_ns: C.int64_t(m.Launch),
		wake_ns: C.int64_t(m.Wake), wake_tail_ns: C.int64_t(m.WakeTail),
		stall_every_ns: C.int64_t(m.StallEvery), stall_ns: C.int64_t(m.Stall), hop_ns: C.int64_t(m.Hop), hop_tail_ns: C.int64_t(m.HopTail), dvfs: flag32(m.DVFS), trace: C.int32_t(m.Trace)}
	if why := C.w_start(w.api, &conf); why != nil {
		return nil, errors.New(C.GoString(why))
	}
	return w, nil
}

func flag32(b bool) C.int32_t {
	if b {
		return 1
	}
	return 0
}

// Now is the virtual time.
func (w *World) Now() int64 { return int64(C.w_now(w.api)) }

// Run lets everybody run until then, or until the arbiter hears a bell; the time that it is.
func (w *World) Run(until int64) int64 { return int64(C.w_run(w.api, C.int64_t(until))) }

// Heard are the tenants whose bells were heard.
func (w *World) Heard() uint32 { return uint32(C.w_heard(w.api)) }

// Listen says whether an arbiter is there to hear bells.
func (w *World) Listen(on bool) { C.w_listen(w.api, C.bool(on)) }

// Hop is how long the arbiter takes to wake up this time.
func (w *World) Hop() int64 { return int64(C.w_hop(w.api)) }

func limits(s arbiter.Spec) C.struct_share_limits {
	return C.struct_share_limits{cores: C.int32_t(s.Cores), ceiling: C.int32_t(s.Ceiling),
		weight: C.int32_t(s.Weight), limited: flag32(s.Limited), latency: flag32(s.Latency)}
}

// Tenant makes one; its number.
func (w *World) Tenant(s arbiter.Spec) int {
	l := limits(s)
	return int(C.w_tenant(w.api, &l))
}

// SetLimits changes what a tenant may use, as its supervisor does.
func (w *World) SetLimits(tenant int, s arbiter.Spec) {
	l := limits(s)
	C.w_set_limits(w.api, C.int32_t(tenant), &l)
}

// Process makes a process of the tenant; its number.
func (w *World) Process(tenant int, l Limiter) int {
	return int(C.w_process(w.api, C.int32_t(tenant), C.int32_t(l)))
}

// Program starts a thread in the process; its number.
func (w *World) Program(process int, p Program) int {
	c := C.struct_share_program{kind: C.int32_t(p.Kind), gpu: C.int32_t(p.GPU), graph: flag32(p.Graph),
		sync_every: C.int32_t(p.SyncEvery), streams: C.int32_t(p.Streams), blocks: C.uint32_t(max(p.Blocks, 1)),
		peers: C.int32_t(p.Peers), late: flag32(p.Late), start_ns: C.int64_t(p.Start), stop_ns: C.int64_t(p.Stop),
		host_ns: C.int64_t(p.Host), on_ns: C.int64_t(p.On), off_ns: C.int64_t(p.Off),
		period_ns: C.int64_t(p.Period), sigma: C.double(p.Sigma), units: C.int32_t(len(p.Units))}
	for i, u := range p.Units {
		c.unit_ns[i] = C.int64_t(u)
	}
	return int(C.w_program(w.api, C.int32_t(process), &c))
}

// Kill ends a process as SIGKILL does; Reclaim is what its supervisor does later.
func (w *World) Kill(process int) { C.w_kill(w.api, C.int32_t(process)) }

// Reclaim gives a dead process's slot back.
func (w *World) Reclaim(process int) { C.w_reclaim(w.api, C.int32_t(process)) }

// Report reads what the tenant's processes say.
func (w *World) Report(tenant, gpu int, r *arbiter.Report) {
	var time C.uint64_t
	n := C.w_reports(w.api, C.int32_t(tenant), C.int32_t(gpu), &w.reports[0], C.int32_t(len(w.reports)), &time)
	r.GPUTime = uint64(time)
	r.Processes = slices.Grow(r.Processes[:0], int(n))
	for _, p := range w.reports[:n] {
		r.Processes = append(r.Processes, arbiter.Process{Slot: int(p.slot), InFlight: int(p.in_flight),
			Waiting: int(p.waiting), WaitingSince: int64(p.waiting_since), Pending: int64(p.pending_ns),
			WorkEnd: int64(p.work_end_ns), LastEnd: int64(p.last_end_ns), Longest: int64(p.longest_ns),
			Closed: uint64(p.closed_seq), First: int64(p.first_ns), GPUTime: uint64(p.gpu_time_ns)})
	}
}

// Bits of struct tr_lease and struct tr_grant.
const (
	leaseRequired  = 1
	grantLocal     = 1
	grantContinues = 2
	grantCoupled   = 4
)

// Lease reads a tenant's lease, for a takeover.
func (w *World) Lease(tenant, gpu int) arbiter.Lease {
	var c C.struct_share_lease
	C.w_lease_get(w.api, C.int32_t(tenant), C.int32_t(gpu), &c)
	l := arbiter.Lease{Required: c.flags&leaseRequired != 0, Eligible: int64(c.eligible_ns), TAT: int64(c.tat),
		GPUTime: uint64(c.gpu_time_ns), Wanted: int(c.wanted), Got: int(c.got), Granted: uint64(c.grants)}
	for i, g := range c.grant {
		l.Grants[i] = arbiter.Grant{Seq: uint64(g.seq), Slot: int(g.slot), Local: g.flags&grantLocal != 0,
			Continues: g.flags&grantContinues != 0, Coupled: g.flags&grantCoupled != 0, Start: int64(g.start_ns), End: int64(g.end_ns),
			Since: int64(g.since_ns), InFlight: int64(g.in_flight_ns), Beside: int64(g.beside_ns), BesideSince: int64(g.beside_since_ns)}
	}
	return l
}

// SetLease writes it and wakes who sleeps on it.
func (w *World) SetLease(tenant, gpu int, l arbiter.Lease) {
	c := C.struct_share_lease{eligible_ns: C.int64_t(l.Eligible), tat: C.int64_t(l.TAT),
		gpu_time_ns: C.uint64_t(l.GPUTime), wanted: C.uint32_t(l.Wanted), got: C.uint32_t(l.Got),
		grants: C.uint64_t(l.Granted)}
	if l.Required {
		c.flags = leaseRequired
	}
	for i, g := range l.Grants {
		d := &c.grant[i]
		d.seq, d.slot = C.uint64_t(g.Seq), C.uint32_t(g.Slot)
		d.start_ns, d.end_ns = C.int64_t(g.Start), C.int64_t(g.End)
		d.since_ns, d.in_flight_ns = C.int64_t(g.Since), C.int64_t(g.InFlight)
		d.beside_ns, d.beside_since_ns = C.int64_t(g.Beside), C.int64_t(g.BesideSince)
		if g.Local {
			d.flags |= grantLocal
		}
		if g.Continues {
			d.flags |= grantContinues
		}
		if g.Coupled {
			d.flags |= grantCoupled
		}
	}
	C.w_lease_set(w.api, C.int32_t(tenant), C.int32_t(gpu), &c)
}

// Beat is the arbiter's sign of life.
func (w *World) Beat() { C.w_beat(w.api, true) }

// Usage is what the ledger says.
func (w *World) Usage(tenant, gpu int) (gpuTime, throttled, launches int64) {
	var u C.struct_share_usage
	C.w_usage(w.api, C.int32_t(tenant), C.int32_t(gpu), &u)
	return int64(u.gpu_time_ns), int64(u.throttled_ns), int64(u.launches)
}

// Busy is the engine's own count for the process on the GPU: the truth.
func (w *World) Busy(process, gpu int) int64 {
	return int64(C.w_busy(w.api, C.int32_t(process), C.int32_t(gpu)))
}

// Switched is the time that the GPU lost in changes of context.
func (w *World) Switched(gpu int) int64 { return int64(C.w_switched(w.api, C.int32_t(gpu))) }

// Stats is what a program saw. Times in ns.
type Stats struct {
	Launches, Errors, Rounds int64
	Longest, Beyond          int64
	Latency                  []int64
}

// Stats reads a program's.
func (w *World) Stats(program int) Stats {
	var c C.struct_share_stats
	C.w_stats(w.api, C.int32_t(program), &c)
	s := Stats{Launches: int64(c.launches), Errors: int64(c.errors), Rounds: int64(c.rounds),
		Longest: int64(c.longest_ns), Beyond: int64(c.beyond_ns)}
	if c.n_latency > 0 {
		s.Latency = slices.Clone(unsafe.Slice((*int64)(unsafe.Pointer(c.latency)), int(c.n_latency)))
	}
	return s
}

// ResetStats forgets maxima and latencies.
func (w *World) ResetStats() { C.w_stats_reset(w.api) }

// Breaches counts calls of the library that a capture forbids.
func (w *World) Breaches() int64 { return int64(C.w_breaches(w.api)) }
