package main

import (
	"fmt"
	"html"
	"strings"
)

// bar is a tenant's line in the plot: what it got in the runs, against its target.
type bar struct {
	name              string
	target, mid       float64
	low, high, within float64
}

const (
	plotLeft, plotWide, plotRow = 330, 560, 22
	plotTop, plotBottom         = 46, 30
)

// plot draws bars as SVG: the median as a bar, the runs as a line over it, the target as a tick in the
// band that is allowed.
func plot(title string, bars []bar) string {
	var s strings.Builder
	height := plotTop + plotRow*len(bars) + plotBottom
	x := func(percent float64) float64 { return plotLeft + plotWide*percent/100 }
	fmt.Fprintf(&s, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="12">`+"\n",
		plotLeft+plotWide+60, height)
	fmt.Fprintf(&s, `<rect width="100%%" height="100%%" fill="white"/><text x="10" y="20" font-size="15">%s</text>`+"\n", html.EscapeString(title))
	for p := 0.0; p <= 100; p += 10 {
		fmt.Fprintf(&s, `<line x1="%.1f" x2="%.1f" y1="%d" y2="%d" stroke="#ddd"/><text x="%.1f" y="%d" text-anchor="middle" fill="#555">%.0f</text>`+"\n",
			x(p), x(p), plotTop-8, height-plotBottom, x(p), height-10, p)
	}
	for i, b := range bars {
		y := float64(plotTop + plotRow*i)
		fmt.Fprintf(&s, `<text x="%d" y="%.1f" text-anchor="end">%s</text>`, plotLeft-8, y+12, html.EscapeString(b.name))
		fmt.Fprintf(&s, `<rect x="%d" y="%.1f" width="%.1f" height="12" fill="#7aa6d8"/>`, plotLeft, y+2, x(b.mid)-plotLeft)
		fmt.Fprintf(&s, `<rect x="%.1f" y="%.1f" width="%.1f" height="16" fill="#2a2" fill-opacity="0.25"/>`, x(b.target-b.within), y, x(b.target+b.within)-x(b.target-b.within))
		fmt.Fprintf(&s, `<line x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1f" stroke="#161" stroke-width="2"/>`, x(b.target), x(b.target), y, y+16)
		fmt.Fprintf(&s, `<line x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1f" stroke="#123" stroke-width="2"/>`, x(b.low), x(b.high), y+8, y+8)
		fmt.Fprintf(&s, `<text x="%.1f" y="%.1f" fill="#123">%.2f</text>`+"\n", x(max(b.high, b.target+b.within))+5, y+12, b.mid)
	}
	s.WriteString("</svg>\n")
	return s.String()
}
