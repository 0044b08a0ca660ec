package main

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

const referencePage = "../../docs/reference.md"

// docs/reference.md has the flags and metrics that the source has; `make generate` writes them.
func TestReferencePage(t *testing.T) {
	page, err := os.ReadFile(referencePage)
	if err != nil {
		t.Fatal(err)
	}
	text := string(page)
	text = section(t, text, "flags", flagTables(
		runCommand(), setCommand(), psCommand(), doctorCommand(), schedulerCommand(nil), webhookCommand(nil), simulateCommand()))
	text = section(t, text, "metrics", metricTable(t))
	if *update {
		if err := os.WriteFile(referencePage, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if text != string(page) {
		t.Errorf("%s is not current: make generate", referencePage)
	}
}

// section puts what was generated between its marks.
func section(t *testing.T, text, name, generated string) string {
	t.Helper()
	begin, end := "<!-- "+name+": generated -->\n", "<!-- "+name+": end -->\n"
	before, rest, found := strings.Cut(text, begin)
	_, after, ended := strings.Cut(rest, end)
	if !found || !ended {
		t.Fatalf("%s has no %q or no %q", referencePage, begin, end)
	}
	return before + begin + generated + end + after
}

func flagTables(commands ...*cobra.Command) string {
	var b strings.Builder
	for _, c := range commands {
		fmt.Fprintf(&b, "\n### tranche %s\n\n| flag | default | meaning |\n| --- | --- | --- |\n", c.Name())
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if f.Hidden {
				return
			}
			value, usage := pflag.UnquoteUsage(f)
			switch value {
			case "raw": // of --version, a switch
				value = ""
			case "string", "strings":
				value = "=VALUE"
			case "":
			default:
				value = "=" + strings.ToUpper(value)
			}
			name := "`--" + f.Name + value + "`"
			if f.Shorthand != "" {
				name += ", `-" + f.Shorthand + "`"
			}
			preset := ""
			if f.DefValue != "" && f.DefValue != "[]" {
				preset = "`" + f.DefValue + "`"
			}
			fmt.Fprintf(&b, "| %s | %s | %s |\n", name, preset, strings.ReplaceAll(usage, "|", `\|`))
		})
	}
	return b.String() + "\n"
}

var (
	schedulerMetric = regexp.MustCompile(`\b(count|gauge)\("([a-z_]+)", "([^"]+)"`)
	otherMetric     = regexp.MustCompile(`(?:NewDesc\(|Name: )"(tranche_[a-z_]+)",\s+(?:Help: )?"([^"]+)"`)
)

// metricTable has the metrics of scheduler and webhook. The node's are in docs/metrics.md.
func metricTable(t *testing.T) string {
	t.Helper()
	rows := map[string]string{}
	for path, text := range sources(t, "../../internal/scheduler", "../../internal/webhook") {
		for _, m := range schedulerMetric.FindAllStringSubmatch(text, -1) {
			rows["tranche_scheduler_"+m[2]] = m[3]
		}
		for _, m := range otherMetric.FindAllStringSubmatch(text, -1) {
			rows[m[1]] = m[2]
		}
		// What is declared in another way would be missed.
		declared := strings.Count(text, `"tranche_scheduler_`) + strings.Count(text, `"tranche_webhook_`)
		found := len(otherMetric.FindAllString(text, -1)) + strings.Count(text, `{"tranche_scheduler_" + name`)
		if declared != found {
			t.Errorf("%s names %d metrics, of which %d can be read", path, declared, found)
		}
	}
	var b strings.Builder
	b.WriteString("| name | meaning |\n| --- | --- |\n")
	for _, name := range slices.Sorted(maps.Keys(rows)) {
		fmt.Fprintf(&b, "| `%s` | %s |\n", name, rows[name])
	}
	return b.String()
}

// The reference lists all annotations, labels and events that the source knows, and no others.
func TestReferenceNames(t *testing.T) {
	page, err := os.ReadFile(referencePage)
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(page), "\n## Annotations and labels\n")
	annotations, rest, _ := strings.Cut(rest, "\n## Events\n")
	events, _, _ := strings.Cut(rest, "\n## ")

	source := sources(t, "../../internal")
	same(t, "annotations", annotations, regexp.MustCompile("(?m)^\\| `((?:tranche\\.dev|tencent\\.com)/[a-zN-]+)`"), source,
		regexp.MustCompile(`"(tranche\.dev/[a-z-]+|(?:%s)?/(?:vcuda|predicate|gpu)-[a-z-]+(?:%d)?)"`), func(name string) string {
			switch name = strings.TrimPrefix(name, "%s"); name {
			case "/vcuda-core", "/vcuda-memory", "tranche.dev/node": // resources; who reports events
				return ""
			}
			if strings.HasPrefix(name, "/") {
				name = "tencent.com" + name
			}
			return strings.Replace(name, "%d", "N", 1)
		})
	reasons := regexp.MustCompile(`corev1\.EventType\w+, "(\w+)"|Reason = "(\w+)"`)
	same(t, "events", events, regexp.MustCompile("(?m)^\\| `(\\w+)`"), source, reasons, func(name string) string {
		switch name {
		case "NoDriver", "DriverMismatch", "NoGPU", "NoAnswer": // what ails the driver; its event has GPU before it
			return "GPU" + name
		case "GPU":
			return ""
		}
		return name
	})
}

// same compares the names that a page has with those in the source. known gives a name its form on the page, or "" if it is none.
func same(t *testing.T, what, page string, inPage *regexp.Regexp, source map[string]string, inSource *regexp.Regexp, known func(string) string) {
	t.Helper()
	var want, got []string
	for _, text := range source {
		for _, m := range inSource.FindAllStringSubmatch(text, -1) {
			if name := known(strings.Join(m[1:], "")); name != "" {
				want = append(want, name)
			}
		}
	}
	for _, m := range inPage.FindAllStringSubmatch(page, -1) {
		got = append(got, m[1])
	}
	slices.Sort(want)
	slices.Sort(got)
	if want = slices.Compact(want); !slices.Equal(got, want) {
		t.Errorf("%s in %s:\n%v\nin the source:\n%v", what, referencePage, got, want)
	}
}

// sources are the texts of Go files that are not tests.
func sources(t *testing.T, dirs ...string) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, dir := range dirs {
		err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			text, err := os.ReadFile(path)
			out[path] = string(text)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return out
}
