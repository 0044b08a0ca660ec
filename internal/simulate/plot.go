package simulate

import (
	"fmt"
	"html"
	"io"
	"maps"
	"slices"
	"strings"
)

// colours of the lines, from the Okabe and Ito palette, which colour-blind readers can tell apart.
func colours() []string {
	return []string{"#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999", "#8B4513", "#F0E442"}
}

// panel is one of the plot's two diagrams: x is arrived, y the field, both in per cent.
type panel struct {
	top    int
	title  string
	field  func(Point) float64
	lo, hi float64
}

const (
	plotWidth, plotHeight = 640, 260
	plotLeft              = 60
)

// WriteSVG plots GPUs allocated, and below GPUs fragmented, against arrived load, one line a policy, the mean over
// its seeds.
func WriteSVG(w io.Writer, points []Point) error {
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 %d" font-family="sans-serif" font-size="12">`+"\n", 2*plotHeight+120)
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" fill="white"/>`+"\n")
	most := 0.0
	for _, p := range points {
		most = max(most, p.Fragmented)
	}
	for _, d := range []panel{
		{30, "GPUs allocated, % of the cluster", allocated, 0, 100},
		{plotHeight + 80, "GPUs fragmented, % of the cluster", fragmented, 0, max(5, most*1.05)},
	} {
		d.draw(&b, points)
	}
	for i, policy := range policies(points) {
		y := 40 + 18*i
		fmt.Fprintf(&b, `<line x1="715" x2="740" y1="%d" y2="%d" stroke="%s" stroke-width="2"/><text x="746" y="%d">%s</text>`+"\n",
			y, y, colours()[i%len(colours())], y+4, html.EscapeString(policy))
	}
	b.WriteString("</svg>\n")
	_, err := io.WriteString(w, b.String())
	return err
}

func (d panel) draw(b *strings.Builder, points []Point) {
	end := max(last(points), 1)
	x := func(v int) float64 { return plotLeft + float64(v)/float64(end)*plotWidth }
	y := func(v float64) float64 { return float64(d.top) + plotHeight*(1-(v-d.lo)/(d.hi-d.lo)) }
	fmt.Fprintf(b, `<text x="%d" y="%d" font-weight="bold">%s</text>`+"\n", plotLeft, d.top-8, html.EscapeString(d.title))
	for i := range 6 {
		v := d.lo + (d.hi-d.lo)*float64(i)/5
		fmt.Fprintf(b, `<line x1="%d" x2="%d" y1="%.1f" y2="%.1f" stroke="#ddd"/><text x="%d" y="%.1f" text-anchor="end">%.3g</text>`+"\n",
			plotLeft, plotLeft+plotWidth, y(v), y(v), plotLeft-6, y(v)+4, v)
	}
	for v := 0; v <= end; v += max(1, (end+129)/130*10) {
		fmt.Fprintf(b, `<text x="%.1f" y="%d" text-anchor="middle">%d</text>`+"\n", x(v), d.top+plotHeight+16, v)
	}
	fmt.Fprintf(b, `<text x="%d" y="%d" text-anchor="middle">arrived, %% of the cluster's GPUs</text>`+"\n", plotLeft+plotWidth/2, d.top+plotHeight+32)
	for i, policy := range policies(points) {
		sum, n := map[int]float64{}, map[int]int{}
		for _, p := range points {
			if p.Policy == policy {
				sum[p.Arrived] += d.field(p)
				n[p.Arrived]++
			}
		}
		var line []string
		for _, v := range slices.Sorted(maps.Keys(sum)) {
			line = append(line, fmt.Sprintf("%.1f,%.1f", x(v), y(sum[v]/float64(n[v]))))
		}
		fmt.Fprintf(b, `<polyline fill="none" stroke="%s" stroke-width="2" points="%s"/>`+"\n", colours()[i%len(colours())], strings.Join(line, " "))
	}
}
