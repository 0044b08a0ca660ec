// Package simspec turns what a user writes behind --sim into the text that the simulated driver
// reads (docs/simulator.md): a short list of models, a YAML file, or a file in that text itself.
package simspec

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"sort"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Spec is a simulated machine: either its text, or the directory where it already lies.
type Spec struct {
	Text string
	// Dir, when not empty, is a directory with a file "spec".
	Dir string
}

var item = regexp.MustCompile(`^([a-z0-9][a-z0-9.-]*)(?::([0-9]{1,2}))?$`)

// Parse reads the value of --sim: `a100-80g:2`, `t4,v100-16g`, a file, or a directory.
func Parse(value string) (Spec, error) {
	info, err := os.Stat(value)
	switch {
	case err == nil && info.IsDir():
		dir, err := filepath.Abs(value)
		if _, e := os.Stat(filepath.Join(value, "spec")); err == nil && e != nil {
			err = fmt.Errorf("directory %s has no file \"spec\"", value)
		}
		return Spec{Dir: dir}, err
	case err == nil:
		return fromFile(value, info.Size())
	case strings.ContainsAny(value, "/") || strings.HasSuffix(value, ".yaml") || strings.HasSuffix(value, ".yml"):
		return Spec{}, err
	}
	var lines []string
	for part := range strings.SplitSeq(value, ",") {
		m := item.FindStringSubmatch(strings.TrimSpace(part))
		if m == nil {
			return Spec{}, fmt.Errorf("%q is not MODEL or MODEL:COUNT, as in a100-80g:2,t4", part)
		}
		line := "gpu model=" + m[1]
		if m[2] != "" {
			line += " count=" + m[2]
		}
		lines = append(lines, line)
	}
	return Spec{Text: strings.Join(lines, "\n") + "\n"}, nil
}

func fromFile(path string, size int64) (Spec, error) {
	if size > 1<<20 {
		return Spec{}, fmt.Errorf("%s is larger than 1 MiB", path)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return Spec{}, err
	}
	if ext := filepath.Ext(path); ext != ".yaml" && ext != ".yml" {
		return Spec{Text: string(data)}, nil
	}
	text, err := FromYAML(data)
	if err != nil {
		return Spec{}, fmt.Errorf("%s: %w", path, err)
	}
	return Spec{Text: text}, nil
}

// FromYAML reads the same keys as the text has: scalars of the machine at the top, `gpus` and `links`
// as lists of mappings.
//
//	driver_version: 550.163.01
//	gpus:
//	- {model: a100-80g, count: 2}
//	links:
//	- {between: [0, 1], nvlink: 12}
func FromYAML(data []byte) (string, error) {
	var doc map[string]yaml.Node
	if err := yaml.Unmarshal(data, &doc); err != nil {
		return "", err
	}
	var machine, rest []string
	for key, node := range doc {
		switch key {
		case "gpus", "links":
		default:
			v, err := scalar(key, &node)
			if err != nil {
				return "", err
			}
			machine = append(machine, key+"="+v)
		}
	}
	sort.Strings(machine)
	gpus, err := maps(doc, "gpus")
	if err != nil {
		return "", err
	}
	for _, g := range gpus {
		line, err := pairs(g, "gpu", "model")
		if err != nil {
			return "", err
		}
		rest = append(rest, line)
	}
	links, err := maps(doc, "links")
	if err != nil {
		return "", err
	}
	for _, l := range links {
		between := l["between"]
		var ends []int
		if err := between.Decode(&ends); err != nil || len(ends) != 2 {
			return "", fmt.Errorf("links: between is not [INDEX, INDEX]")
		}
		delete(l, "between")
		line, err := pairs(l, "link "+strconv.Itoa(ends[0])+" "+strconv.Itoa(ends[1]), "")
		if err != nil {
			return "", err
		}
		rest = append(rest, line)
	}
	return strings.Join(append(machine, rest...), "\n") + "\n", nil
}

func maps(doc map[string]yaml.Node, key string) ([]map[string]yaml.Node, error) {
	node, ok := doc[key]
	if !ok {
		return nil, nil
	}
	var out []map[string]yaml.Node
	if err := node.Decode(&out); err != nil {
		return nil, fmt.Errorf("%s is not a list of mappings", key)
	}
	return out, nil
}

// pairs writes one item's keys in alphabetical order, `first` before them.
func pairs(m map[string]yaml.Node, head, first string) (string, error) {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sort.Slice(keys, func(i, j int) bool {
		if (keys[i] == first) != (keys[j] == first) {
			return keys[i] == first
		}
		return keys[i] < keys[j]
	})
	for _, k := range keys {
		node := m[k]
		v, err := scalar(k, &node)
		if err != nil {
			return "", err
		}
		head += " " + k + "=" + v
	}
	return head, nil
}

// scalar returns a value as it was written (550.10 stays 550.10), spaces as the text wants them.
func scalar(key string, node *yaml.Node) (string, error) {
	if node.Kind != yaml.ScalarNode || strings.ContainsAny(node.Value, "\n#") {
		return "", fmt.Errorf("%s is not a plain value", key)
	}
	return strings.ReplaceAll(node.Value, " ", "_"), nil
}
