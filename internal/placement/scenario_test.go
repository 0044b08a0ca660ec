package placement

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"tranche.dev/tranche/internal/quantity"
)

var update = flag.Bool("update", false, "rewrite testdata/*.txt with what comes out")

// A scenario is a script of lines `> command`, each followed by what came out and by the full state of the
// nodes:
//
//	> node NAME GPUS MEMORY MODEL [cpu=N]
//	> pod NAME [policy=P] CORES/MEMORY[xCOUNT][@MODEL] ...   learn, decide, reserve
//	> gone NAME, > lost NODE, > sick NODE INDEX
//
// Containers of a pod are app containers; `init:` and `side:` before one make it another.
func TestScenarios(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal("no scenarios", err)
	}
	for _, file := range files {
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		got := play(t, string(want))
		if *update {
			if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		} else if got != string(want) {
			t.Errorf("%s: got\n%s", file, got)
		}
	}
}

func play(t *testing.T, script string) string {
	c, err := NewCluster(Config{})
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	for line := range strings.Lines(script) {
		line = strings.TrimSuffix(line, "\n")
		if strings.HasPrefix(line, "#") || line == "" && out.Len() == 0 {
			fmt.Fprintln(&out, line)
		}
		if command, ok := strings.CutPrefix(line, "> "); ok {
			fmt.Fprintf(&out, "\n%s\n", line)
			out.WriteString(act(t, c, strings.Fields(command)))
			for _, name := range c.Nodes() {
				n, _ := c.Node(name)
				fmt.Fprintf(&out, "  %s:", name)
				for _, g := range n.GPUs {
					fmt.Fprintf(&out, " %d/%v", g.FreeCores, quantity.Bytes(max(g.FreeMemory, 0)))
					if g.Excluded != "" {
						fmt.Fprintf(&out, "(%s)", g.Excluded)
					}
				}
				fmt.Fprintln(&out)
			}
		}
	}
	return out.String()
}

func act(t *testing.T, c *Cluster, words []string) string {
	switch words[0] {
	case "node":
		n := Node{Name: words[1]}
		count, err := strconv.Atoi(words[2])
		memory, err2 := quantity.Parse(words[3])
		if err != nil || err2 != nil {
			t.Fatal(words, err, err2)
		}
		for i := range count {
			n.GPUs = append(n.GPUs, GPU{Index: i, UUID: fmt.Sprintf("GPU-%s%d", words[1], i), Name: words[4], Memory: memory, FreeCores: CoresWhole, FreeMemory: int64(memory)})
		}
		c.SetNode(n)
	case "lost":
		c.RemoveNode(words[1])
	case "sick":
		n, _ := c.Node(words[1])
		for key, h := range c.holds { // a node is set as it is without the pods held
			if h.node == words[1] {
				for _, held := range h.gpus {
					for g := range n.GPUs {
						if n.GPUs[g].UUID == held.UUID {
							n.GPUs[g].FreeCores += held.Cores
							n.GPUs[g].FreeMemory += int64(held.Memory)
						}
					}
				}
				_ = key
			}
		}
		index, err := strconv.Atoi(words[2])
		if err != nil {
			t.Fatal(err)
		}
		n.GPUs[index].Excluded = "unhealthy"
		c.SetNode(n)
	case "gone":
		if !c.Release(words[1]) {
			return "  held nothing\n"
		}
	case "pod":
		return decide(t, c, words[1], words[2:])
	default:
		t.Fatalf("no command %q", words[0])
	}
	return ""
}

func decide(t *testing.T, c *Cluster, name string, asks []string) string {
	var p Pod
	for i, ask := range asks {
		if policy, ok := strings.CutPrefix(ask, "policy="); ok {
			p.Policy = Policy(policy)
			continue
		}
		ct := Container{Name: fmt.Sprint("c", i), Request: Request{Count: 1}}
		for prefix, phase := range map[string]Phase{"init:": Init, "side:": Sidecar} {
			if rest, ok := strings.CutPrefix(ask, prefix); ok {
				ct.Phase, ask = phase, rest
			}
		}
		ask, model, ok := strings.Cut(ask, "@")
		if ok {
			ct.Constraints.Models = []string{model}
		}
		ask, count, ok := strings.Cut(ask, "x")
		if ok {
			ct.Request.Count, _ = strconv.Atoi(count)
		}
		cores, memory, _ := strings.Cut(ask, "/")
		ct.Request.Cores, _ = strconv.Atoi(cores)
		if memory != "" {
			bytes, err := quantity.Parse(memory)
			if err != nil {
				t.Fatal(err)
			}
			ct.Request.Memory = bytes
		}
		p.Containers = append(p.Containers, ct)
	}
	c.Learn(&p)
	d, err := c.Decide(&p, nil)
	if err != nil {
		return fmt.Sprintf("  error: %v\n", err)
	}
	var s strings.Builder
	for i, x := range d.Candidates {
		fmt.Fprintf(&s, "  %s %d", d.Node(i), x.Score)
		if why := d.Why(i); why != "" {
			fmt.Fprintf(&s, " %s", why)
		}
		s.WriteByte(';')
	}
	fmt.Fprintf(&s, " best %q %v\n", d.Best, d.Assignment.Containers)
	if d.Best != "" {
		if err := c.Reserve(name, d.Best, &p, d.Assignment); err != nil {
			t.Fatal(err)
		}
	}
	return s.String()
}
