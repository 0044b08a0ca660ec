package gpu

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"tranche.dev/tranche/internal/topology"
)

// fakeDriver is a driver whose GPUs a test changes.
type fakeDriver struct {
	mu      sync.Mutex
	version string
	open    error
	scan    error
	devices []Device
	feeds   map[int]chan Health
	began   int
	hold    chan struct{} // when set, new feeds say nothing until it is closed
}

func (d *fakeDriver) Inventory(context.Context) (Report, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return Report{DriverVersion: d.version, CUDAVersion: 12040, Devices: append([]Device{}, d.devices...)}, d.scan
}

func (d *fakeDriver) WatchHealth(ctx context.Context, every time.Duration, f func(Health)) error {
	d.mu.Lock()
	in, id, hold := make(chan Health), d.began, d.hold
	d.feeds[id] = in
	d.began++
	d.mu.Unlock()
	defer func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.feeds, id)
	}()
	if hold != nil {
		<-hold
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		d.mu.Lock()
		h, dead := Health{Devices: append([]Device{}, d.devices...)}, d.scan
		d.mu.Unlock()
		if dead != nil {
			return dead
		}
		f(h)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case h, ok := <-in:
			if !ok {
				return errors.New("probe killed")
			}
			f(h)
		case <-tick.C:
		}
	}
}

func (d *fakeDriver) set(change func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	change()
}

func (d *fakeDriver) xid(uuid string, n int) {
	d.mu.Lock()
	var feeds []chan Health
	for _, f := range d.feeds {
		feeds = append(feeds, f)
	}
	d.mu.Unlock()
	for _, f := range feeds {
		f <- Health{XID: &XID{UUID: uuid, XID: n}}
	}
}

// a100 is one of two GPUs that are joined by n lanes and a bridge.
func a100(index int, energy uint64) Device {
	d := Device{Index: index, Minor: index, UUID: fmt.Sprintf("GPU-%d", index), Name: "A100", PCI: fmt.Sprintf("0:%d", index),
		MemoryTotal: 80, MemoryReserved: 1, NVLinkMBps: 25000, Ancestors: []int{20, 20}}
	d.Ancestors[index] = -1
	d.NVLinks = []NVLink{{"gpu", fmt.Sprintf("0:%d", 1-index)}, {"switch", "9"}}
	d.Energy = &energy
	return d
}

func (d *fakeDriver) watch(t *testing.T, config WatcherConfig) (next func(after time.Duration) string) {
	config.Open = func() (Prober, error) {
		d.mu.Lock()
		defer d.mu.Unlock()
		return d, d.open
	}
	w, err := NewWatcher(config)
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	var told []string
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	done.Go(func() {
		w.Watch(ctx, func(inv Inventory) {
			text := fmt.Sprintf("%g", time.Since(start).Seconds())
			if inv.Problem.Reason != "" {
				text += " " + string(inv.Problem.Reason)
			}
			for _, g := range inv.GPUs {
				state := "healthy"
				if !g.State.Healthy {
					state = "unhealthy (" + g.State.Reason + ")"
				}
				text += fmt.Sprintf(" | %s %s", g.UUID, state)
			}
			for _, u := range inv.Unidentified {
				text += fmt.Sprintf(" | gpu %d: %s", u.Index, u.Error)
			}
			d.mu.Lock()
			defer d.mu.Unlock()
			told = append(told, text)
		})
	})
	t.Cleanup(func() { cancel(); done.Wait() })
	return func(after time.Duration) string {
		time.Sleep(after)
		synctest.Wait()
		d.mu.Lock()
		defer d.mu.Unlock()
		defer func() { told = nil }()
		return strings.Join(told, "\n")
	}
}

func expect(t *testing.T, what, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("%s:\n%s\nwant\n%s", what, got, want)
	}
}

// Times are those of the bubble's clock: seconds since the start, exact.
func TestWatcherHealth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &fakeDriver{version: "550", devices: []Device{a100(0, 1000), a100(1, 1000)}, feeds: map[int]chan Health{}}
		next := d.watch(t, WatcherConfig{})
		expect(t, "start", next(30*time.Second), "0 | GPU-0 healthy | GPU-1 healthy")
		d.xid("GPU-0", 31)
		expect(t, "a program's error", next(10*time.Second), "")
		d.xid("GPU-0", 48)
		expect(t, "a fault", next(60*time.Second), "40 | GPU-0 unhealthy (XID 48) | GPU-1 healthy")
		d.set(func() { d.devices[0] = a100(0, 10) })
		expect(t, "reset", next(60*time.Second), "110 | GPU-0 healthy | GPU-1 healthy")
		d.set(func() { d.devices[1] = Device{Index: 1, UUID: "GPU-1", Error: "GPU is lost", Code: 15} })
		expect(t, "lost", next(10*time.Second), "165 | GPU-0 healthy | GPU-1 unhealthy (GPU is lost)")
		// A process that asks for the first time cannot be told the UUID.
		d.set(func() { d.devices[1] = Device{Index: 1, Error: "GPU is lost", Code: 15} })
		expect(t, "still lost", next(60*time.Second), "")
		d.set(func() { d.devices = d.devices[:1] })
		expect(t, "not listed", next(30*time.Second), "236 | GPU-0 healthy | GPU-1 unhealthy (the driver does not list it any more)")
		d.set(func() { d.devices = append(d.devices, a100(1, 10)) })
		got := next(60 * time.Second)
		if !strings.HasSuffix(got, "| GPU-0 healthy | GPU-1 healthy") || strings.Contains(got, "\n") {
			t.Errorf("back: %s", got)
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		if len(d.feeds) != 1 {
			t.Errorf("%d feeds of %d run", len(d.feeds), d.began)
		}
	})
}

// What one watcher knew of faults the next one takes over.
func TestWatcherRemembers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var told []string
		var mu sync.Mutex
		remember := func(faults []Fault, driver string) {
			mu.Lock()
			defer mu.Unlock()
			told = append(told, fmt.Sprint(faults, driver))
		}
		d := &fakeDriver{version: "550", devices: []Device{a100(0, 1000), a100(1, 1000)}, feeds: map[int]chan Health{}}
		next := d.watch(t, WatcherConfig{Known: []Fault{{UUID: "GPU-1", XID: 79, Energy: 900}}, KnownDriver: "550", Remember: remember})
		expect(t, "start", next(60*time.Second), "0 | GPU-0 healthy | GPU-1 unhealthy (XID 79)")
		d.xid("GPU-0", 48)
		expect(t, "a fault", next(9*time.Second), "60 | GPU-0 unhealthy (XID 48) | GPU-1 unhealthy (XID 79)")
		d.set(func() { d.devices[1] = a100(1, 10) })
		expect(t, "reset", next(21*time.Second), "75 | GPU-0 unhealthy (XID 48) | GPU-1 healthy")
		// One that the driver gives to no GPU is nothing to remember of one that had none.
		d.xid("", 62)
		expect(t, "a fault of some GPU", next(9*time.Second), "90 | GPU-0 unhealthy (XID 62) | GPU-1 unhealthy (XID 62)")
		mu.Lock()
		defer mu.Unlock()
		if got, want := strings.Join(told, "; "), "[{GPU-0 48 1000} {GPU-1 79 1000}]550; [{GPU-0 48 1000}]550; [{GPU-0 62 1000}]550"; got != want {
			t.Errorf("remembered %s, want %s", got, want)
		}
		// With another driver all GPUs have been set up anew.
		d = &fakeDriver{version: "560", devices: []Device{a100(0, 5000)}, feeds: map[int]chan Health{}}
		next = d.watch(t, WatcherConfig{Known: []Fault{{UUID: "GPU-0", XID: 48, Energy: 1000}}, KnownDriver: "550"})
		expect(t, "another driver", next(30*time.Second), "0 | GPU-0 unhealthy (XID 48)\n5 | GPU-0 healthy")
	})
}

func TestWatcherDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		none := &ProblemError{Problem{NoDriver, "no libnvidia-ml.so.1"}}
		d := &fakeDriver{open: none, version: "550", feeds: map[int]chan Health{}}
		next := d.watch(t, WatcherConfig{})
		expect(t, "no library", next(200*time.Second), "0 NoDriver")
		d.set(func() { d.open, d.scan = nil, &NVMLError{Code: 9, Text: "Driver Not Loaded"} })
		expect(t, "no module", next(60*time.Second), "243 NoDriver")
		d.set(func() { d.scan = nil })
		expect(t, "no GPU", next(60*time.Second), "303 NoGPU")
		d.set(func() { d.devices = []Device{{Index: 0, Error: "unknown", Code: 999}} })
		expect(t, "mute", next(60*time.Second), "363 NoAnswer | gpu 0: unknown")
		d.set(func() { d.devices = []Device{a100(0, 1), a100(1, 1)} })
		expect(t, "there", next(60*time.Second), "423 | GPU-0 healthy | GPU-1 healthy")
		d.xid("GPU-1", 79)
		expect(t, "a fault", next(19*time.Second), "440 | GPU-0 healthy | GPU-1 unhealthy (XID 79)")
		// Its libraries are replaced under the module, and the module later: set up anew.
		d.set(func() { d.scan = &NVMLError{Code: 18, Text: "mismatch"} })
		got := next(60 * time.Second)
		text := "the driver's libraries and the kernel module are of different releases (mismatch): reboot, or reload the module"
		if want := "DriverMismatch | GPU-0 unhealthy (" + text + ") | GPU-1 unhealthy (" + text + "; XID 79)"; !strings.HasSuffix(got, want) || strings.Contains(got, "\n") {
			t.Errorf("mismatch: %s", got)
		}
		d.set(func() { d.scan, d.version = nil, "570" })
		got = next(200 * time.Second)
		if !strings.HasSuffix(got, " | GPU-0 healthy | GPU-1 healthy") {
			t.Errorf("replaced: %s", got)
		}
	})
}

// NVML that hangs once means nothing; twice it does. A probe that is killed is started anew, and no line is
// lost while one takes over from another.
func TestWatcherProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &fakeDriver{version: "550", devices: []Device{a100(0, 1), a100(1, 1)}, feeds: map[int]chan Health{}}
		next := d.watch(t, WatcherConfig{})
		expect(t, "start", next(30*time.Second), "0 | GPU-0 healthy | GPU-1 healthy")
		d.set(func() {
			for _, f := range d.feeds {
				close(f)
			}
		})
		expect(t, "killed", next(10*time.Second), "")
		d.mu.Lock()
		if d.began != 2 || len(d.feeds) != 1 {
			t.Errorf("%d feeds of %d", len(d.feeds), d.began)
		}
		// The next feed is slow to begin: the one before still tells.
		d.hold = make(chan struct{})
		hold := d.hold
		d.version = "551"
		d.mu.Unlock()
		next(60 * time.Second)
		d.mu.Lock()
		if d.began != 3 || len(d.feeds) != 2 {
			t.Errorf("%d feeds of %d", len(d.feeds), d.began)
		}
		in := d.feeds[1]
		d.mu.Unlock()
		in <- Health{XID: &XID{UUID: "GPU-0", XID: 48}}
		if got := next(time.Second); !strings.Contains(got, "GPU-0 unhealthy (XID 48) | GPU-1 healthy") {
			t.Errorf("in between: %s", got)
		}
		close(hold)
		next(time.Second)
		d.mu.Lock()
		defer d.mu.Unlock()
		if len(d.feeds) != 1 {
			t.Errorf("%d feeds", len(d.feeds))
		}
	})
	synctest.Test(t, func(t *testing.T) {
		d := &fakeDriver{version: "550", devices: []Device{a100(0, 1)}, feeds: map[int]chan Health{}}
		next := d.watch(t, WatcherConfig{Rescan: 20 * time.Second, Every: 30 * time.Second})
		next(10 * time.Second)
		d.set(func() { d.scan = errors.New("NVML did not answer for 20s") })
		expect(t, "once", next(10500*time.Millisecond), "")
		d.set(func() { d.scan = nil })
		expect(t, "and well", next(60*time.Second), "")
		d.set(func() { d.scan = errors.New("NVML did not answer for 20s") })
		if got := next(60 * time.Second); !strings.Contains(got, "NoAnswer | GPU-0 unhealthy (NVML did not answer for 20s)") {
			t.Errorf("hung: %q", got)
		}
	})
}

func TestInventory(t *testing.T) {
	b := newBook(NewJudge(XIDs{}, time.Second))
	mig, exclusive := a100(0, 1), a100(1, 1)
	mig.MIG, exclusive.ComputeMode = true, 3
	b.scanned(time.Unix(5, 0), Report{DriverVersion: "550.1", CUDAVersion: 13020, Devices: []Device{mig, exclusive}})
	// The driver keeps a little more: the GPU is as large as before.
	exclusive.MemoryReserved = 2
	b.scanned(time.Unix(6, 0), Report{DriverVersion: "550.1", CUDAVersion: 13020, Devices: []Device{mig, exclusive}})
	inv := b.inventory()
	if inv.Driver != "550.1" || inv.CUDA != "13.2" || len(inv.GPUs) != 2 {
		t.Fatalf("%+v", inv)
	}
	want := GPU{Index: 1, Minor: 1, UUID: "GPU-1", Name: "A100", PCI: "0:1", Memory: 79, NUMA: 0, ComputeMode: 3,
		State: State{Healthy: true, Since: time.Unix(5, 0)}, Excluded: "compute mode is exclusive, one process at a time: `nvidia-smi -i 1 -c 0` ends that"}
	if got := inv.GPUs[1]; got != want {
		t.Errorf("%+v\nwant %+v", got, want)
	}
	if g := inv.Find("GPU-0"); g == nil || g.Usable() || !strings.Contains(g.Excluded, "`nvidia-smi -i 0 -mig 0`") {
		t.Errorf("%+v", g)
	}
	if l := inv.Links.At(0, 1); l != (topology.Link{Level: topology.PXB, NVLinks: 1, GBps: 25}) || inv.Links.Validate() != nil {
		t.Errorf("%+v", inv.Links)
	}
	if inv.Find("GPU-2") != nil {
		t.Error("found")
	}
}

// Whatever a probe writes, the inventory that comes of it holds together.
func FuzzReport(f *testing.F) {
	f.Add([]byte(`{"driver_version":"550","cuda_version":12040,"devices":[{"index":0,"uuid":"GPU-1","memory_total":5,"mig":null,"minor":null,"ancestors":[-1,20],"nvlinks":[{"type":"gpu","pci":"b"}]},{"index":1,"uuid":"GPU-2","pci":"b"},{"index":2,"error":"lost","code":15}]}`),
		[]byte(`{"devices":[{"index":0,"uuid":"GPU-1","recovery":1,"energy":5},{"index":1,"error":"x","code":999}]}`))
	f.Add([]byte(`{"error":"Driver Not Loaded","code":9}`), []byte(`{"devices":[{"index":-1,"uuid":"GPU-1"},{"index":-1,"uuid":"GPU-1"}]}`))
	f.Fuzz(func(t *testing.T, first, second []byte) {
		b := newBook(NewJudge(XIDs{}, time.Second))
		now := time.Unix(0, 0)
		for _, line := range [][]byte{first, second, first} {
			now = now.Add(2 * time.Second)
			if r, err := parse(line, nil); err == nil {
				b.scanned(now, r)
			} else {
				b.failed(now, problemOf(err))
			}
			inv := b.inventory()
			if err := inv.Links.Validate(); err != nil || len(inv.Links) != len(inv.GPUs) {
				t.Fatalf("%+v: %v", inv, err)
			}
			for _, g := range inv.GPUs {
				if g.UUID == "" || g.State.Healthy != (g.State.Reason == "") || inv.Find(g.UUID).UUID != g.UUID {
					t.Fatalf("%+v", g)
				}
			}
		}
	})
}
