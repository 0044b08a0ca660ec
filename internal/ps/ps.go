// Package ps is `tranche ps`: the running slices with what they may use and what they use.
package ps

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"sort"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"tranche.dev/tranche/internal/machine"
	"tranche.dev/tranche/internal/quantity"
	"tranche.dev/tranche/internal/state"
	"tranche.dev/tranche/internal/supervise"
	"tranche.dev/tranche/internal/tenant"
)

// Row is one slice on one GPU.
type Row struct {
	ID        string    `json:"id"`
	Name      string    `json:"name"`
	Sim       string    `json:"sim,omitempty"`
	GPU       int       `json:"gpu"`
	UUID      string    `json:"uuid"`
	GPUName   string    `json:"gpu_name"`
	Cores     int       `json:"cores"`
	Burst     int       `json:"cores_burst"`
	Weight    int       `json:"weight,omitempty"`
	Latency   bool      `json:"latency,omitempty"`
	CoresUsed float64   `json:"cores_used"`
	Memory    uint64    `json:"memory_limit_bytes"`
	Used      uint64    `json:"memory_used_bytes"`
	PIDs      []int     `json:"pids"`
	User      string    `json:"user"`
	Started   time.Time `json:"started"`
	Command   []string  `json:"command"`
	Parent    string    `json:"parent,omitempty"`
	state.Account
	// Arbiter is there for the slices of the run that is the arbiter.
	Arbiter *state.Arbiter `json:"arbiter,omitempty"`
}

const interval = 300 * time.Millisecond

// List lists the living slices: of real GPUs and of this user's simulated machines, or of one
// simulated machine only. It removes what dead slices of the caller left.
func List(sim string) ([]Row, error) {
	registries, err := machine.Chosen(sim)
	if err != nil {
		return nil, err
	}
	var all []entry
	for dir, r := range registries {
		slices, err := alive(r)
		// A machine that no run has made yet has no slices.
		if err != nil && (sim == "" || !errors.Is(err, fs.ErrNotExist)) {
			return nil, err
		}
		for _, s := range slices {
			all = append(all, entry{slice: s, sim: dir})
		}
	}
	sort.Slice(all, func(i, j int) bool { return all[i].slice.Info.Started.Before(all[j].slice.Info.Started) })
	return measure(all), nil
}

type entry struct {
	slice  state.Slice
	sim    string
	ledger *tenant.Ledger
	leases *tenant.Leases
	before []uint64
}

func alive(r *state.Registry) ([]state.Slice, error) {
	slices, err := r.List()
	if err != nil {
		return nil, err
	}
	var out []state.Slice
	dead := false
	for _, s := range slices {
		if s.Alive {
			out = append(out, s)
		}
		dead = dead || !s.Alive && s.Mine
	}
	if dead {
		if unlock, err := r.Lock(); err == nil {
			if slices, err := r.List(); err == nil {
				r.RemoveDead(slices)
			}
			unlock()
		}
	}
	return out, nil
}

// measure reads each ledger twice; of others' slices their supervisor's figures are taken.
func measure(all []entry) []Row {
	began := time.Now()
	opened := false
	for i := range all {
		e := &all[i]
		if !e.slice.Mine {
			continue
		}
		ledger, err := tenant.OpenLedger(e.slice.Dir)
		if err != nil {
			continue
		}
		e.ledger, opened = ledger, true
		e.leases, _ = tenant.OpenLeases(e.slice.Dir)
		for d := range e.slice.Info.GPUs {
			e.before = append(e.before, ledger.Usage(d).GPUTimeNs)
		}
	}
	if opened {
		time.Sleep(interval)
	}
	var rows []Row
	for _, e := range all {
		for d := range e.slice.Info.GPUs {
			rows = append(rows, e.row(d, time.Since(began)))
		}
		if e.ledger != nil {
			e.ledger.Close()
		}
		if e.leases != nil {
			e.leases.Close()
		}
	}
	return rows
}

func (e entry) row(d int, passed time.Duration) Row {
	s, g := e.slice, e.slice.Info.GPUs[d]
	r := Row{ID: s.ID, Name: clean(s.Info.Name), Sim: e.sim, GPU: g.Index, UUID: clean(g.UUID), GPUName: clean(g.Name), Cores: g.Cores, Burst: g.Burst, Weight: g.Weight, Latency: g.Latency,
		Memory: g.Memory, User: s.User(), Started: s.Info.Started, Parent: s.Info.Parent, PIDs: []int{}}
	for _, word := range s.Info.Command {
		r.Command = append(r.Command, clean(word))
	}
	for _, p := range s.Use.Processes {
		if !p.Gone() {
			r.PIDs = append(r.PIDs, p.PID)
		}
	}
	switch {
	case e.ledger != nil:
		u := e.ledger.Usage(d)
		r.Used, r.CoresUsed = u.Memory, supervise.CoresUsed(e.before[d], u.GPUTimeNs, passed)
		r.Account = state.ReadAccount(e.ledger, e.leases, d)
	case d < len(s.Use.GPUs):
		r.Used, r.CoresUsed, r.Account = s.Use.GPUs[d].Memory, s.Use.GPUs[d].Cores, s.Use.GPUs[d].Account
	}
	if s.Supervised {
		r.Arbiter = s.Use.Arbiter
	}
	return r
}

// clean takes from others' text what a terminal would act on: control characters, and those that
// change the direction of text or cannot be seen.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}

// WriteJSON writes the rows as one array.
func WriteJSON(w io.Writer, rows []Row) error {
	if rows == nil {
		rows = []Row{}
	}
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(rows)
}

// WriteTable writes the rows for people.
func WriteTable(w io.Writer, rows []Row, now time.Time) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "NAME\tGPU\tCORES\tWANTED\tUSED\tWAITED\tMEMORY\tUSED\tPIDS\tUSER\tUP\tCOMMAND")
	for _, r := range rows {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%v\t%v\t%s\t%s\t%s\t%s\n", shorten(r.Name, 24), r.gpu(), r.cores(), r.wanted(), r.used(), r.waited(),
			quantity.Bytes(r.Memory), quantity.Bytes(r.Used), pids(r.PIDs), r.User, up(now.Sub(r.Started)), shorten(strings.Join(r.Command, " "), 50))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	return writeArbiters(w, rows)
}

// writeArbiters says who divides GPU time among the slices, and how fast.
func writeArbiters(w io.Writer, rows []Row) error {
	said := map[string]bool{}
	for _, r := range rows {
		a := r.Arbiter
		if a == nil || said[r.ID] {
			continue
		}
		said[r.ID] = true
		text := fmt.Sprintf("arbiter: %s (pid %d), %d slices", shorten(r.Name, 24), a.PID, a.Slices)
		if r.Sim != "" {
			text += " (sim)"
		}
		if a.Handovers > 0 {
			text += fmt.Sprintf(", handover %v, p99 %v", micro(a.HandoverP50), micro(a.HandoverP99))
		}
		if _, err := fmt.Fprintln(w, text); err != nil {
			return err
		}
	}
	return nil
}

func micro(ns int64) time.Duration { return time.Duration(max(ns, 0)).Round(time.Microsecond) }

func (r Row) gpu() string {
	if r.Sim != "" {
		return fmt.Sprintf("%d (sim)", r.GPU)
	}
	return fmt.Sprint(r.GPU)
}

// used is "-" where nothing is metered: a slice without a compute limit.
func (r Row) used() string {
	if r.Cores >= 100 && r.CoresUsed == 0 {
		return "-"
	}
	return fmt.Sprintf("%.0f%%", r.CoresUsed)
}

// wanted is the part of the last second with work waiting or running.
func (r Row) wanted() string {
	if r.Wanted == nil {
		return "-"
	}
	return fmt.Sprintf("%.0f%%", *r.Wanted)
}

// waited is how long launches have waited, all threads together.
func (r Row) waited() string {
	if r.Launches == 0 {
		return "-"
	}
	return up(time.Duration(min(r.ThrottledNs, math.MaxInt64)))
}

func (r Row) cores() string {
	if r.Burst > r.Cores {
		return fmt.Sprintf("%d-%d", r.Cores, r.Burst)
	}
	return fmt.Sprint(r.Cores)
}

func pids(list []int) string {
	var parts []string
	for i, p := range list {
		if i == 4 {
			parts = append(parts, fmt.Sprintf("+%d", len(list)-i))
			break
		}
		parts = append(parts, fmt.Sprint(p))
	}
	return strings.Join(parts, ",")
}

func up(d time.Duration) string {
	d = max(d, 0) // a clock that was set back, or another's claim
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%dd", int(d.Hours())/24)
}

func shorten(s string, n int) string {
	if r := []rune(s); len(r) > n {
		return string(r[:n-1]) + "…"
	}
	return s
}
