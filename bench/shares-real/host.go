package main

import (
	"os"
	"strconv"
	"strings"
)

// hostTime is what the processors did since they started, in ticks.
type hostTime struct {
	busy, all float64
}

// hostNow reads it; zero where it cannot be read.
func hostNow() (h hostTime) {
	data, err := os.ReadFile("/proc/stat")
	if err != nil {
		return h
	}
	line, _, _ := strings.Cut(string(data), "\n")
	// cpu user nice system idle iowait irq softirq steal; what follows is in user and nice already.
	for i, f := range strings.Fields(line) {
		v, err := strconv.ParseFloat(f, 64)
		if err != nil || i > 8 {
			continue
		}
		h.all += v
		if i != 4 && i != 5 {
			h.busy += v
		}
	}
	return h
}

// since is how busy the processors were, percent, with all that runs on the machine.
func (h hostTime) since(before hostTime) float64 {
	if h.all <= before.all {
		return 0
	}
	return 100 * (h.busy - before.busy) / (h.all - before.all)
}
