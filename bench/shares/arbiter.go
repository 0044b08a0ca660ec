package main

import (
	"math"

	"tranche.dev/tranche/internal/arbiter"
)

// served stands for the arbiter's process: the shipped cores, one per GPU, stepped as its loop does when a
// bell is heard or a time has come.
type served struct {
	world *World
	cores []*arbiter.GPU
	wake  []int64
	beat  int64
	steps int64
	// suspect is told of processes that hold their turn for suspiciously long.
	suspect func(tenant, slot int)
}

const (
	beatEvery = 20 * ms
	stepsMax  = 8
)

// serve starts an arbiter; it takes over what the pages say.
func serve(w *World, gpus int, members []*member) *served {
	s := &served{world: w, cores: make([]*arbiter.GPU, gpus), wake: make([]int64, gpus)}
	w.Listen(true)
	links := &arbiter.Links{}
	for g := range s.cores {
		s.cores[g] = arbiter.New(arbiter.Config{Links: links})
		for _, m := range members {
			if m.number >= 0 && !m.gone {
				s.cores[g].Join(uint64(m.number), m.spec, w.Lease(m.number, g), w.Now())
			}
		}
	}
	s.step()
	return s
}

func (s *served) join(tenant int, spec arbiter.Spec) {
	for g, core := range s.cores {
		core.Join(uint64(tenant), spec, s.world.Lease(tenant, g), s.world.Now())
	}
	s.step()
}

func (s *served) set(tenant int, spec arbiter.Spec) {
	for _, core := range s.cores {
		core.Set(uint64(tenant), spec)
	}
	s.step()
}

func (s *served) leave(tenant int) {
	for _, core := range s.cores {
		core.Leave(uint64(tenant), s.world.Now())
	}
	s.step()
}

// next is when the arbiter does something by itself.
func (s *served) next() int64 {
	at := s.beat + beatEvery
	for _, w := range s.wake {
		at = min(at, w)
	}
	return at
}

// run is called when the time of next has come or a bell was heard.
func (s *served) run() {
	now := s.world.Now()
	if now >= s.beat+beatEvery {
		s.world.Beat()
		s.beat = now
	}
	if s.world.Heard() != 0 {
		s.step()
		return
	}
	for g := range s.cores {
		if now >= s.wake[g] {
			s.stepGPU(g)
		}
	}
}

func (s *served) step() {
	s.world.Beat()
	s.beat = s.world.Now()
	for g := range s.cores {
		s.stepGPU(g)
	}
}

func (s *served) stepGPU(g int) {
	w, core := s.world, s.cores[g]
	wake, again := int64(math.MaxInt64), true
	for n := 0; again && n < stepsMax; n++ {
		s.steps++
		wake, again = core.Step(w.Now(), func(id uint64, r *arbiter.Report) { w.Report(int(id), g, r) })
		core.Changed(func(id uint64, l arbiter.Lease) { w.SetLease(int(id), g, l) })
	}
	if s.suspect != nil {
		core.Stuck(func(id uint64, slot int) { s.suspect(int(id), slot) })
	}
	if again {
		wake = w.Now()
	}
	if wake != math.MaxInt64 {
		wake = max(wake, w.Now()) + w.Hop()
	}
	s.wake[g] = wake
}
