package main

import (
	"encoding/json"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// liar keeps its slice's GPU time in the ledger from growing.
const liar = `
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include "tranche_abi.h"
int main(int argc, char **argv)
{
	int fd = open(argv[1], O_RDWR);
	struct tr_ledger *l = mmap(0, sizeof *l, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	for (;; usleep(300)) {
		__atomic_store_n(&l->account[0].gpu_time_ns, 1000, __ATOMIC_SEQ_CST);
		for (int i = 0; i < 8; i++)
			__atomic_store_n(&l->slot[i].dev[0].gpu_time_ns, 0, __ATOMIC_SEQ_CST);
	}
}
`

// A tenant that says that it used nothing gains nothing by it for long: the driver saw what it used.
func TestLiar(t *testing.T) {
	b, load := newBox(t), gpuload(t)
	exe := filepath.Join(t.TempDir(), "liar")
	cc := exec.Command("cc", "-std=gnu11", "-I../../include", "-xc", "-", "-o", exe)
	cc.Stdin = strings.NewReader(liar)
	if out, err := cc.CombinedOutput(); err != nil {
		t.Fatalf("cc: %v\n%s", err, out)
	}
	const seconds = "18"
	gpu := load + " --kernel 300us --json --time " + seconds
	// The library directory's name is the slice's id.
	lie := "id=$(basename $(dirname ${LD_LIBRARY_PATH%%:*})); " + exe + " " + filepath.Join(b.lookup("TRANCHE_STATE_DIR"), "sim/*/slices/$id/ledger") + " & " + gpu + "; kill $!"
	honest := b.command(append([]string{"run", "--sim", "a100-80g", "--cores", "60", "--strict", "off", "--"}, strings.Fields(gpu)...)...)
	liar := b.command("run", "--sim", "a100-80g", "--cores", "20", "--strict", "off", "--", "sh", "-c", lie)
	var outs [2]strings.Builder
	for i, cmd := range []*exec.Cmd{honest, liar} {
		cmd.Stdout, cmd.Stderr = &outs[i], &outs[i]
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
	}
	var shares [2][]float64
	for i, cmd := range []*exec.Cmd{honest, liar} {
		_ = cmd.Wait()
		var got struct {
			Intervals []float64 `json:"intervals"`
		}
		if err := json.Unmarshal([]byte(strings.TrimSpace(outs[i].String())), &got); err != nil {
			t.Fatalf("%v: %s", err, outs[i].String())
		}
		shares[i] = got.Intervals
	}
	t.Logf("sim: honest, of 60: %.2f", shares[0])
	t.Logf("sim: liar, of 20: %.2f", shares[1])
	mean := func(all []float64, from int) float64 {
		sum := 0.0
		for _, s := range all[from:] {
			sum += s
		}
		return sum / float64(len(all)-from)
	}
	if early := mean(shares[1][:4], 0); early < 0.3 {
		t.Errorf("the lie does not pay at first (%.2f): nothing is tested", early)
	}
	if late := mean(shares[1], 8); late > 0.25 {
		t.Errorf("the lie pays: %.2f of 0.20", late)
	}
	if late := mean(shares[0], 8); late < 0.55 {
		t.Errorf("the honest one has %.2f of 0.60", late)
	}
}
