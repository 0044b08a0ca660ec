package gpu

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Judge decides which GPUs are healthy, from what the driver says of them and from nothing else: that a
// query succeeds proves nothing after a real fault. Pure: times come with the events. Not safe for
// concurrent use.
//
// A GPU is unhealthy from
//   - an XID that is no program's doing (XIDs),
//   - a reading with a recovery action other than none,
//   - a reading with an error (lost, reset required), or a list without it.
//
// It is healthy again after good readings over Settle, the first of them after the newest of these, and,
// if there was an XID, when the driver says so: its recovery action is none. A driver that has no recovery
// action (before 570) says so by having set the GPU up anew since: the GPU was lost and answers again, its
// energy counter went backwards, or the driver itself was loaded anew (Reloaded).
type Judge struct {
	xids   XIDs
	settle time.Duration
	gpus   map[string]*judged
}

type judged struct {
	state  State
	xid    int    // newest fault, 0: none since the GPU was fit
	other  bool   // it may be another GPU's: the driver has given none to this one
	error  string // of the newest reading
	action int    // of the newest reading that had one
	anew   bool   // set up anew since the newest XID
	lost   bool   // was gone since, or is
	good   time.Time
	energy uint64
}

// NewJudge makes one. settle is how long readings have to be good before a GPU is healthy again.
func NewJudge(xids XIDs, settle time.Duration) *Judge {
	return &Judge{xids: xids, settle: settle, gpus: map[string]*judged{}}
}

// State tells a GPU's health; one never read is unhealthy.
func (j *Judge) State(uuid string) State {
	if g := j.gpus[uuid]; g != nil {
		return g.state
	}
	return State{Reason: "not read yet"}
}

// Fault is an XID that has made a GPU unhealthy, to be remembered over restarts. Energy is the GPU's counter at some time after it,
// in mJ; 0: it has none.
type Fault struct {
	UUID   string `json:"uuid"`
	XID    int    `json:"xid"`
	Energy uint64 `json:"energy,omitempty"`
}

// Recall tells of a fault that an earlier judge found. The GPU is unhealthy until the driver says that it is fit.
func (j *Judge) Recall(now time.Time, f Fault) {
	if j.xids.Fault(f.XID) {
		j.gpus[f.UUID] = &judged{state: State{Since: now}, xid: f.XID, energy: f.Energy}
		j.gpus[f.UUID].judge(now, false)
	}
}

// Faults are those that make GPUs unhealthy now, by UUID, without what may be another GPU's.
func (j *Judge) Faults() []Fault {
	var out []Fault
	for uuid, g := range j.gpus {
		if g.xid != 0 && !g.other {
			out = append(out, Fault{UUID: uuid, XID: g.xid, Energy: g.energy})
		}
	}
	slices.SortFunc(out, func(a, b Fault) int { return cmp.Compare(a.UUID, b.UUID) })
	return out
}

// XID takes a critical error. One that the driver gives to no GPU is held against all: their readings
// clear those that are fit.
func (j *Judge) XID(now time.Time, x XID) {
	if !j.xids.Fault(x.XID) {
		return
	}
	for uuid, g := range j.gpus {
		if x.UUID == "" || x.UUID == uuid {
			g.other = x.UUID == "" && (g.other || g.xid == 0)
			g.xid, g.anew, g.good = x.XID, false, time.Time{}
			g.lost = g.error != ""
			g.judge(now, false)
		}
	}
}

// Reading takes what a GPU said.
func (j *Judge) Reading(now time.Time, d Device) {
	g := j.gpus[d.UUID]
	if g == nil {
		g = &judged{state: State{Healthy: true, Since: now}}
		j.gpus[d.UUID] = g
	}
	g.error = d.Error
	if d.Error != "" {
		g.lost = g.lost || goneCodes[d.Code]
		g.good = time.Time{}
		g.judge(now, false)
		return
	}
	told := d.Recovery != nil
	if g.action = 0; told {
		g.action = *d.Recovery
	}
	if d.Energy != nil {
		g.anew = g.anew || *d.Energy < g.energy
		g.energy = *d.Energy
	}
	g.anew = g.anew || g.lost
	if g.action != 0 || g.xid != 0 && !told && !g.anew {
		g.good = time.Time{}
	} else if g.good.IsZero() {
		g.good = now
	}
	fit := !g.good.IsZero() && now.Sub(g.good) >= j.settle
	if fit {
		g.xid, g.lost, g.other = 0, false, false
	}
	g.judge(now, fit)
}

// gpuLost is NVML's code of a GPU that fell off the bus. goneCodes are those after which a GPU that answers
// has been set up anew: lost, reset required, not found.
const gpuLost = 15

var goneCodes = map[int]bool{gpuLost: true, 16: true, 28: true}

// Unreachable tells that no GPU can be asked, and why.
func (j *Judge) Unreachable(now time.Time, why string) {
	for _, g := range j.gpus {
		g.error, g.good = why, time.Time{}
		g.judge(now, false)
	}
}

// Reloaded tells that the driver was loaded anew: it has set up every GPU that it lists.
func (j *Judge) Reloaded() {
	for _, g := range j.gpus {
		g.anew = true
	}
}

// judge sets the state: unhealthy for whatever is wrong, healthy only if fit.
func (g *judged) judge(now time.Time, fit bool) {
	reason := g.reason()
	switch {
	case fit && !g.state.Healthy:
		g.state = State{Healthy: true, Since: now}
	case reason != "" && g.state.Healthy:
		g.state = State{Reason: reason, Since: now}
	case reason != "":
		g.state.Reason = reason
	}
}

// reason is what is wrong; "" if nothing is, or only time has to pass.
func (g *judged) reason() string {
	var parts []string
	if g.error != "" {
		parts = append(parts, g.error)
	}
	if g.xid != 0 {
		parts = append(parts, fmt.Sprintf("XID %d", g.xid))
	}
	if g.action != 0 {
		parts = append(parts, "the driver asks for "+actionName(g.action))
	}
	return strings.Join(parts, "; ")
}

// actionName names NVML's nvmlDeviceGpuRecoveryAction_t.
func actionName(action int) string {
	names := [...]string{1: "a GPU reset", 2: "a reboot of the node", 3: "its peers to be drained", 4: "draining and a GPU reset",
		5: "a recovery of the IMEX domain", 6: "a reset of its PCIe bus", 7: "a reboot of the system"}
	if action > 0 && action < len(names) {
		return names[action]
	}
	return fmt.Sprintf("recovery action %d", action)
}
