package tenant

import (
	"fmt"
	"math/rand"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// snake turns nDevices into n_devices.
func snake(name string) string {
	var b strings.Builder
	for _, r := range name {
		if r >= 'A' && r <= 'Z' {
			b.WriteByte('_')
			r += 'a' - 'A'
		}
		b.WriteRune(r)
	}
	return b.String()
}

// The header's own words against the mirror: sizes and offsets of every field, and every constant.
func TestABI(t *testing.T) {
	structs := map[string]reflect.Type{
		"tr_limits_dev": reflect.TypeFor[limitsDev](), "tr_grant": reflect.TypeFor[grant](), "tr_beside": reflect.TypeFor[beside](), "tr_lease": reflect.TypeFor[lease](), "tr_leases": reflect.TypeFor[leasesPage](),
		"tr_limits":  reflect.TypeFor[limitsPage](),
		"tr_account": reflect.TypeFor[account](), "tr_slot_dev": reflect.TypeFor[slotDev](),
		"tr_slot": reflect.TypeFor[slot](), "tr_coverage": reflect.TypeFor[coverage](), "tr_ledger": reflect.TypeFor[ledgerPage](),
	}
	constants := map[string]uint64{
		"TR_ABI_VERSION": abiVersion, "TR_LIMITS_MAGIC": limitsMagic, "TR_LEDGER_MAGIC": ledgerMagic, "TR_MAX_DEVICES": MaxDevices,
		"TR_MAX_PROCS": MaxProcs, "TR_UUID_LEN": uuidLen, "TR_NAME_LEN": nameLen, "TR_LIMITS_FAIL_OPEN": flagFailOpen,
		"TR_DEV_MEMORY_LIMITED": flagMemoryLimited, "TR_DEV_CORES_LIMITED": flagCoresLimited, "TR_DEV_BURST": flagBurst,
		"TR_DEV_LATENCY": flagLatency, "TR_LEASE_REQUIRED": leaseRequired, "TR_GRANT_LOCAL": grantLocal, "TR_GRANT_CONTINUES": grantContinues, "TR_GRANT_COUPLED": grantCoupled, "TR_LEASES_MAGIC": leasesMagic,
		"TR_LEASES_OFFSET": leasesOffset, "TR_BEAT_NS": BeatNs, "TR_BEAT_STALE_NS": BeatStaleNs,

		"TR_UNIT": Unit, "TR_WORD_AMOUNT_BITS": amountBits, "TR_WORD_SLOT_BITS": slotBits, "TR_WORD_OP_BITS": opBits,
		"TR_SLOT_FREE": slotFree, "TR_SLOT_USED": slotUsed, "TR_SLOT_ORPHANS": slotOrphans, "TR_LOCK_BASE": lockBase,
		"TR_SLICE_FIELD": SliceField, "TR_RPATH_FIELD": RpathField, "TR_COVER_WORDS": coverWords,
	}
	texts := map[string]string{"TR_FILE_LIMITS": FileLimits, "TR_FILE_LEDGER": FileLedger, "TR_SLICE_DIR_DEFAULT": DirDefault,
		"TR_SLICE_MARK": SliceMark, "TR_RPATH_MARK": RpathMark}

	var c, want strings.Builder
	c.WriteString("#include <stddef.h>\n#include <stdio.h>\n#include \"tranche_abi.h\"\nint main(void) {\n")
	number := func(label, expr string, v uint64) {
		fmt.Fprintf(&c, "printf(\"%s %%llu\\n\", (unsigned long long)(%s));\n", label, expr)
		fmt.Fprintf(&want, "%s %d\n", label, v)
	}
	for name, typ := range structs {
		number(name, "sizeof(struct "+name+")", uint64(typ.Size()))
		for i := range typ.NumField() {
			f := typ.Field(i)
			field := snake(f.Name)
			number(name+"."+field, "offsetof(struct "+name+", "+field+")", uint64(f.Offset))
			number(name+"."+field+" size", "sizeof(((struct "+name+" *)0)->"+field+")", uint64(f.Type.Size()))
		}
	}
	for name, v := range constants {
		number(name, name, v)
	}
	for name, v := range texts {
		fmt.Fprintf(&c, "printf(\"%s %%s\\n\", %s);\n", name, name)
		fmt.Fprintf(&want, "%s %s\n", name, v)
	}
	c.WriteString("return 0; }\n")
	got := runC(t, c.String())
	if got != want.String() {
		g, w := strings.Split(got, "\n"), strings.Split(want.String(), "\n")
		for i := range w {
			if i >= len(g) || g[i] != w[i] {
				t.Errorf("the header says %q, the mirror %q", g[min(i, len(g)-1)], w[i])
			}
		}
	}
	if leasesOffset < int(structs["tr_limits"].Size()) || limitsFileSize < leasesOffset+int(structs["tr_leases"].Size()) {
		t.Error("limits do not fit in their file")
	}
}

func runC(t *testing.T, program string) string {
	t.Helper()
	exe := filepath.Join(t.TempDir(), "c")
	cmd := exec.Command("cc", "-std=gnu11", "-I../../include", "-xc", "-", "-o", exe)
	cmd.Stdin = strings.NewReader(program)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("cc: %v\n%s", err, out)
	}
	out, err := exec.Command(exe).Output()
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// actor is one process that adds to an account, one store at a time, so that it can die between any
// two: the steps that the C library takes. settled is the twin: what the process contributes by the
// only event that counts, the swap of the word.
type actor struct {
	l       *Ledger
	slot    int
	settled uint64
	step    int
	op      uint64
	units   int64
	next    uint64
	word    uint64
	// Of the slot that the word names, before it is replaced.
	begun, known uint64
}

// other is the slot whose operation the word names, nil if it is nobody's or our own.
func (a *actor) other() *slotDev {
	if by := wordSlot(a.word); by >= 0 && by != a.slot {
		return &a.l.page.slot[by].dev[0]
	}
	return nil
}

func (a *actor) sd() *slotDev { return &a.l.page.slot[a.slot].dev[0] }

// advance takes one step of the operation in progress; true when it is finished.
func (a *actor) advance(units int64) bool {
	sd := a.sd()
	switch a.step {
	case 0:
		a.units = units
		now := uint64(0)
		a.op = sd.op
		switch {
		case a.op == 0:
			a.op = 1
		case !a.l.applied(a.slot, 0, a.op):
			now = sd.value[(a.op-1)&1]
		default:
			now = sd.value[a.op&1]
			a.op++
		}
		if units < 0 && uint64(-units) > now {
			a.units = -int64(now)
		}
		a.next = now + uint64(a.units)
	case 1:
		sd.value[a.op&1] = a.next
	case 2:
		sd.op = a.op
	case 3:
		a.word = a.l.page.account[0].word
	case 4:
		if by := a.other(); by != nil {
			a.begun = by.op
		}
	case 5:
		if by := a.other(); by != nil {
			a.known = by.ack
		}
	case 6:
		if a.l.page.account[0].word != a.word {
			a.step = 3
			return false
		}
	case 7:
		if by := a.other(); by != nil {
			op := a.begun - (a.begun-wordOp(a.word))&opMask
			switch {
			case op > a.known && by.ack != a.known:
				a.step = 4
				return false
			case op > a.known:
				by.ack = op
			}
		}
	case 8:
		if a.l.page.account[0].word != a.word {
			a.step = 3
			return false
		}
		a.l.page.account[0].word = makeWord(amount(a.word)+uint64(a.units), a.slot, a.op)
		a.settled = uint64(int64(a.settled) + a.units)
		a.step = 0
		return true
	}
	a.step++
	return false
}

// Whenever a process dies, between any two of its stores and with others going on, recovery finds
// exactly what it contributed; a recovery that dies itself changes nothing of that.
func TestRecoveryAgainstTwin(t *testing.T) {
	seed := rand.Int63()
	rng := rand.New(rand.NewSource(seed))
	l := newLedger(t)
	const slots = 4
	var actors [slots]*actor
	for i := range actors {
		actors[i] = &actor{l: l, slot: i + 1}
	}
	check := func(what string, round int) {
		var sum uint64
		for _, a := range actors {
			sum += a.settled
		}
		if got := amount(l.page.account[0].word); got != sum {
			t.Fatalf("seed %d round %d, %s: the account has %d, the twin %d", seed, round, what, got, sum)
		}
	}
	for round := range 60000 {
		a := actors[rng.Intn(slots)]
		switch {
		case rng.Intn(40) > 0:
			a.advance(int64(rng.Intn(2000) - 900))
		case rng.Intn(2) == 0:
			// It dies where it stands; the slot is reclaimed by the real code.
			if got := l.slotUnits(a.slot, 0); got != a.settled {
				t.Fatalf("seed %d round %d: slot %d has %d, the twin %d", seed, round, a.slot, got, a.settled)
			}
			l.clear(a.slot)
			a.step, a.settled = 0, 0
		default:
			// It dies, and so does the one that gives back for it, somewhere on the way.
			a.step = 0
			give := -int64(l.slotUnits(a.slot, 0))
			for range rng.Intn(10) {
				if a.advance(give) {
					break
				}
			}
			a.step = 0
		}
		check("step", round)
	}
	for _, a := range actors {
		l.clear(a.slot)
		a.settled = 0
	}
	check("end", 0)
}

func newLedger(t *testing.T) *Ledger {
	t.Helper()
	dir := t.TempDir()
	if err := CreateLedger(dir); err != nil {
		t.Fatal(err)
	}
	l, err := OpenLedger(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	return l
}

// A process may sleep between any two of its steps while another one does more operations than the
// word can count: what it writes when it wakes up must still be true.
func TestRecoveryAfterLongSleep(t *testing.T) {
	for step := 1; step <= 8; step++ {
		for _, ops := range []uint64{1, opMask / 2, opMask/2 + 2, opMask - 1, opMask + 2} {
			l := newLedger(t)
			sleeper := &actor{l: l, slot: 1}
			l.add(2, 0, 5, NoLimit)
			for sleeper.step < step {
				sleeper.advance(3)
			}
			for range ops {
				l.add(2, 0, 1, NoLimit)
			}
			for !sleeper.advance(3) {
			}
			if got, want := l.slotUnits(2, 0), ops+5; got != want {
				t.Errorf("asleep before step %d for %d operations: %d units, not %d", step, ops, got, want)
			}
			if got, want := amount(l.page.account[0].word), ops+5+3; got != want {
				t.Errorf("asleep before step %d for %d operations: account of %d, not %d", step, ops, got, want)
			}
		}
	}
}
