package ps

import (
	"strings"
	"testing"
	"time"

	"tranche.dev/tranche/internal/state"
)

// What another user wrote neither acts on the terminal nor breaks the table.
func TestTableOfHostileText(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	s := state.Slice{ID: "0123456789abcdef", UID: 1 << 30, Info: state.Info{
		Name: "x\x1b[2J\u202e\u200b\n" + strings.Repeat("y", 40), Started: now.Add(1000 * time.Hour),
		Command: []string{strings.Repeat("z", 1000), "\t\u2028"},
		GPUs:    []state.GPU{{UUID: "GPU-\x07", Index: 3, Name: "n", Cores: 30, Burst: 60, Memory: 1 << 30}},
	}}
	row := entry{slice: s}.row(0, time.Second)
	if row.UUID != "GPU-?" || row.Command[1] != "??" {
		t.Errorf("%+v", row)
	}
	var out strings.Builder
	if err := WriteTable(&out, []Row{row}, now); err != nil {
		t.Fatal(err)
	}
	want := "NAME                      GPU  CORES  WANTED  USED  WAITED  MEMORY  USED  PIDS  USER        UP  COMMAND\n" +
		"x?[2J???yyyyyyyyyyyyyyy…  3    30-60  -       0%    -       1 GiB   0 B         1073741824  0s  " + strings.Repeat("z", 49) + "…\n"
	if out.String() != want {
		t.Errorf("got\n%swant\n%s", out.String(), want)
	}
}

func TestTableOfAccounts(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	wanted, got := 99.96, 30.0
	arbiter := &state.Arbiter{PID: 17, Slices: 2, Handovers: 5, HandoverP50: 21_400, HandoverP99: 190_000}
	rows := []Row{
		{ID: "1", Name: "train", Cores: 30, CoresUsed: 29.6, Memory: 8 << 30, Used: 6 << 30, PIDs: []int{17, 18}, User: "ann", Started: now.Add(-time.Hour), Command: []string{"python"},
			Account: state.Account{Launches: 7, ThrottledNs: 62e9, Wanted: &wanted, Got: &got}, Arbiter: arbiter},
		{ID: "1", Name: "train", GPU: 1, Cores: 100, Memory: 8 << 30, PIDs: []int{17}, User: "ann", Started: now, Command: []string{"python"}, Arbiter: arbiter},
	}
	var out strings.Builder
	if err := WriteTable(&out, rows, now); err != nil {
		t.Fatal(err)
	}
	want := "NAME   GPU  CORES  WANTED  USED  WAITED  MEMORY  USED   PIDS   USER  UP     COMMAND\n" +
		"train  0    30     100%    30%   1m02s   8 GiB   6 GiB  17,18  ann   1h00m  python\n" +
		"train  1    100    -       -     -       8 GiB   0 B    17     ann   0s     python\n" +
		"arbiter: train (pid 17), 2 slices, handover 21µs, p99 190µs\n"
	if out.String() != want {
		t.Errorf("got\n%swant\n%s", out.String(), want)
	}
}
