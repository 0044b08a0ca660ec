package arbiter

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "write what comes out into the scenario files")

// A scenario file is a script with the complete answer to each step behind it. Commands:
//
//	join NAME cores=30 [ceil=50] [weight=2] [unlimited] [latency]   leave NAME   set NAME cores=...
//	wait NAME.SLOT [longest=1ms]   launches of the process wait for a turn
//	run NAME.SLOT end=TIME [longest=1ms]   it launched work that is expected to end then
//	close NAME.SLOT   it launches nothing more in its turn
//	stop NAME.SLOT   the same, and it does not wait for another one
//	done NAME.SLOT [used=1ms] [at=TIME]   nothing in flight any more, since a time; GPU time used
//	gone NAME.SLOT   the process is gone
//	kill   the arbiter dies; the next one joins everybody from the books in their leases
//	step TIME   what the arbiter says then: "> " lines
func TestScenarios(t *testing.T) {
	files, _ := filepath.Glob("testdata/*.txt")
	if len(files) == 0 {
		t.Fatal("no scenarios")
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got := play(t, string(text))
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			} else if got != string(text) {
				t.Errorf("differs from %s (-update writes it):\n%s", file, got)
			}
		})
	}
}

// stage is what the tenants say, and the core.
type stage struct {
	gpu     *GPU
	ids     map[string]uint64
	names   map[uint64]string
	specs   map[uint64]Spec
	reports map[uint64]*Report
	leases  map[uint64]Lease
	now     int64
}

const epoch = int64(time.Hour)

func play(t *testing.T, text string) string {
	s := &stage{gpu: New(Config{}), ids: map[string]uint64{}, names: map[uint64]string{}, specs: map[uint64]Spec{},
		reports: map[uint64]*Report{}, leases: map[uint64]Lease{}, now: epoch}
	var out strings.Builder
	for _, line := range strings.Split(strings.TrimSuffix(text, "\n"), "\n") {
		if strings.HasPrefix(line, ">") {
			continue
		}
		out.WriteString(line + "\n")
		words := strings.Fields(line)
		if len(words) == 0 || words[0] == "#" {
			continue
		}
		s.command(t, words, &out)
	}
	return out.String()
}

func (s *stage) command(t *testing.T, words []string, out *strings.Builder) {
	arg := args(words[1:])
	name := ""
	if len(words) > 1 {
		name = words[1]
	}
	switch words[0] {
	case "join":
		id := uint64(len(s.ids) + 1)
		s.ids[name], s.names[id], s.specs[id], s.reports[id] = id, name, spec(arg), &Report{}
		s.gpu.Join(id, s.specs[id], Lease{}, s.now)
	case "set":
		s.specs[s.ids[name]] = spec(arg)
		s.gpu.Set(s.ids[name], spec(arg))
	case "leave":
		s.gpu.Leave(s.ids[name], s.now)
		delete(s.reports, s.ids[name])
	case "kill":
		s.gpu = New(Config{})
		for id := uint64(1); id <= uint64(len(s.ids)); id++ {
			if s.reports[id] != nil {
				s.gpu.Join(id, s.specs[id], s.leases[id], s.now)
			}
		}
	case "step":
		s.now = epoch + int64(duration(t, name))
		s.step(out)
	default:
		s.process(t, words[0], name, arg)
	}
}

func (s *stage) process(t *testing.T, verb, name string, arg map[string]string) {
	tenant, slot, _ := strings.Cut(name, ".")
	n, err := strconv.Atoi(slot)
	r := s.reports[s.ids[tenant]]
	if err != nil || r == nil {
		t.Fatalf("%s %s: no such process", verb, name)
	}
	var p *Process
	for i := range r.Processes {
		if r.Processes[i].Slot == n {
			p = &r.Processes[i]
		}
	}
	if p == nil {
		r.Processes = append(r.Processes, Process{Slot: n})
		p = &r.Processes[len(r.Processes)-1]
	}
	if arg["longest"] != "" {
		p.Longest = int64(duration(t, arg["longest"]))
	}
	switch verb {
	case "wait":
		p.Waiting, p.WaitingSince = 1, s.now
	case "run":
		p.Waiting, p.WaitingSince, p.InFlight = 0, 0, 1
		p.WorkEnd = epoch + int64(duration(t, arg["end"]))
		p.Pending = p.WorkEnd - s.now
	case "close":
		l := s.leases[s.ids[tenant]]
		for _, g := range l.Grants {
			if g.Slot == n {
				p.Closed = max(p.Closed, g.Seq)
			}
		}
		p.Waiting, p.WaitingSince = 1, s.now
	case "stop":
		s.process(t, "close", name, arg)
		s.reports[s.ids[tenant]].clear(n)
	case "done":
		p.InFlight, p.Pending, p.LastEnd = 0, 0, s.now
		if arg["at"] != "" {
			p.LastEnd = epoch + int64(duration(t, arg["at"]))
		}
		if arg["used"] != "" {
			r.GPUTime += uint64(duration(t, arg["used"]))
		}
	case "gone":
		r.Processes = nil
	default:
		t.Fatalf("%s: no such command", verb)
	}
}

func (r *Report) clear(slot int) {
	for i := range r.Processes {
		if r.Processes[i].Slot == slot {
			r.Processes[i].Waiting, r.Processes[i].WaitingSince = 0, 0
		}
	}
}

func (s *stage) step(out *strings.Builder) {
	for again := true; again; {
		var wake int64
		wake, again = s.gpu.Step(s.now, func(id uint64, r *Report) {
			r.Processes = append(r.Processes, s.reports[id].Processes...)
			r.GPUTime = s.reports[id].GPUTime
		})
		s.gpu.Changed(func(id uint64, l Lease) {
			if l.Required != s.leases[id].Required {
				fmt.Fprintf(out, "> %s: turns needed: %v\n", s.names[id], l.Required)
			}
			for _, i := range []int{0, 1} {
				if l.Grants[i] != s.leases[id].Grants[i] {
					fmt.Fprintf(out, "> %s: %s\n", s.names[id], grantText(l.Grants[i]))
				}
			}
			s.leases[id] = l
		})
		s.gpu.Stuck(func(id uint64, slot int) { fmt.Fprintf(out, "> %s.%d: stuck\n", s.names[id], slot) })
		if !again {
			fmt.Fprintf(out, "> wake %s\n", ago(wake))
		}
	}
}

func grantText(g Grant) string {
	text := fmt.Sprintf("turn %d of .%d from %s to %s", g.Seq, g.Slot, ago(g.Start), ago(g.End))
	if g.Local {
		text = fmt.Sprintf("turn %d of .%d from %s, alone", g.Seq, g.Slot, ago(g.Start))
	}
	if g.Continues {
		text += ", continues"
	}
	if g.Since != 0 {
		text += ", free since " + ago(g.Since)
	}
	if g.Beside != 0 {
		text += fmt.Sprintf(", %v beside others", time.Duration(g.Beside))
	}
	if g.BesideSince != 0 {
		text += ", beside another since " + ago(g.BesideSince)
	}
	if g.InFlight != 0 {
		text += fmt.Sprintf(", %v in flight", time.Duration(g.InFlight))
	}
	return text
}

func ago(ns int64) string {
	if ns == never {
		return "never"
	}
	return time.Duration(ns - epoch).String()
}

func args(words []string) map[string]string {
	out := map[string]string{}
	for _, w := range words {
		k, v, _ := strings.Cut(w, "=")
		out[k] = v
	}
	return out
}

func spec(arg map[string]string) Spec {
	number := func(k string) int { n, _ := strconv.Atoi(arg[k]); return n }
	_, unlimited := arg["unlimited"]
	_, latency := arg["latency"]
	cores := number("cores")
	return Spec{Cores: cores, Ceiling: max(number("ceil"), cores), Weight: number("weight"), Limited: !unlimited, Latency: latency}
}

func duration(t *testing.T, text string) time.Duration {
	t.Helper()
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatal(err)
	}
	return d
}
