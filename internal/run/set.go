package run

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"tranche.dev/tranche/internal/machine"
	"tranche.dev/tranche/internal/placement"
	"tranche.dev/tranche/internal/quantity"
	"tranche.dev/tranche/internal/state"
	"tranche.dev/tranche/internal/tenant"
)

// SetConfig is a `tranche set`: what a running slice is changed to. Fields of Asked that are zero stay as
// they are; GPUs chooses among the slice's, none means all of them.
type SetConfig struct {
	Slice  string // name or id
	Asked  Asked
	Sim    string
	Stderr io.Writer
}

// confirmWait is how long the supervisor may take to follow.
const confirmWait = 2 * time.Second

// Set changes a running slice, and returns when its limits page says so.
func Set(config SetConfig) error {
	if err := config.validate(); err != nil {
		return err
	}
	sim, found, err := find(config.Slice, config.Sim)
	if err != nil {
		return err
	}
	m, err := machine.Open(sim, os.Getenv("LD_LIBRARY_PATH"))
	if err != nil {
		return err
	}
	gpus, err := m.GPUs(context.Background())
	if err != nil {
		return err
	}
	unlock, err := m.Registry.Lock()
	if err != nil {
		return err
	}
	defer unlock()
	all, err := m.Registry.List()
	if err != nil {
		return err
	}
	i := slices.IndexFunc(all, func(s state.Slice) bool { return s.ID == found && s.Alive })
	if i < 0 {
		return fmt.Errorf("slice %s is over", config.Slice)
	}
	c := change{config: config, slice: all[i], all: all, gpus: gpus, registry: m.Registry}
	// Root changes others' slices, whose files their owners may cut short.
	if fault := tenant.Guard(func() { err = c.do() }); fault != nil {
		return fmt.Errorf("slice %s: %w", config.Slice, fault)
	}
	return err
}

// validate checks what can be checked without a slice.
func (c SetConfig) validate() error {
	a := c.Asked
	switch {
	case a.Cores == 0 && a.Memory == 0 && a.Burst == 0 && a.Weight == 0 && a.Class == "":
		return errors.New("set: nothing to change; give --cores, --memory, --burst, --weight or --class")
	case a.Cores > placement.CoresWhole:
		return fmt.Errorf("--cores %d: 1 to 100 of each GPU of the slice", a.Cores)
	}
	return a.validateTurns()
}

// find looks for the slice among all machines of this user. It returns the machine as machine.Open takes it.
func find(name, sim string) (string, string, error) {
	registries, err := machine.Chosen(sim)
	if err != nil {
		return "", "", err
	}
	type place struct{ sim, id string }
	var found []place
	var alive []string
	for dir, r := range registries {
		all, err := r.List()
		if err != nil {
			continue
		}
		for _, s := range all {
			switch {
			case !s.Alive:
			case s.ID == name || s.Info.Name == name:
				found = append(found, place{dir, s.ID})
			default:
				alive = append(alive, s.Info.Name)
			}
		}
	}
	switch {
	case len(found) == 1:
		return found[0].sim, found[0].id, nil
	case len(found) > 1:
		var ids []string
		for _, p := range found {
			ids = append(ids, p.id)
		}
		slices.Sort(ids)
		return "", "", fmt.Errorf("%d slices are named %s; give the id of one: %s", len(found), name, strings.Join(ids, ", "))
	case len(alive) == 0:
		return "", "", fmt.Errorf("no slice %s; none is running", name)
	}
	slices.Sort(alive)
	return "", "", fmt.Errorf("no slice %s; running: %s", name, strings.Join(slices.Compact(alive), ", "))
}

// change is one change in the making. The machine's lock is held.
type change struct {
	config   SetConfig
	slice    state.Slice
	all      []state.Slice
	gpus     []machine.GPU
	registry *state.Registry
	limits   *tenant.Limits
	ledger   *tenant.Ledger
}

func (c *change) do() error {
	name := c.config.Slice
	if !c.slice.Mine && os.Getuid() != 0 {
		return fmt.Errorf("slice %s is %s's; its owner or root can change it", name, c.slice.User())
	}
	if !c.slice.Supervised {
		return fmt.Errorf("slice %s has no `tranche run` any more (pid %d was killed or has ended); its limits stay as they are until its processes end",
			name, c.slice.Info.Leader.PID)
	}
	var err error
	if c.limits, c.ledger, err = c.registry.Pages(c.slice); err != nil {
		return err
	}
	defer c.limits.Close()
	defer c.ledger.Close()
	before, err := c.limits.Devices()
	if err != nil {
		return err
	}
	if len(before) != len(c.slice.Info.GPUs) {
		return fmt.Errorf("slice %s: its limits are of %d GPUs, its record of %d", name, len(before), len(c.slice.Info.GPUs))
	}
	to, err := c.decide(before)
	if err != nil {
		return err
	}
	if err := c.hand(to, state.Change{GPUs: c.slice.Info.GPUs, Limits: before}); err != nil {
		return err
	}
	c.remark(to.Limits)
	return nil
}

// decide finds out whether what is asked is free, and what the slice then has.
func (c *change) decide(before []tenant.Device) (state.Change, error) {
	to := state.Change{GPUs: slices.Clone(c.slice.Info.GPUs), Limits: slices.Clone(before)}
	chosen, err := c.chosen()
	if err != nil {
		return to, err
	}
	have, err := c.have(chosen)
	if err != nil {
		return to, err
	}
	for k, i := range chosen {
		if err := c.one(&to.GPUs[i], &to.Limits[i], have[k]); err != nil {
			return to, err
		}
	}
	return to, nil
}

// chosen are the positions, in the slice, of the GPUs that change.
func (c *change) chosen() ([]int, error) {
	var mine []machine.GPU
	for _, g := range c.slice.Info.GPUs {
		mine = append(mine, machine.GPU{Index: g.Index, UUID: g.UUID, Name: g.Name})
	}
	uuids, err := pick(mine, c.config.Asked.GPUs)
	if err != nil {
		return nil, fmt.Errorf("slice %s: %w", c.config.Slice, err)
	}
	var out []int
	for i, g := range mine {
		if len(uuids) == 0 || slices.Contains(uuids, g.UUID) {
			out = append(out, i)
		}
	}
	return out, nil
}

// have is what each chosen GPU has for the slice. It refuses what others have reserved, in the words of
// tranche run.
func (c *change) have(chosen []int) ([]placement.GPU, error) {
	var pinned []string
	for _, i := range chosen {
		pinned = append(pinned, c.slice.Info.GPUs[i].UUID)
	}
	others := slices.Clone(c.all)
	for i := range others {
		if others[i].ID == c.slice.ID {
			others[i].Info.GPUs = nil
		}
	}
	gpus := free(c.gpus, others)
	request := placement.Request{Cores: c.config.Asked.Cores, Memory: c.config.Asked.Memory, Count: len(pinned), Pinned: pinned}
	if c.nested() {
		// It lives on the reservation around it, and is cut to the limits there.
		request.Cores, request.Memory = 0, 0
	}
	at, err := placement.Choose(gpus, request)
	if err != nil {
		return nil, err
	}
	var out []placement.GPU
	for _, i := range at {
		out = append(out, gpus[i])
	}
	if c.nested() {
		return out, c.cut(out)
	}
	return out, nil
}

func (c *change) nested() bool {
	return slices.ContainsFunc(c.all, func(s state.Slice) bool { return s.ID == c.slice.Info.Parent && s.Alive })
}

// cut lowers what the GPUs have to the limits of the slice around this one.
func (c *change) cut(gpus []placement.GPU) error {
	outer, ledger, err := c.registry.Pages(state.Slice{ID: c.slice.Info.Parent})
	if err != nil {
		return err
	}
	defer outer.Close()
	defer ledger.Close()
	devices, err := outer.Devices()
	if err != nil {
		return err
	}
	for i := range gpus {
		for _, d := range devices {
			if d.UUID == gpus[i].UUID {
				gpus[i].FreeCores = d.Cores
				gpus[i].Memory = min(gpus[i].Memory, quantity.Bytes(d.MemoryLimit))
			}
		}
	}
	return nil
}

// one changes the slice's part on one GPU.
func (c *change) one(g *state.GPU, d *tenant.Device, have placement.GPU) error {
	a := c.config.Asked
	if a.Cores > 0 {
		cores := a.Cores
		if c.nested() {
			cores = min(cores, have.FreeCores)
		}
		burst := d.CoresCeiling > d.Cores
		d.Cores, d.CoresLimited, g.ReservedCores = cores, cores < placement.CoresWhole || c.nested(), cores
		if !burst || d.CoresCeiling < cores {
			d.CoresCeiling = cores
		}
	}
	if a.Burst > 0 {
		if !d.CoresLimited {
			return fmt.Errorf("--burst %d: the slice has no share to go beyond; give it one with --cores", a.Burst)
		}
		if a.Burst < d.Cores || a.Burst > placement.CoresWhole {
			return fmt.Errorf("--burst %d: from the slice's cores (%d, less than 100) to 100", a.Burst, d.Cores)
		}
		d.CoresCeiling = a.Burst
	}
	if a.Memory > 0 {
		d.MemoryLimit, d.MemoryLimited = min(uint64(a.Memory), uint64(have.Memory)), true
		g.ReservedMemory = uint64(a.Memory)
	}
	if a.Weight > 0 {
		d.Weight = a.Weight
	}
	if a.Class != "" {
		d.Latency = a.Class == ClassLatency
	}
	g.Cores, g.Burst, g.Memory, g.Weight, g.Latency = d.Cores, d.CoresCeiling, d.MemoryLimit, d.Weight, d.Latency
	return nil
}

// hand gives the change to the slice's supervisor and waits until it has followed. If it does not, the
// record says again what was, and so does the supervisor should it wake up later.
func (c *change) hand(to, back state.Change) error {
	if _, err := c.registry.Change(c.slice, to); err != nil {
		return err
	}
	for end := time.Now().Add(confirmWait); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if now, err := c.limits.Devices(); err == nil && slices.Equal(now, to.Limits) {
			return nil
		}
	}
	if _, err := c.registry.Change(c.slice, back); err != nil {
		return err
	}
	return fmt.Errorf("slice %s: its `tranche run` (pid %d) did not follow within %v; is it stopped? Nothing was changed",
		c.config.Slice, c.slice.Info.Leader.PID, confirmWait)
}

// remark says what the user will not expect.
func (c *change) remark(limits []tenant.Device) {
	for i, d := range limits {
		used := c.ledger.Usage(i).Memory
		if c.config.Asked.Memory > 0 && d.MemoryLimited && used > d.MemoryLimit {
			fmt.Fprintf(c.config.Stderr, "tranche: gpu %d: the slice uses %v, more than its new limit of %v: nothing is taken away, new allocations fail until it is below\n",
				c.slice.Info.GPUs[i].Index, quantity.Bytes(used), quantity.Bytes(d.MemoryLimit))
		}
	}
}
