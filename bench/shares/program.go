package main

// Limiter is what stands between a process and its driver.
type Limiter int

// As enum share_limiter.
const (
	Shipped Limiter = iota
	NoLimiter
	Feedback
)

// Kind of a program, as enum share_kind.
type Kind int

// Kinds.
const (
	Loop Kind = iota
	Requests
	Capture
	Flag
	Collective
	Disguise
)

// Program is what one thread of a process does. Times in ns; Start and Stop from the begin of the run.
// What the fields mean: struct share_program.
type Program struct {
	Kind        Kind
	GPU         int
	Graph       bool
	SyncEvery   int
	Streams     int
	Blocks      int
	Peers       int
	Late        bool
	Units       []int64
	Start, Stop int64
	Host        int64
	On, Off     int64
	Period      int64
	Sigma       float64
}
