package charttest

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// value is one that can be set: its path, its default as JSON, and its comment.
type value struct{ path, def, comment string }

// values reads values.yaml: a key with a comment is a value, one without is a group of them.
func values(t *testing.T) []value {
	t.Helper()
	text, err := os.ReadFile(chart + "/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var document yaml.Node
	if err := yaml.Unmarshal(text, &document); err != nil {
		t.Fatal(err)
	}
	var out []value
	var walk func(prefix string, n *yaml.Node)
	walk = func(prefix string, n *yaml.Node) {
		for i := 0; i < len(n.Content); i += 2 {
			key, child := n.Content[i], n.Content[i+1]
			path := prefix + key.Value
			comment := strings.Join(strings.Fields(strings.NewReplacer("\n#", " ", "#", "").Replace(key.HeadComment)), " ")
			if comment == "" && child.Kind == yaml.MappingNode {
				walk(path+".", child)
				continue
			}
			if comment == "" {
				t.Errorf("%s has no comment", path)
			}
			var v any
			if err := child.Decode(&v); err != nil {
				t.Fatal(err)
			}
			def, err := json.Marshal(v)
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, value{path, string(def), comment})
		}
	}
	walk("", document.Content[0])
	return out
}

// The schema has the values, all of them and no other.
func TestSchema(t *testing.T) {
	text, err := os.ReadFile(chart + "/values.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	type schema struct {
		Properties map[string]*schema
		Additional any `json:"additionalProperties"`
	}
	var top schema
	if err := json.Unmarshal(text, &top); err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	var walk func(prefix string, s *schema)
	walk = func(prefix string, s *schema) {
		for key, child := range s.Properties {
			if child.Properties == nil {
				known[prefix+key] = true
			} else if child.Additional != false {
				t.Errorf("%s%s takes what it does not know", prefix, key)
			}
			walk(prefix+key+".", child)
		}
	}
	walk("", &top)
	delete(known, "global") // Helm's own
	for _, v := range values(t) {
		if !known[v.path] {
			t.Errorf("the schema does not have %s", v.path)
		}
		delete(known, v.path)
	}
	if len(known) > 0 {
		t.Errorf("the schema has %v, values.yaml does not", known)
	}
}

// The table in the documentation is that of values.yaml.
func TestValuesTable(t *testing.T) {
	const page, begin, end = "../../docs/install.md", "<!-- values: generated -->\n", "<!-- values: end -->\n"
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := strings.Cut(string(text), begin)
	old, after, ended := strings.Cut(rest, end)
	if !found || !ended {
		t.Fatalf("%s has no place for the table", page)
	}
	var table strings.Builder
	table.WriteString("| value | default | meaning |\n| --- | --- | --- |\n")
	for _, v := range values(t) {
		fmt.Fprintf(&table, "| `%s` | `%s` | %s |\n", v.path, v.def, strings.ReplaceAll(v.comment, "|", "\\|"))
	}
	if *update {
		if err := os.WriteFile(page, []byte(before+begin+table.String()+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if old != table.String() {
		t.Errorf("the table in %s is not that of values.yaml (make chart CHART_ARGS=-update)", page)
	}
}
