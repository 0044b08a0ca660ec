package main

import (
	"bytes"
	"os"
	"strconv"
	"strings"
)

// procStat is what /proc says about a process. Of one that is gone: the zero value.
type procStat struct {
	state  string
	parent int
	born   string // clock ticks since boot
}

func stat(pid int) procStat {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return procStat{}
	}
	// The name, in parentheses, may hold anything.
	f := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
	if len(f) < 20 {
		return procStat{}
	}
	parent, _ := strconv.Atoi(f[1])
	return procStat{state: f[0], parent: parent, born: f[19]}
}

// alive is true of a process that is there and not a zombie.
func alive(pid int) bool {
	state := stat(pid).state
	return state != "" && state != "Z" && state != "X"
}

// descends is true when `ancestor` is pid, or above it.
func descends(pid, ancestor int) bool {
	for range 20 {
		if pid == ancestor {
			return true
		}
		if pid = stat(pid).parent; pid <= 1 {
			return false
		}
	}
	return false
}
