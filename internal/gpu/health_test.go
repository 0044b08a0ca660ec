package gpu

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Each file of testdata/health has lines of input, and after each that changes a state, `> ` and what is so
// then. Input: SECONDS GPU xid N | SECONDS GPU recall N [energy=N] | SECONDS GPU reading [recovery=N] [energy=N] [error=CODE] |
// SECONDS - reloaded | SECONDS - unreachable. GPU - is one that the driver did not name.
func TestJudge(t *testing.T) {
	files, err := filepath.Glob("testdata/health/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if got := playHealth(t, string(data)); got != string(data) {
			t.Errorf("%s:\n%s", file, got)
			if os.Getenv("UPDATE") != "" {
				_ = os.WriteFile(file, []byte(got), 0o644)
			}
		}
	}
}

func playHealth(t *testing.T, script string) string {
	var out strings.Builder
	j := NewJudge(XIDs{}, 5*time.Second)
	start := time.Unix(0, 0)
	var order []string
	last := map[string]State{}
	for line := range strings.Lines(script) {
		if strings.HasPrefix(line, ">") {
			continue
		}
		out.WriteString(line)
		f := strings.Fields(line)
		if len(f) < 3 || strings.HasPrefix(line, "#") {
			continue
		}
		seconds, err := strconv.ParseFloat(f[0], 64)
		if err != nil {
			t.Fatal(line)
		}
		now := start.Add(time.Duration(seconds * float64(time.Second)))
		uuid := strings.TrimPrefix(f[1], "-")
		switch f[2] {
		case "xid":
			n, _ := strconv.Atoi(f[3])
			j.XID(now, XID{UUID: uuid, XID: n})
		case "recall":
			n, _ := strconv.Atoi(f[3])
			fault := Fault{UUID: uuid, XID: n}
			if d := readingOf(t, uuid, f[4:]); d.Energy != nil {
				fault.Energy = *d.Energy
			}
			j.Recall(now, fault)
			if j.gpus[uuid] != nil {
				order, last[uuid] = append(order, uuid), State{}
			}
		case "reading":
			j.Reading(now, readingOf(t, uuid, f[3:]))
			if _, known := last[uuid]; !known {
				order = append(order, uuid)
				last[uuid] = State{}
			}
		case "reloaded":
			j.Reloaded()
		case "unreachable":
			j.Unreachable(now, "no driver")
		default:
			t.Fatal(line)
		}
		for _, uuid := range order {
			if s := j.State(uuid); s != last[uuid] {
				last[uuid] = s
				text := "healthy"
				if !s.Healthy {
					text = "unhealthy: " + s.Reason
				}
				fmt.Fprintf(&out, "> %s since %g: %s\n", uuid, s.Since.Sub(start).Seconds(), text)
			}
		}
	}
	return out.String()
}

func readingOf(t *testing.T, uuid string, fields []string) Device {
	d := Device{UUID: uuid}
	for _, f := range fields {
		key, value, _ := strings.Cut(f, "=")
		n, err := strconv.Atoi(value)
		if err != nil {
			t.Fatal(f)
		}
		switch key {
		case "recovery":
			d.Recovery = &n
		case "energy":
			e := uint64(n)
			d.Energy = &e
		case "error":
			d.Code, d.Error = n, fmt.Sprintf("error %d", n)
		default:
			t.Fatal(f)
		}
	}
	return d
}

func TestXIDs(t *testing.T) {
	for _, c := range []struct{ disable, enable, faults, others string }{
		{"", "", "48 79 63 74 119", "13 31 43 45 68 109 154"},
		{"63, 74", "", "48 79", "63 74 13"},
		{"all", "", "", "48 79 13"},
		{"xids", "79", "79", "48 13"},
		{"", "13", "13 48", "31"},
		{"48", "ALL", "48 13 31", ""},
	} {
		x, err := ParseXIDs(c.disable, c.enable)
		if err != nil {
			t.Fatal(err)
		}
		for want, list := range map[bool]string{true: c.faults, false: c.others} {
			for _, f := range strings.Fields(list) {
				if n, _ := strconv.Atoi(f); x.Fault(n) != want {
					t.Errorf("disable %q, enable %q: XID %d: %v", c.disable, c.enable, n, !want)
				}
			}
		}
	}
	for _, bad := range []string{"x", "0", "-1", "13;14", "99999"} {
		if _, err := ParseXIDs(bad, ""); err == nil || !strings.Contains(err.Error(), "is not an XID") {
			t.Errorf("%q: %v", bad, err)
		}
		if _, err := ParseXIDs("", bad); err == nil {
			t.Errorf("%q enabled", bad)
		}
	}
	if _, err := ParseXIDs("", "xids"); err == nil {
		t.Error("xids enabled")
	}
}

func FuzzParseXIDs(f *testing.F) {
	f.Add("all", "")
	f.Add("13,31, 43", "xids")
	f.Fuzz(func(t *testing.T, disable, enable string) {
		x, err := ParseXIDs(disable, enable)
		if err != nil {
			return
		}
		if again, err := ParseXIDs(strings.ToUpper(disable), " "+enable+","); err != nil || fmt.Sprint(again) != fmt.Sprint(x) {
			t.Errorf("%q, %q: %v, %v, %v", disable, enable, x, again, err)
		}
	})
}
