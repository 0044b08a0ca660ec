// Package simspec turns what a user writes behind --sim into the text that the simulated driver
// reads (docs/simulator.md): a short list of models, a YAML file, or a file in that text itself.
package simspec

import (
	"errors"
	"fmt"
	"io"
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
	// Lines has for each line of Text the line of the YAML file that it comes from; nil when there is
	// none.
	Lines []int
	// Short is true of a list of models.
	Short bool
}

// MaxGPUs is the most that a simulated machine has.
const MaxGPUs = 16

var item = regexp.MustCompile(`^([a-z0-9][a-z0-9.-]*)(?::([0-9]+))?$`)

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
		return fromFile(value, info)
	case strings.ContainsAny(value, "/") || isYAML(value):
		return Spec{}, errors.Unwrap(err)
	}
	var lines []string
	for part := range strings.SplitSeq(value, ",") {
		m := item.FindStringSubmatch(strings.TrimSpace(part))
		if m == nil {
			return Spec{}, fmt.Errorf("%q is not MODEL or MODEL:COUNT, as in a100-80g:2,t4", part)
		}
		line := "gpu model=" + m[1]
		if m[2] != "" {
			if n, err := strconv.Atoi(m[2]); err != nil || n < 1 || n > MaxGPUs {
				return Spec{}, fmt.Errorf("%q: 1 to %d GPUs", part, MaxGPUs)
			}
			line += " count=" + m[2]
		}
		lines = append(lines, line)
	}
	return Spec{Text: strings.Join(lines, "\n") + "\n", Short: true}, nil
}

func isYAML(path string) bool {
	ext := strings.ToLower(filepath.Ext(path))
	return ext == ".yaml" || ext == ".yml"
}

const fileMax = 1 << 20

func fromFile(path string, info os.FileInfo) (Spec, error) {
	if !info.Mode().IsRegular() {
		return Spec{}, errors.New("not a file or directory")
	}
	f, err := os.Open(path)
	if err != nil {
		return Spec{}, errors.Unwrap(err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, fileMax+1))
	if err != nil {
		return Spec{}, err
	}
	if len(data) > fileMax {
		return Spec{}, errors.New("larger than 1 MiB")
	}
	if !isYAML(path) {
		return Spec{Text: string(data)}, nil
	}
	return FromYAML(data)
}

// line is one of the text, with where it stood.
type line struct {
	text string
	at   int
}

// FromYAML reads the same keys as the text has: scalars of the machine at the top, `gpus` and `links`
// as lists of mappings.
//
//	driver_version: 550.163.01
//	gpus:
//	- {model: a100-80g, count: 2}
//	links:
//	- {between: [0, 1], nvlink: 12}
func FromYAML(data []byte) (Spec, error) {
	var doc map[string]yaml.Node
	if err := yaml.Unmarshal(data, &doc); err != nil {
		return Spec{}, err
	}
	var lines []line
	for key, node := range doc {
		if key == "gpus" || key == "links" {
			continue
		}
		v, err := scalar(key, &node)
		if err != nil {
			return Spec{}, err
		}
		lines = append(lines, line{key + "=" + v, node.Line})
	}
	sort.Slice(lines, func(i, j int) bool { return lines[i].text < lines[j].text })
	gpus, err := items(doc, "gpus")
	if err != nil {
		return Spec{}, err
	}
	for _, g := range gpus {
		text, err := pairs(g.keys, "gpu", "model")
		if err != nil {
			return Spec{}, err
		}
		lines = append(lines, line{text, g.at})
	}
	links, err := items(doc, "links")
	if err != nil {
		return Spec{}, err
	}
	for _, l := range links {
		between := l.keys["between"]
		var ends []int
		if err := between.Decode(&ends); err != nil || len(ends) != 2 {
			return Spec{}, fmt.Errorf("line %d: links: between is not [INDEX, INDEX]", l.at)
		}
		delete(l.keys, "between")
		text, err := pairs(l.keys, "link "+strconv.Itoa(ends[0])+" "+strconv.Itoa(ends[1]), "")
		if err != nil {
			return Spec{}, err
		}
		lines = append(lines, line{text, l.at})
	}
	var spec Spec
	for _, l := range lines {
		spec.Text += l.text + "\n"
		spec.Lines = append(spec.Lines, l.at)
	}
	return spec, nil
}

// entry is one of a list of mappings.
type entry struct {
	keys map[string]yaml.Node
	at   int
}

func items(doc map[string]yaml.Node, key string) ([]entry, error) {
	node, ok := doc[key]
	if !ok {
		return nil, nil
	}
	if node.Kind != yaml.SequenceNode {
		return nil, fmt.Errorf("line %d: %s is not a list of mappings", node.Line, key)
	}
	var out []entry
	for _, n := range node.Content {
		e := entry{at: n.Line}
		if err := n.Decode(&e.keys); err != nil {
			return nil, fmt.Errorf("line %d: %s is not a list of mappings", n.Line, key)
		}
		out = append(out, e)
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
		return "", fmt.Errorf("line %d: %s is not a plain value", node.Line, key)
	}
	return strings.ReplaceAll(node.Value, " ", "_"), nil
}
