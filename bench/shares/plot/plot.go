// Package plot draws the suite's figures as SVG: lines over time, and bars.
package plot

import (
	"bytes"
	"fmt"
	"html"
	"math"
	"os"
	"path/filepath"
)

// Series is one line. Level, if not 0, is drawn as a dashed line in the same colour.
type Series struct {
	Name  string
	X, Y  []float64
	Level float64
}

// Bar is one value, with the limit that it must not pass (0: none).
type Bar struct {
	Name  string
	Value float64
	Limit float64
}

const (
	width, height            = 760, 360
	left, right, top, bottom = 52, 130, 34, 40
)

func colours() []string {
	return []string{"#1b6ca8", "#c8102e", "#2e7d32", "#8e44ad", "#e67e22", "#00838f", "#795548", "#546e7a"}
}

type canvas struct {
	bytes.Buffer
	x0, x1, y0, y1 float64
}

func (c *canvas) head(w, h int, title string) {
	fmt.Fprintf(c, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="11">`+"\n", w, h)
	fmt.Fprintf(c, `<rect width="%d" height="%d" fill="white"/><text x="%d" y="20" font-size="14">%s</text>`+"\n",
		w, h, left, html.EscapeString(title))
}

func (c *canvas) px(x float64) float64 { return left + (x-c.x0)/(c.x1-c.x0)*(width-left-right) }
func (c *canvas) py(y float64) float64 {
	return height - bottom - (y-c.y0)/(c.y1-c.y0)*(height-top-bottom)
}

// step is a round distance for about n ticks.
func step(span float64, n int) float64 {
	raw := span / float64(n)
	base := math.Pow(10, math.Floor(math.Log10(raw)))
	for _, m := range []float64{1, 2, 5} {
		if raw <= m*base {
			return m * base
		}
	}
	return 10 * base
}

func (c *canvas) axes(xlabel, ylabel string) {
	for y, s := c.y0, step(c.y1-c.y0, 5); y <= c.y1+s/1000; y += s {
		fmt.Fprintf(c, `<line x1="%d" x2="%d" y1="%.1f" y2="%.1f" stroke="#ddd"/><text x="%d" y="%.1f" text-anchor="end">%g</text>`+"\n",
			left, width-right, c.py(y), c.py(y), left-5, c.py(y)+4, y)
	}
	for x, s := c.x0, step(c.x1-c.x0, 8); x <= c.x1+s/1000; x += s {
		fmt.Fprintf(c, `<text x="%.1f" y="%d" text-anchor="middle">%g</text>`+"\n", c.px(x), height-bottom+15, x)
	}
	fmt.Fprintf(c, `<text x="%d" y="%d" text-anchor="middle">%s</text>`+"\n", left+(width-left-right)/2, height-8, html.EscapeString(xlabel))
	fmt.Fprintf(c, `<text transform="translate(14,%d) rotate(-90)" text-anchor="middle">%s</text>`+"\n",
		top+(height-top-bottom)/2, html.EscapeString(ylabel))
}

// Lines draws series over a common axis, from 0 to most.
func Lines(path, title, xlabel, ylabel string, most float64, series []Series) error {
	c := &canvas{x0: math.Inf(1), x1: math.Inf(-1), y1: most}
	for _, s := range series {
		for _, x := range s.X {
			c.x0, c.x1 = min(c.x0, x), max(c.x1, x)
		}
	}
	if !(c.x1 > c.x0) {
		c.x0, c.x1 = 0, 1
	}
	c.head(width, height, title)
	c.axes(xlabel, ylabel)
	for i, s := range series {
		c.line(s, colours()[i%len(colours())], i)
	}
	return c.write(path)
}

func (c *canvas) line(s Series, colour string, i int) {
	if s.Level != 0 {
		fmt.Fprintf(c, `<line x1="%d" x2="%d" y1="%.1f" y2="%.1f" stroke="%s" stroke-dasharray="5,4" opacity="0.6"/>`+"\n",
			left, width-right, c.py(s.Level), c.py(s.Level), colour)
	}
	c.WriteString(`<polyline fill="none" stroke-width="1.4" stroke="` + colour + `" points="`)
	for k := range s.X {
		fmt.Fprintf(c, "%.1f,%.1f ", c.px(s.X[k]), c.py(min(max(s.Y[k], c.y0), c.y1)))
	}
	c.WriteString(`"/>` + "\n")
	fmt.Fprintf(c, `<text x="%d" y="%d" fill="%s">%s</text>`+"\n", width-right+8, top+12+16*i, colour, html.EscapeString(s.Name))
}

// Bars draws one bar per value, top down; those past their limit are red.
func Bars(path, title, unit string, bars []Bar) error {
	const row, names = 15, 330
	most := 1e-9
	for _, b := range bars {
		most = max(most, b.Value, b.Limit)
	}
	c := &canvas{}
	h := top + row*len(bars) + 20
	c.head(width, h, title)
	scale := func(v float64) float64 { return names + v/most*(width-names-70) }
	for i, b := range bars {
		y, colour := top+row*i, colours()[0]
		if b.Limit != 0 && b.Value > b.Limit {
			colour = colours()[1]
		}
		fmt.Fprintf(c, `<text x="%d" y="%d" text-anchor="end">%s</text><rect x="%d" y="%d" width="%.1f" height="%d" fill="%s"/>`,
			names-6, y+10, html.EscapeString(b.Name), names, y+1, scale(b.Value)-names, row-4, colour)
		if b.Limit != 0 {
			fmt.Fprintf(c, `<line x1="%.1f" x2="%.1f" y1="%d" y2="%d" stroke="#333" stroke-width="2"/>`, scale(b.Limit), scale(b.Limit), y, y+row-2)
		}
		fmt.Fprintf(c, `<text x="%.1f" y="%d">%.3g %s</text>`+"\n", max(scale(b.Value), scale(b.Limit))+5, y+10, b.Value, html.EscapeString(unit))
	}
	return c.write(path)
}

func (c *canvas) write(path string) error {
	c.WriteString("</svg>\n")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, c.Bytes(), 0o644)
}
