package topology

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// parseMax is the most GPUs that a table may have; nvidia-smi knows no larger node.
const parseMax = 64

var (
	escape  = regexp.MustCompile(`\x1b\[[0-9;]*m`)
	gpuName = regexp.MustCompile(`^GPU[0-9]+$`)
)

// Parse reads the table of `nvidia-smi topo -m`, drivers 384 to 580: a header whose first columns are
// GPUs, one row each; columns and rows of network adapters, affinities and the legend are left out, colour
// too. Bandwidths are estimated for PCIe 3.0 x16 and 25 GB/s a lane, as the table names neither.
func Parse(text string) (Matrix, error) {
	lines := strings.Split(escape.ReplaceAllString(text, ""), "\n")
	for at, line := range lines {
		if names := header(line); names != nil {
			if len(names) > parseMax {
				return nil, fmt.Errorf("topology: %d GPUs, at most %d", len(names), parseMax)
			}
			return table(names, lines[at+1:])
		}
	}
	return nil, errors.New("topology: no line that begins with GPU0: not the output of `nvidia-smi topo -m`")
}

// header lists the GPUs that lead a line; nil when it is not a header.
func header(line string) []string {
	var names []string
	fields := strings.Fields(line)
	for _, f := range fields {
		if !gpuName.MatchString(f) {
			break
		}
		names = append(names, f)
	}
	// With one GPU a row of the table begins like a header, but goes on with a cell.
	if len(names) == 1 && len(fields) > 1 {
		if _, err := cell(fields[1]); err == nil {
			return nil
		}
	}
	return names
}

func table(names []string, lines []string) (Matrix, error) {
	m := New(len(names))
	next := 0
	for _, line := range lines {
		fields := strings.Fields(line)
		if len(fields) == 0 || next == len(names) || fields[0] != names[next] {
			continue
		}
		if len(fields) < 1+len(names) {
			return nil, fmt.Errorf("topology: row %s has %d cells of %d", names[next], len(fields)-1, len(names))
		}
		for j := range names {
			l, err := cell(fields[1+j])
			if err != nil {
				return nil, fmt.Errorf("topology: %s to %s: %w", names[next], names[j], err)
			}
			m[next][j] = l
		}
		next++
	}
	if next < len(names) {
		return nil, fmt.Errorf("topology: no row of %s", names[next])
	}
	return m, m.Validate()
}

func cell(text string) (Link, error) {
	l := Link{}
	if n, ok := strings.CutPrefix(text, "NV"); ok {
		count, err := strconv.Atoi(n)
		if err != nil || count < 1 || count > 255 {
			return l, fmt.Errorf("%q is no link", text)
		}
		l.NVLinks = count
	} else if text == "SOC" { // SYS before driver 384
		l.Level = SYS
	} else if err := l.Level.UnmarshalText([]byte(text)); err != nil || l.Level == Unknown {
		return l, fmt.Errorf("%q is no link", text)
	}
	if l.Level != Self {
		l.GBps = estimate(l, laneMBps, pcieMBps)
	}
	return l, nil
}
