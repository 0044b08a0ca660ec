package simulate

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"text/tabwriter"
)

// WriteJSON writes one row a point, an array.
func WriteJSON(w io.Writer, points []Point) error {
	e := json.NewEncoder(w)
	e.SetIndent("", " ")
	return e.Encode(points)
}

// WriteCSV writes one line a point, with the fields of the JSON rows; memory_pct only if GPU memory was counted. It
// writes the zeros that JSON leaves out.
func WriteCSV(w io.Writer, points []Point) error {
	c := csv.NewWriter(w)
	with := hasMemory(points)
	rows := [][]string{{"policy", "seed", "arrived_pct", "allocated_pct", "fragmented_pct", "refused", "refused_largest"}}
	if with {
		rows[0] = append(rows[0], "memory_pct")
	}
	for _, p := range points {
		row := []string{p.Policy, strconv.FormatInt(p.Seed, 10), strconv.Itoa(p.Arrived)}
		figures := []float64{p.Allocated, p.Fragmented, p.Refused, p.RefusedLargest}
		if with {
			figures = append(figures, p.Memory)
		}
		for _, v := range figures {
			row = append(row, strconv.FormatFloat(v, 'f', 4, 64))
		}
		rows = append(rows, row)
	}
	return c.WriteAll(rows)
}

// hasMemory tells whether GPU memory was counted.
func hasMemory(points []Point) bool {
	return slices.ContainsFunc(points, func(p Point) bool { return p.Memory > 0 })
}

// Mean is a figure over the seeds of a policy.
type Mean struct {
	Mean float64
	// Spread is the standard deviation; 0 for one seed.
	Spread float64
	N      int
}

func mean(values []float64) Mean {
	m := Mean{N: len(values)}
	for _, v := range values {
		m.Mean += v / float64(m.N)
	}
	if m.N > 1 {
		for _, v := range values {
			m.Spread += (v - m.Mean) * (v - m.Mean) / float64(m.N-1)
		}
		m.Spread = math.Sqrt(m.Spread)
	}
	return m
}

// At is what of a policy's runs was allocated, by seed, when arrived per cent had come, or at the last point
// before that.
func At(points []Point, policy string, arrived int, field func(Point) float64) map[int64]float64 {
	out := map[int64]float64{}
	for _, p := range points {
		if p.Policy == policy && p.Arrived <= arrived {
			out[p.Seed] = field(p)
		}
	}
	return out
}

func allocated(p Point) float64  { return p.Allocated }
func fragmented(p Point) float64 { return p.Fragmented }
func memory(p Point) float64     { return p.Memory }

func values(m map[int64]float64) []float64 {
	var seeds []int64
	for s := range m {
		seeds = append(seeds, s)
	}
	slices.Sort(seeds)
	var out []float64
	for _, s := range seeds {
		out = append(out, m[s])
	}
	return out
}

// policies of the points in the order in which they come.
func policies(points []Point) []string {
	var out []string
	for _, p := range points {
		if !slices.Contains(out, p.Policy) {
			out = append(out, p.Policy)
		}
	}
	return out
}

// last is the highest arrived per cent.
func last(points []Point) int {
	most := 0
	for _, p := range points {
		most = max(most, p.Arrived)
	}
	return most
}

// WriteTable writes, for each policy, the GPUs allocated and fragmented, and their memory if it counts, at 50, 80 and
// 100 per cent arrived and at the end, mean and standard deviation over the seeds; a dash where a seed has no point so
// early. Then how many pods were refused early, where all seeds have a point by then, and, if there are several policies
// and seeds, by how much the first is better than each other: the mean of the differences seed by seed, with its 95 %
// interval.
func WriteTable(w io.Writer, points []Point) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	var at []int
	for _, x := range []int{50, 80, 100, last(points)} {
		if x <= last(points) && !slices.Contains(at, x) {
			at = append(at, x)
		}
	}
	fmt.Fprint(t, "policy\tseeds")
	for _, x := range at {
		fmt.Fprintf(t, "\tallocated @%d%%\tfragmented", x)
		if hasMemory(points) {
			fmt.Fprint(t, "\tmemory")
		}
	}
	fmt.Fprintln(t)
	for _, policy := range policies(points) {
		fmt.Fprintf(t, "%s\t%d", policy, len(At(points, policy, last(points), allocated)))
		for _, x := range at {
			fmt.Fprintf(t, "\t%s\t%s", figure(points, policy, x, allocated), figure(points, policy, x, fragmented))
			if hasMemory(points) {
				fmt.Fprintf(t, "\t%s", figure(points, policy, x, memory))
			}
		}
		fmt.Fprintln(t)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if err := writeRefused(w, points); err != nil {
		return err
	}
	return writeDifferences(w, points, at)
}

// meanAt is the mean of At over the seeds; false where not all of them have a point by then.
func meanAt(points []Point, policy string, arrived int, field func(Point) float64) (Mean, bool) {
	m := mean(values(At(points, policy, arrived, field)))
	return m, m.N > 0 && m.N == len(At(points, policy, last(points), field))
}

// figure is a cell of the table.
func figure(points []Point, policy string, arrived int, field func(Point) float64) string {
	m, ok := meanAt(points, policy, arrived, field)
	if !ok {
		return "-"
	}
	return fmt.Sprintf("%.2f ± %.2f", m.Mean, m.Spread)
}

// refusedAt is when early refusals are counted, in per cent arrived: by then a cluster that is well used has room for all.
const refusedAt = 95

func writeRefused(w io.Writer, points []Point) error {
	if last(points) == 0 {
		return nil
	}
	at := min(refusedAt, last(points))
	for _, policy := range policies(points) {
		all, ok := meanAt(points, policy, at, func(p Point) float64 { return p.Refused })
		if !ok {
			continue
		}
		largest, _ := meanAt(points, policy, at, func(p Point) float64 { return p.RefusedLargest })
		if _, err := fmt.Fprintf(w, "%s: %.1f pods without room when %d %% have arrived, %.1f of them of the largest\n", policy, all.Mean, at, largest.Mean); err != nil {
			return err
		}
	}
	return nil
}

func writeDifferences(w io.Writer, points []Point, at []int) error {
	all := policies(points)
	for _, other := range all[min(1, len(all)):] {
		for _, x := range at[max(0, len(at)-2):] {
			d := Paired(points, all[0], other, x)
			if d.N < 2 {
				continue
			}
			half := Half95(d)
			if _, err := fmt.Fprintf(w, "%s - %s @%d%%: %+.2f, 95 %% interval %+.2f to %+.2f (%d seeds, paired)\n",
				all[0], other, x, d.Mean, d.Mean-half, d.Mean+half, d.N); err != nil {
				return err
			}
		}
	}
	return nil
}

// Paired is the difference of allocated GPUs of two policies, seed by seed.
func Paired(points []Point, policy, other string, arrived int) Mean {
	a, b := At(points, policy, arrived, allocated), At(points, other, arrived, allocated)
	diff := map[int64]float64{}
	for seed, v := range a {
		if o, ok := b[seed]; ok {
			diff[seed] = v - o
		}
	}
	return mean(values(diff))
}

// student is the 97.5 % quantile of Student's t by degrees of freedom, 1 to 30; beyond, the normal one.
func student(freedom int) float64 {
	table := []float64{12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
		2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042}
	if freedom < 1 || freedom > len(table) {
		return 1.96
	}
	return table[freedom-1]
}

// Half95 is half the width of the 95 % interval of a mean.
func Half95(m Mean) float64 { return student(m.N-1) * m.Spread / math.Sqrt(float64(m.N)) }
