package gpu

import (
	"context"
	"errors"
	"log/slog"
	"time"
)

// Prober is what a Watcher asks; NVML is one.
type Prober interface {
	// Inventory lists the GPUs with identity, links and health readings, once.
	Inventory(ctx context.Context) (Report, error)
	// WatchHealth reports readings at once and every interval, and each XID as it comes, until ctx ends
	// or the driver stops answering.
	WatchHealth(ctx context.Context, every time.Duration, f func(Health)) error
}

// WatcherConfig is what a Watcher needs.
type WatcherConfig struct {
	// Open finds the driver. It is called before each look, so it sees a driver that comes or is replaced.
	// It returns a *ProblemError where there is none.
	Open func() (Prober, error)
	// XIDs says which errors are faults of the GPU; the zero value is NVIDIA's choice.
	XIDs XIDs
	// Known are faults of an earlier watcher on this machine since it was booted, and KnownDriver the release of the driver then.
	Known       []Fault
	KnownDriver string
	// Remember is told which faults there are and the release of the driver, whenever the faults change and at the end; nil:
	// nobody is. It must not block.
	Remember func(faults []Fault, driver string)
	// Every is how often readings are taken (default 5 s); a GPU is healthy again after good ones for as
	// long.
	Every time.Duration
	// Rescan is how often the driver is asked anew what there is (default 60 s; every 2 readings while some
	// GPU is unhealthy). Retry is the first wait after a failure, doubled up to Rescan (default 1 s).
	Rescan, Retry time.Duration
	// Now is the clock; the default is time.Now.
	Now func() time.Time
	Log *slog.Logger
}

// ProblemError is a Problem as an error.
type ProblemError struct{ Problem Problem }

func (e *ProblemError) Error() string { return e.Problem.Text }

// Watcher tells what GPUs a node has and how they are. It stays up whatever the driver does.
type Watcher struct{ config WatcherConfig }

// NewWatcher checks the config and fills in defaults.
func NewWatcher(config WatcherConfig) (*Watcher, error) {
	if config.Open == nil {
		return nil, errors.New("gpu: a watcher without Open")
	}
	defaultTo(&config.Every, 5*time.Second)
	defaultTo(&config.Rescan, time.Minute)
	defaultTo(&config.Retry, time.Second)
	if config.Now == nil {
		config.Now = time.Now
	}
	if config.Remember == nil {
		config.Remember = func([]Fault, string) {}
	}
	if config.Log == nil {
		config.Log = slog.New(slog.DiscardHandler)
	}
	return &Watcher{config: config}, nil
}

func defaultTo(d *time.Duration, value time.Duration) {
	if *d <= 0 {
		*d = value
	}
}
