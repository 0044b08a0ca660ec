// Command scheduler measures the extender: decisions in process and over HTTP on a large cluster, beside a server that does nothing but exchange the same
// bodies; and, with a trace, how many GPUs are allocated when a workload goes through the extender's protocol.
package main

import (
	"flag"
	"fmt"
	"os"

	"tranche.dev/tranche/bench/report"
)

func main() {
	nodes := flag.Int("nodes", 5000, "nodes of 8 GPUs; a second run has twice as many")
	count := flag.Int("decisions", 1000, "decisions measured in each case")
	traceNodes := flag.String("trace-nodes", "", "`file` with the nodes of a trace")
	tracePods := flag.String("trace-pods", "", "`file` with its pods")
	seeds := flag.Int("seeds", 3, "runs of the trace, from seed 42 on")
	skip := flag.Bool("trace-only", false, "only the trace")
	out := flag.String("json", "", "`file` for the rows; default: only standard output")
	check := flag.Bool("check", false, "end with 1 when a target is missed")
	flag.Parse()
	rows, err := measure(*nodes, *count, *skip, *traceNodes, *tracePods, *seeds)
	if err == nil {
		err = report.Finish(rows, *out, *check)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench/scheduler:", err)
		os.Exit(1)
	}
}

func measure(nodes, count int, traceOnly bool, traceNodes, tracePods string, seeds int) ([]report.Row, error) {
	var rows []report.Row
	if !traceOnly {
		r, err := scale(nodes, count)
		if err != nil {
			return nil, err
		}
		rows = append(rows, r...)
	}
	if traceNodes == "" || tracePods == "" {
		fmt.Fprintln(os.Stderr, "bench/scheduler: no trace given: that part is left out")
		return rows, nil
	}
	r, err := trace(traceNodes, tracePods, seeds)
	return append(rows, r...), err
}

// told is a figure without a target.
func told(name, metric, unit string, value float64, label string) report.Row {
	return report.Row{Case: name, Metric: metric, Unit: unit, Value: value, Label: "sim: " + label}
}

// most is one that should not be more than the target.
func most(name, metric, unit string, value, target float64, label string) report.Row {
	r := told(name, metric, unit, value, label)
	r.Target, r.Better = target, "lower"
	return r
}
