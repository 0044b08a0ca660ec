// Package arbiter shares one GPU's time among its tenants: who may have work on it now, until when,
// and who is next. GPU is the pure core: no I/O, no clock, no goroutine; reports of the tenants'
// processes and a time in, grants out. Loop runs cores on the pages of living slices.
//
// Times are nanoseconds of CLOCK_MONOTONIC of the initial time namespace. docs/compute.md has the law.
package arbiter

// Spec is what a tenant may use of the GPU, in hundredths of it.
type Spec struct {
	// Cores is guaranteed, 1 to 100. It is the limit too, unless Ceiling is higher.
	Cores int
	// Ceiling, Cores to 100, may be reached with time that others leave.
	Ceiling int
	// Limited is false for a tenant that asked for no share: it gets what nobody is guaranteed.
	Limited bool
	// Latency class: goes before the others.
	Latency bool
	// Weight divides the time that nobody is guaranteed, 1 to 1000; 0: as Cores.
	Weight int
}

// Process is what a tenant's process says about itself on the GPU (struct tr_slot_dev). It may lie;
// then it hurts its own tenant.
type Process struct {
	Slot         int
	InFlight     int
	Waiting      int
	WaitingSince int64
	Pending      int64 // estimated GPU time of what is in flight
	WorkEnd      int64
	LastEnd      int64
	Longest      int64
	Closed       uint64 // grant in which it will launch nothing more
	First        int64  // when the first work of its newest grant began to run, once known
	GPUTime      uint64 // measured, since the process began
}

// Report is a tenant's: its processes that ever asked for a grant, and the GPU time of all of them
// since the slice began, in ns.
type Report struct {
	Processes []Process
	GPUTime   uint64
}

// Grant is a turn (struct tr_grant).
type Grant struct {
	Seq        uint64
	Slot       int
	Local      bool
	Continues  bool // the process had the turn before
	Coupled    bool // its kernels wait for others across GPUs
	Start, End int64
	Since      int64
	InFlight   int64
	// For how long another process's work was on the GPU too, ever: the turn before was overdue, or its own. Since not 0: it
	// is again, since then.
	Beside, BesideSince int64
}

// Lease is what a tenant is told (struct tr_lease).
type Lease struct {
	Required bool
	Grants   [2]Grant // number Seq at [Seq&1]
	Eligible int64
	// TAT and GPUTime are the core's books of the tenant, from which another arbiter can go on.
	TAT     int64
	GPUTime uint64
	// Wanted and Got are shares of the last second, in hundredths of a hundredth of the GPU.
	Wanted, Got int
	Granted     uint64
}
