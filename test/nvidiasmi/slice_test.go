package nvidiasmi

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"tranche.dev/tranche/internal/tenant"
	"tranche.dev/tranche/test/fixture"
)

// The slice has the second GPU of two: 8 GiB and 30 % of it. On both GPUs somebody else computes.
const (
	hiddenUUID = "GPU-5e110000-0000-4000-8000-00000000000a"
	ownUUID    = "GPU-5e110000-0000-4000-8000-00000000000b"
	contextMiB = 300
	limitMiB   = 8192
	cores      = 30
)

var twoGPUs = []string{"gpu model=a100-40g context=300Mi uuid=" + hiddenUUID, "gpu model=a100-80g context=300Mi uuid=" + ownUUID}

// inside is the same machine as seen in a slice of it.
func (m machine) inside() machine {
	s := fixture.NewSlice(m.t, fixture.Build("lib"), fixture.Build("sim"), tenant.Device{
		UUID: ownUUID, MemoryLimit: limitMiB * mib, MemoryLimited: true, ContextBytes: contextMiB * mib,
		Cores: cores, CoresCeiling: cores, CoresLimited: true,
	})
	m.lib = s.Lib
	return m
}

// numbers returns the lines of view.c that begin with a word, without it.
func numbers(t *testing.T, out, word string) (rows [][]int) {
	t.Helper()
	for line := range strings.Lines(out) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] != word {
			continue
		}
		var row []int
		for _, f := range fields[1:] {
			if n, err := strconv.Atoi(f); err == nil {
				row = append(row, n)
			}
		}
		rows = append(rows, row)
	}
	return rows
}

func wantRows(t *testing.T, out, word string, rows ...[]int) {
	t.Helper()
	if got := numbers(t, out, word); !slices.EqualFunc(got, rows, slices.Equal[[]int]) {
		t.Errorf("%s: %v, want %v in\n%s", word, got, rows, out)
	}
}

// near tells whether a share is the slice's, within some points.
func near(share, points int) bool { return share >= cores-points && share <= cores+points }

// shareOf tells whether one process, and no other, is shown with about the slice's share of the GPU.
func shareOf(t *testing.T, out, word string, pid int) bool {
	t.Helper()
	rows := numbers(t, out, word)
	return len(rows) == 1 && rows[0][0] == pid && near(rows[0][1], 12)
}

// wantShare checks that.
func wantShare(t *testing.T, out, word string, pid int) {
	t.Helper()
	if !shareOf(t, out, word, pid) {
		t.Errorf("%s: %v, want process %d near %d %% in\n%s", word, numbers(t, out, word), pid, cores, out)
	}
}

func TestSlice(t *testing.T) {
	view := fixture.Compile(t, "test/nvidiasmi/testdata/view.c", "-Iinclude", "-ldl")
	each(t, twoGPUs, func(t *testing.T, host machine) {
		slice := host.inside()
		others := []int{host.load("--gpu", "0", "--alloc", "plain:512Mi:1", "--kernel", "5ms", "--time", "90"),
			host.load("--gpu", "1", "--alloc", "plain:1Gi:3", "--kernel", "5ms", "--rate", "20", "--time", "90")}
		const used = contextMiB + 512 // and the 2 MiB of a module, which the supervisor would measure
		own := slice.load("--alloc", "plain:256Mi:2", "--kernel", "5ms", "--time", "90")

		// The host sees all three; until then there is nothing to hide.
		eventually(t, "three busy processes on the machine", func() bool {
			pmon := host.must("pmon", "-c", "1")
			return pmonRow(pmon, 0, others[0]) > 0 && pmonRow(pmon, 1, others[1]) > 0 && pmonRow(pmon, 1, own) > 0 &&
				host.truth(others[1]) >= (contextMiB+3072)*mib && host.truth(own) >= (contextMiB+512)*mib
		})
		// The compute limit holds after a second or two. (The other one on the GPU does little: what a
		// kernel takes is measured by events, between which somebody else may have had the GPU.)
		// NVML's figures are of the last tenth of a second, in which one or two kernels of 5 ms more or less are
		// 5 or 10 points, so one look may be off; a wrong figure never comes into its bounds.
		var out string
		eventually(t, "the slice at its share", func() bool {
			out = slice.program(view)
			n := numbers(t, out, "rates")
			return len(n) == 1 && near(n[0][0], 3) && shareOf(t, out, "sample", own) && shareOf(t, out, "info", own)
		})
		checkNVML(t, out, own, used)
		checkSMI(t, slice, own, others, used)
	})
}

// checkNVML checks what the public functions show.
func checkNVML(t *testing.T, out string, own, used int) {
	t.Helper()
	wantRows(t, out, "count", []int{1})
	amounts := []int{limitMiB * mib, used * mib, (limitMiB - used) * mib}
	wantRows(t, out, "memory", amounts, amounts)
	for _, version := range []string{"_v1", "_v2", "_v3"} {
		wantRows(t, out, "compute"+version, []int{own, used * mib})
		wantRows(t, out, "graphics"+version)
		wantRows(t, out, "mps"+version)
	}
	wantShare(t, out, "sample", own)
	wantShare(t, out, "info", own)
	rates := numbers(t, out, "rates")
	if len(rates) != 1 || rates[0][0] < cores-5 || rates[0][0] > cores+5 || rates[0][1] != (used*100+limitMiB/2)/limitMiB {
		t.Errorf("utilisation %v, want about [%d %d]", rates, cores, (used*100+limitMiB/2)/limitMiB)
	}
}

// checkSMI checks every view of nvidia-smi that names GPUs or processes.
func checkSMI(t *testing.T, slice machine, own int, others []int, used int) {
	t.Helper()
	var table, pmon string
	share := regexp.MustCompile(fmt.Sprintf(`%dMiB / +%dMiB \| +(2[5-9]|3[0-5])%%`, used, limitMiB))
	eventually(t, "the table with the slice's share", func() bool {
		table = slice.must()
		return share.MatchString(table)
	})
	wantAll(t, table,
		fmt.Sprintf(`(?m)^\| +0 +N/A +N/A +%d +C .*gpuload +%dMiB`, own, used))
	eventually(t, "pmon with the slice's share", func() bool {
		pmon = slice.must("pmon", "-c", "1")
		return near(pmonRow(pmon, 0, own), 12)
	})
	list := slice.must("-L")
	wantAll(t, list, `(?m)^GPU 0: .*`+ownUUID)
	if rows := slice.csv("--query-compute-apps=pid,used_memory"); len(rows) != 1 || rows[0][0] != strconv.Itoa(own) || rows[0][1] != strconv.Itoa(used) {
		t.Errorf("compute processes %v, want [[%d %d]]", rows, own, used)
	}
	views := []string{table, pmon, list, slice.must("-q"), slice.must("topo", "-m"), slice.must("dmon", "-c", "1")}
	for _, out := range views {
		if strings.Contains(out, hiddenUUID) || regexp.MustCompile(`GPU ?1\b`).MatchString(out) {
			t.Errorf("the other GPU is shown:\n%s", out)
		}
		for _, pid := range others {
			if regexp.MustCompile(fmt.Sprintf(`\b%d\b`, pid)).MatchString(out) {
				t.Errorf("somebody else's process %d is shown:\n%s", pid, out)
			}
		}
	}
	if out, code := slice.run("-i", hiddenUUID); code == 0 {
		t.Errorf("nvidia-smi -i finds the other GPU:\n%s", out)
	}
}

// pmonRow is the utilisation that pmon shows for a process on a GPU; -1: it is not shown.
func pmonRow(out string, gpu, pid int) int {
	row := regexp.MustCompile(fmt.Sprintf(`(?m)^ +%d +%d +C +(\d+) `, gpu, pid)).FindStringSubmatch(out)
	if row == nil {
		return -1
	}
	n, _ := strconv.Atoi(row[1])
	return n
}

// With a driver that this library does not know, nvidia-smi still runs and shows nobody else.
func TestSliceOfUnknownDriver(t *testing.T) {
	for _, r := range releases {
		for _, driver := range []string{"530.30.02", "580.65.06"} {
			t.Run(r.smi+"_on_"+driver, func(t *testing.T) {
				r.driver = driver
				host := newMachine(t, r, twoGPUs...)
				slice := host.inside()
				other := host.load("--gpu", "1", "--alloc", "plain:64Mi:1", "--kernel", "5ms", "--time", "60")
				eventually(t, "a busy process", func() bool { return host.truth(other) > contextMiB*mib })
				wantAll(t, slice.must("-L"), `(?m)^GPU 0: .*`+ownUUID)
				for _, out := range []string{slice.must(), slice.must("pmon", "-c", "1"), slice.must("-q")} {
					if regexp.MustCompile(fmt.Sprintf(`\b%d\b`, other)).MatchString(out) {
						t.Errorf("somebody else's process %d is shown:\n%s", other, out)
					}
				}
			})
		}
	}
}
