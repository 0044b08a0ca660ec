package gpu

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// applicationXIDs are errors that a program causes, after which the GPU is as good as before: NVIDIA's
// device plugin has the same list. 154 is no error: it says that the recovery action changed, which is
// read anyway.
var applicationXIDs = []int{
	13,  // graphics engine exception: a kernel's illegal instruction or address
	31,  // memory page fault
	43,  // a program's channel was stopped
	45,  // preemptive cleanup after another error
	68,  // video processor exception
	109, // context switch timeout
	154, // recovery action changed
}

// XIDs says which critical errors make a GPU unhealthy: all but those that programs cause.
type XIDs struct {
	none, all        bool
	ignored, counted []int
}

// ParseXIDs reads the values of NVIDIA's DP_DISABLE_HEALTHCHECKS and DP_ENABLE_HEALTHCHECKS. disable is a
// list of XIDs to ignore besides those that programs cause, or `all` or `xids` for every one; enable is a
// list of XIDs that count although they are ignored, or `all`. Separated by commas; "" changes nothing.
func ParseXIDs(disable, enable string) (XIDs, error) {
	var x XIDs
	var err error
	if x.none, x.ignored, err = parseXIDs(disable, "all", "xids"); err != nil {
		return x, fmt.Errorf("disabled health checks: %w", err)
	}
	if x.all, x.counted, err = parseXIDs(enable, "all"); err != nil {
		return x, fmt.Errorf("enabled health checks: %w", err)
	}
	return x, nil
}

func parseXIDs(text string, every ...string) (all bool, list []int, err error) {
	for item := range strings.SplitSeq(text, ",") {
		item = strings.TrimSpace(strings.ToLower(item))
		if item == "" {
			continue
		}
		if slices.Contains(every, item) {
			all = true
			continue
		}
		n, err := strconv.Atoi(item)
		if err != nil || n < 1 || n > 9999 {
			return false, nil, fmt.Errorf("%q is not an XID, which is a number, nor %s", item, strings.Join(every, " or "))
		}
		list = append(list, n)
	}
	return all, list, nil
}

// Fault is true of an error that makes the GPU unhealthy.
func (x XIDs) Fault(xid int) bool {
	switch {
	case x.all || slices.Contains(x.counted, xid):
		return true
	case x.none || slices.Contains(x.ignored, xid):
		return false
	}
	return !slices.Contains(applicationXIDs, xid)
}
