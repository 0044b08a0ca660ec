package gpu

import (
	"testing"
	"time"
)

// Samples of a driver with this period, of a process that is busy for the given parts of it; the meter
// is asked at the end.
func TestBusyMeter(t *testing.T) {
	start := time.Unix(1000, 0)
	for name, c := range map[string]struct {
		every   time.Duration // the driver's period
		percent []int         // in turn; 0: no sample
		over    time.Duration
		want    time.Duration
	}{
		"always half busy":             {time.Second / 6, []int{50}, 6 * time.Second, 3 * time.Second},
		"a slow driver":                {time.Second, []int{80}, 10 * time.Second, 8 * time.Second},
		"busy for every second sample": {time.Second / 6, []int{60, 60, 60, 60, 0, 0, 0, 0}, 8 * time.Second, 2400 * time.Millisecond},
		"nonsense is bounded":          {time.Second / 6, []int{1000}, 6 * time.Second, 6 * time.Second},
		"none":                         {time.Second / 6, []int{0}, 6 * time.Second, 0},
	} {
		var m BusyMeter
		i := 0
		m.Add(start, Report{Devices: []Device{{UUID: "GPU-1"}}})
		for at := c.every; at <= c.over; at += c.every {
			d := Device{UUID: "GPU-1"}
			if sm := c.percent[i%len(c.percent)]; sm > 0 {
				// Told twice, with another time.
				d.Samples = []Sample{{PID: 7, SM: sm, At: start.Add(at).UnixMicro()}, {PID: 7, SM: sm, At: start.Add(at).UnixMicro() + 1}}
			}
			m.Add(start.Add(at), Report{Devices: []Device{d, {UUID: "GPU-2"}}})
			i++
		}
		got := m.Take(start.Add(c.over), 5*time.Second)
		if len(got) == 0 || got[0].UUID != "GPU-1" && len(got) == 1 {
			t.Errorf("%s: %+v", name, got)
			continue
		}
		for _, b := range got {
			if b.UUID != "GPU-1" {
				continue
			}
			if sum := b.Processes[7]; b.Over != c.over || sum < c.want*9/10 || sum > c.want*21/20 {
				t.Errorf("%s: %v busy in %v, want about %v", name, sum, b.Over, c.want)
			}
		}
		if again := m.Take(start.Add(c.over), time.Second); len(again) != 0 {
			t.Errorf("%s: taken twice: %+v", name, again)
		}
	}
}

func TestWatchUse(t *testing.T) {
	n := probe(t, `test "$2 $3" = "use 100" && echo '{"devices":[{"uuid":"GPU-1","samples":[{"pid":3,"sm":40,"at":5}]},{"uuid":"GPU-2","samples":null}]}'; exit 0`)
	var seen []Device
	if err := n.WatchUse(t.Context(), 100*time.Millisecond, func(r Report) { seen = r.Devices }); err != nil {
		t.Fatal(err)
	}
	if len(seen) != 2 || len(seen[0].Samples) != 1 || seen[0].Samples[0] != (Sample{PID: 3, SM: 40, At: 5}) || seen[1].Samples != nil {
		t.Errorf("%+v", seen)
	}
}
