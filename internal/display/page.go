package display

import (
	_ "embed"
	"fmt"
	"html/template"
	"net/http"
	"strings"
	"time"

	"tranche.dev/tranche/internal/quantity"
)

//go:embed page.html
var pageText string

func parsePage() (*template.Template, error) {
	return template.New("page").Funcs(template.FuncMap{
		"bytes":   func(b uint64) string { return quantity.Bytes(b).String() },
		"free":    func(b int64) string { return quantity.Bytes(max(b, 0)).String() },
		"percent": percent,
		"limit":   limit,
		"cores":   cores,
		"lasted":  func(d time.Duration) string { return d.Round(time.Second / 10).String() },
		"micro":   func(d time.Duration) string { return d.Round(time.Microsecond).String() },
		"list":    list,
	}).Parse(pageText)
}

// page shows the node to people.
func (s *Server) page(w http.ResponseWriter, _ *http.Request) {
	var b strings.Builder
	if err := s.template.Execute(&b, struct {
		Snapshot
		NotReady []string
	}{s.c.Source.Snapshot(), s.c.Ready()}); err != nil {
		answer(w, http.StatusInternalServerError, err.Error())
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	_, _ = w.Write([]byte(b.String()))
}

func percent(v float64) string {
	if v < 0 {
		return "–"
	}
	return fmt.Sprintf("%.0f %%", v)
}

func limit(b uint64) string {
	if b == 0 {
		return "no limit"
	}
	return quantity.Bytes(b).String()
}

func cores(p Part) string {
	if p.Ceiling > p.Cores {
		return fmt.Sprintf("%d–%d", p.Cores, p.Ceiling)
	}
	return fmt.Sprint(p.Cores)
}

// list is some numbers of what may be hundreds.
func list(pids []int) string {
	const most = 6
	var parts []string
	for i, p := range pids {
		if i == most {
			parts = append(parts, fmt.Sprintf("+%d", len(pids)-most))
			break
		}
		parts = append(parts, fmt.Sprint(p))
	}
	return strings.Join(parts, " ")
}
