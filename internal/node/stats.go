package node

import (
	"maps"
	"slices"
	"sync"
	"time"

	"tranche.dev/tranche/internal/display"
	"tranche.dev/tranche/internal/node/books"
)

// stats count what kubelet asks and what became of it. Safe for concurrent use.
type stats struct {
	allocate, preferred, start display.Latency

	mu            sync.Mutex
	allocations   map[[3]string]uint64
	preferences   map[[2]string]uint64
	starts        map[[2]string]uint64
	registrations map[[2]string]uint64
	violations    map[[2]string]uint64
	changes       map[[2]string]uint64
	replans       uint64
}

func newStats() *stats {
	return &stats{allocations: map[[3]string]uint64{}, preferences: map[[2]string]uint64{}, starts: map[[2]string]uint64{},
		registrations: map[[2]string]uint64{}, violations: map[[2]string]uint64{}, changes: map[[2]string]uint64{}}
}

func (s *stats) time(l *display.Latency, since time.Time) { l.Observe(time.Since(since)) }

func count[K comparable](s *stats, m map[K]uint64, key K) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m[key]++
}

// result is the label of a call that was refused for a reason, or of one that was not.
func result(reason string) string {
	if reason != "" {
		return "refused"
	}
	return "granted"
}

func (s *stats) allocation(res books.Resource, reason string) {
	count(s, s.allocations, [3]string{res.String(), result(reason), reason})
}

func (s *stats) preference(res books.Resource, err error) {
	reason := ""
	if err != nil {
		reason = "refused"
	}
	count(s, s.preferences, [2]string{res.String(), result(reason)})
}

func (s *stats) started(reason string) { count(s, s.starts, [2]string{result(reason), reason}) }

func (s *stats) registered(resource string, err error) {
	outcome := "registered"
	if err != nil {
		outcome = "failed"
	}
	count(s, s.registrations, [2]string{resource, outcome})
}

func (s *stats) violation(kind, done string) { count(s, s.violations, [2]string{kind, done}) }

func (s *stats) change(reason string) {
	outcome := "changed"
	if reason != "" {
		outcome = "refused"
	}
	count(s, s.changes, [2]string{outcome, reason})
}

func (s *stats) replan() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.replans++
}

func counts2(m map[[2]string]uint64) []display.Count2 {
	var out []display.Count2
	for _, k := range slices.SortedFunc(maps.Keys(m), func(a, b [2]string) int { return slices.Compare(a[:], b[:]) }) {
		out = append(out, display.Count2{Labels: k, N: m[k]})
	}
	return out
}

func (s *stats) counters() display.Counters {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := display.Counters{Preferences: counts2(s.preferences), Starts: counts2(s.starts), Registrations: counts2(s.registrations),
		Violations: counts2(s.violations), LiveChanges: counts2(s.changes)}
	for _, k := range slices.SortedFunc(maps.Keys(s.allocations), func(a, b [3]string) int { return slices.Compare(a[:], b[:]) }) {
		out.Allocations = append(out.Allocations, display.Count3{Labels: k, N: s.allocations[k]})
	}
	if s.replans > 0 {
		out.Replans = []display.Count1{{Label: "not-free", N: s.replans}}
	}
	return out
}
