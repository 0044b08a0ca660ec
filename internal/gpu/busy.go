package gpu

import "time"

// Busy is how long processes kept one GPU busy over some time, as far as the driver tells.
type Busy struct {
	UUID      string
	Over      time.Duration
	Processes map[int]time.Duration
}

// BusyMeter adds samples of use up. A sample speaks for the time since the one before of the same process,
// and for as much as samples of busy processes are apart at most: where the driver tells less than that,
// less is counted. Pure: no clock.
type BusyMeter struct {
	gpus map[string]*busyGPU
}

type busyGPU struct {
	since  time.Time
	last   map[int]int64 // time of each process's newest sample, us
	period int64         // how far apart they are at least, us; 0: not known yet
	sum    map[int]time.Duration
}

const (
	// periodFirst is taken for the distance of samples until it is known.
	periodFirst = 166_667
	periodMax   = 1_000_000
	periodMin   = 50_000 // closer ones are one: the driver's clock jitters
)

// Add takes a report that was received now.
func (m *BusyMeter) Add(now time.Time, r Report) {
	if m.gpus == nil {
		m.gpus = map[string]*busyGPU{}
	}
	for _, d := range r.Devices {
		g := m.gpus[d.UUID]
		if g == nil {
			g = &busyGPU{since: now, last: map[int]int64{}, sum: map[int]time.Duration{}}
			m.gpus[d.UUID] = g
		}
		for _, s := range d.Samples {
			g.add(s)
		}
	}
}

func (g *busyGPU) add(s Sample) {
	apart := s.At - g.last[s.PID]
	if apart < periodMin {
		return
	}
	g.last[s.PID] = s.At
	if apart <= periodMax && (g.period == 0 || apart < g.period) {
		g.period = apart
	}
	span := min(apart, periodFirst)
	if g.period != 0 {
		span = min(apart, g.period)
	}
	g.sum[s.PID] += time.Duration(span) * time.Microsecond * time.Duration(min(max(s.SM, 0), 100)) / 100
}

// Take returns what was added since the last call, of GPUs that are watched for long enough.
func (m *BusyMeter) Take(now time.Time, enough time.Duration) []Busy {
	var out []Busy
	for uuid, g := range m.gpus {
		over := now.Sub(g.since)
		if over < enough {
			continue
		}
		out = append(out, Busy{UUID: uuid, Over: over, Processes: g.sum})
		g.since, g.sum = now, map[int]time.Duration{}
		for pid, at := range g.last {
			if newest := newestOf(g.last); newest-at > 60*periodMax {
				delete(g.last, pid)
			}
		}
	}
	return out
}

func newestOf(times map[int]int64) int64 {
	var newest int64
	for _, at := range times {
		newest = max(newest, at)
	}
	return newest
}
