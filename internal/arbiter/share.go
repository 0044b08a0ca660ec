package arbiter

// share keeps what a tenant wanted and got over the last second, for people.
type share struct {
	begun      int64
	used, want int64
	wanted     int
	got        int
}

const shareOver = 1000 * ms

// add counts dt of time, in which the tenant had demand or not and used ns of the GPU. True when a
// second is full and the figures changed.
func (s *share) add(now, dt, used int64, demand bool) bool {
	if s.begun == 0 {
		s.begun = now
	}
	s.used += used
	if demand {
		s.want += dt
	}
	over := now - s.begun
	if over < shareOver {
		return false
	}
	wanted, got := hundredths(s.want, over), hundredths(s.used, over)
	changed := wanted != s.wanted || got != s.got
	*s = share{begun: now, wanted: wanted, got: got}
	return changed
}

func hundredths(part, whole int64) int { return int(min(part, whole) * 10000 / whole) }
