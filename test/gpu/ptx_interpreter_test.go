package gpu

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// instruction of PTX, with its guard.
type instruction struct {
	guard    string // a predicate, "": always
	negated  bool
	op       string
	operands []string
}

// kernel is an entry of a PTX text.
type kernel struct {
	params []string
	code   []instruction
	labels map[string]int
}

var entry = regexp.MustCompile(`(?s)\.visible \.entry (\w+)\(([^)]*)\)\n\{\n(.*?)\n\}`)
var word = regexp.MustCompile(`\w+`)

// parsePTX reads the entries of a text that has one instruction a line.
func parsePTX(text string) map[string]kernel {
	kernels := map[string]kernel{}
	for _, m := range entry.FindAllStringSubmatch(text, -1) {
		k := kernel{labels: map[string]int{}}
		for p := range strings.SplitSeq(m[2], ",") {
			w := word.FindAllString(p, -1)
			k.params = append(k.params, w[len(w)-1])
		}
		for line := range strings.SplitSeq(m[3], "\n") {
			line = strings.TrimSuffix(strings.TrimSpace(line), ";")
			if label, ok := strings.CutSuffix(line, ":"); ok {
				k.labels[label] = len(k.code)
				continue
			}
			if !strings.HasPrefix(line, ".reg") {
				k.code = append(k.code, parseInstruction(line))
			}
		}
		kernels[m[1]] = k
	}
	return kernels
}

func parseInstruction(line string) (i instruction) {
	if rest, ok := strings.CutPrefix(line, "@"); ok {
		i.guard, line, _ = strings.Cut(rest, " ")
		i.guard, i.negated = strings.CutPrefix(i.guard, "!")
	}
	var operands string
	i.op, operands, _ = strings.Cut(line, " ")
	for o := range strings.SplitSeq(operands, ",") {
		i.operands = append(i.operands, strings.TrimSpace(o))
	}
	return i
}

// thread runs one thread of a kernel. Memory is words of 64 bits by address.
type thread struct {
	t      *testing.T
	kernel kernel
	params map[string]uint64
	reg    map[string]uint64 // predicates: 0, 1
	memory map[uint64]uint64
	// timer is %globaltimer. It is read in each turn of a loop, so time passes with it.
	timer    func() uint64
	tid, cta uint64
}

// run runs to the end; false: it has not ended after so many instructions.
func (th *thread) run(most int) bool {
	th.reg = map[string]uint64{}
	for pc := 0; most > 0; most-- {
		i := th.kernel.code[pc]
		pc++
		if i.guard != "" && (th.reg[i.guard] == 1) == i.negated {
			continue
		}
		switch i.op {
		case "ret":
			return true
		case "bra":
			pc = th.kernel.labels[i.operands[0]]
		default:
			th.step(i)
		}
	}
	return false
}

var address = regexp.MustCompile(`^\[(%?\w+)(?:\+(\d+))?\]$`)

func (th *thread) address(operand string) uint64 {
	m := address.FindStringSubmatch(operand)
	if m == nil {
		th.t.Fatalf("address %q", operand)
	}
	offset, _ := strconv.ParseUint("0"+m[2], 10, 64)
	return th.value(m[1]) + offset
}

func (th *thread) value(operand string) uint64 {
	switch operand {
	case "%globaltimer":
		return th.timer()
	case "%tid.x":
		return th.tid
	case "%ctaid.x":
		return th.cta
	}
	if n, err := strconv.ParseUint(operand, 10, 64); err == nil {
		return n
	}
	v, ok := th.reg[operand]
	if !ok {
		th.t.Fatalf("%s is read before it is set", operand)
	}
	return v
}

func truth(b bool) uint64 {
	if b {
		return 1
	}
	return 0
}

func (th *thread) step(i instruction) {
	o := i.operands
	arg := func(n int) uint64 { return th.value(o[n]) }
	switch i.op {
	case "ld.param.u64":
		th.reg[o[0]] = th.params[strings.Trim(o[1], "[]")]
	case "mov.u64", "mov.u32", "cvta.to.global.u64":
		th.reg[o[0]] = arg(1)
	case "add.u64":
		th.reg[o[0]] = arg(1) + arg(2)
	case "sub.u64":
		th.reg[o[0]] = arg(1) - arg(2)
	case "shl.b64":
		th.reg[o[0]] = arg(1) << arg(2)
	case "shr.u64":
		th.reg[o[0]] = arg(1) >> arg(2)
	case "and.b64", "and.pred":
		th.reg[o[0]] = arg(1) & arg(2)
	case "or.b32":
		th.reg[o[0]] = arg(1) | arg(2)
	case "setp.ge.u64":
		th.reg[o[0]] = truth(arg(1) >= arg(2))
	case "setp.lt.u64":
		th.reg[o[0]] = truth(arg(1) < arg(2))
	case "setp.ne.u64":
		th.reg[o[0]] = truth(arg(1) != arg(2))
	case "setp.eq.u32":
		th.reg[o[0]] = truth(arg(1) == arg(2))
	case "st.global.u64":
		th.memory[th.address(o[0])] = arg(1)
	case "red.global.add.u64":
		th.memory[th.address(o[0])] += arg(1)
	case "red.global.max.u64":
		th.memory[th.address(o[0])] = max(th.memory[th.address(o[0])], arg(1))
	default:
		th.t.Fatalf("%s %s: the interpreter does not know it", i.op, fmt.Sprint(o))
	}
}
