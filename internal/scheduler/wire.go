package scheduler

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/bits"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Bodies name thousands of nodes, or hold them, and come twice for each pod. So they are walked here without
// being built up; what is needed in full (an unknown pod) goes through encoding/json.

// args is the body of predicates and priorities, extender/v1.ExtenderArgs.
type args struct {
	pod string // JSON
	// names are the candidates. nodes, by the same positions, is their JSON if whole nodes were sent.
	names []string
	nodes []string
	// list is the JSON of names if each is the text between its quotes there, empty otherwise.
	list string
	// whole is true when nodes were sent instead of names.
	whole bool
}

// parse reads a body. What a has of an earlier one is used again.
func (a *args) parse(body string) error {
	*a = args{names: a.names[:0], nodes: a.nodes[:0]}
	x := scanner{text: body}
	listed := false
	err := x.object(func(key string) error {
		switch {
		case strings.EqualFold(key, "Pod"):
			raw, err := x.raw()
			a.pod = raw
			return err
		case strings.EqualFold(key, "NodeNames") && !x.null():
			listed = true
			if a.names, a.list = x.plainStrings(a.names[:0]); a.list != "" {
				return nil
			}
			a.names = a.names[:0]
			return x.array(func() error {
				name, err := x.string()
				a.names = append(a.names, name)
				return err
			})
		case strings.EqualFold(key, "Nodes") && !x.null():
			a.whole = true
			return x.object(func(key string) error {
				if !strings.EqualFold(key, "items") || x.null() {
					return x.skip()
				}
				return x.array(func() error { return a.node(&x) })
			})
		}
		return x.skip()
	})
	if err == nil {
		err = x.end()
	}
	if err == nil && a.whole && listed {
		err = errors.New("both nodes and names of nodes")
	}
	if err == nil && (a.pod == "" || a.pod == "null") {
		err = errors.New("no pod")
	}
	return err
}

func (a *args) node(x *scanner) error {
	raw, err := x.raw()
	if err != nil {
		return err
	}
	name, _, err := metadata(raw, "name")
	if err == nil && name == "" {
		err = errors.New("a node without a name")
	}
	a.names, a.nodes = append(a.names, name), append(a.nodes, raw)
	return err
}

// asked is the pod of a body. It is unmarshalled only if the core does not know it.
func (a *args) asked() (Asked, error) {
	text := a.pod
	uid, version, err := metadata(text, "uid")
	if err != nil {
		return Asked{}, fmt.Errorf("pod: %w", err)
	}
	return Asked{types.UID(uid), version, func() (*corev1.Pod, error) {
		var p corev1.Pod
		if err := json.Unmarshal([]byte(text), &p); err != nil {
			return nil, fmt.Errorf("pod: %w", err)
		}
		return &p, nil
	}}, nil
}

// metadata reads one field of an object's metadata and its resourceVersion. What is not there is empty.
func metadata(raw, field string) (value, version string, err error) {
	x := scanner{text: raw}
	err = x.object(func(key string) error {
		if key != "metadata" {
			return x.skip()
		}
		return x.object(func(key string) error {
			var err error
			switch key {
			case field:
				value, err = x.string()
			case "resourceVersion":
				version, err = x.string()
			default:
				err = x.skip()
			}
			return err
		})
	})
	return strings.Clone(value), strings.Clone(version), err
}

// appendFilter writes extender/v1.ExtenderFilterResult.
func appendFilter(b []byte, a *args, v *Verdict) []byte {
	b = append(b, '{')
	if a.whole {
		b = append(b, `"Nodes":{"metadata":{},"items":[`...)
		next := 0
		for i, name := range a.names {
			if next < len(v.Passed) && name == v.Passed[next] {
				if next++; next > 1 {
					b = append(b, ',')
				}
				b = append(b, a.nodes[i]...)
			}
		}
		b = append(b, `]}`...)
	} else {
		b = append(b, `"NodeNames":`...)
		if a.list != "" && len(v.Passed) == len(a.names) {
			b = append(b, a.list...)
		} else {
			b = append(b, '[')
			for i, name := range v.Passed {
				if i > 0 {
					b = append(b, ',')
				}
				b = a.appendName(b, name)
			}
			b = append(b, ']')
		}
	}
	if v.Unresolvable != "" {
		b = append(b, `,"FailedAndUnresolvableNodes":{`...)
		for i, name := range a.names {
			b = a.appendFailure(b, i, name, v.Unresolvable)
		}
		return append(b, '}', '}')
	}
	b = append(b, `,"FailedNodes":{`...)
	for i, f := range v.Failed {
		b = a.appendFailure(b, i, f.Node, f.Why)
	}
	return append(b, '}', '}')
}

func (a *args) appendFailure(b []byte, i int, node, why string) []byte {
	if i > 0 {
		b = append(b, ',')
	}
	b = append(a.appendName(b, node), ':')
	return appendString(b, why)
}

// appendName writes one of the names.
func (a *args) appendName(b []byte, name string) []byte {
	if a.list == "" {
		return appendString(b, name)
	}
	b = append(b, '"')
	b = append(b, name...)
	return append(b, '"')
}

// appendScores writes extender/v1.HostPriorityList.
func appendScores(b []byte, a *args, scores []Score) []byte {
	b = append(b, '[')
	for i, s := range scores {
		if i > 0 {
			b = append(b, ',')
		}
		b = a.appendName(append(b, `{"Host":`...), s.Node)
		b = append(b, `,"Score":`...)
		if s.Score == 10 {
			b = append(b, '1', '0', '}')
		} else {
			b = append(b, byte('0'+s.Score), '}')
		}
	}
	return append(b, ']')
}

// appendString writes a JSON string.
func appendString(b []byte, s string) []byte {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c == '"' || c == '\\' || c > '~' {
			text, err := json.Marshal(s)
			if err != nil {
				text = []byte(`""`) // strings always marshal
			}
			return append(b, text...)
		}
	}
	b = append(b, '"')
	b = append(b, s...)
	return append(b, '"')
}

// scanner walks JSON. It checks the structure of what it enters and, of what it skips, only where it ends.
type scanner struct {
	text string
	at   int
}

func (x *scanner) fail(what string) error { return fmt.Errorf("JSON at byte %d: %s", x.at, what) }

func (x *scanner) space() {
	for x.at < len(x.text) {
		switch x.text[x.at] {
		case ' ', '\t', '\n', '\r':
			x.at++
		default:
			return
		}
	}
}

// is takes a character if it comes next.
func (x *scanner) is(c byte) bool {
	x.space()
	if x.at < len(x.text) && x.text[x.at] == c {
		x.at++
		return true
	}
	return false
}

// null tells whether null comes next. It is not taken.
func (x *scanner) null() bool {
	x.space()
	return strings.HasPrefix(x.text[x.at:], "null")
}

func (x *scanner) end() error {
	if x.space(); x.at < len(x.text) {
		return x.fail("something follows the value")
	}
	return nil
}

// object calls field for each key; field takes the value. null is an object without fields.
func (x *scanner) object(field func(key string) error) error {
	if x.null() {
		return x.skip()
	}
	if !x.is('{') {
		return x.fail("an object is expected")
	}
	if x.is('}') {
		return nil
	}
	for {
		key, err := x.string()
		if err != nil {
			return err
		}
		if !x.is(':') {
			return x.fail("a colon is expected")
		}
		if err := field(key); err != nil {
			return err
		}
		if x.is('}') {
			return nil
		}
		if !x.is(',') {
			return x.fail("a comma or the object's end is expected")
		}
	}
}

// array calls item for each element; item takes it.
func (x *scanner) array(item func() error) error {
	if !x.is('[') {
		return x.fail("an array is expected")
	}
	if x.is(']') {
		return nil
	}
	for {
		if err := item(); err != nil {
			return err
		}
		if x.is(']') {
			return nil
		}
		if !x.is(',') {
			return x.fail("a comma or the array's end is expected")
		}
	}
}

// plainStrings takes an array of strings that have neither escapes nor anything but ASCII in them, as names of
// nodes have, and appends them to to. list is its JSON; empty: it is another value and was not taken.
func (x *scanner) plainStrings(to []string) (names []string, list string) {
	x.space()
	rest := x.text[x.at:]
	end := strings.IndexByte(rest, ']')
	if end < 1 || rest[0] != '[' {
		return to, ""
	}
	const ones, low, high = 0x0101010101010101, 0x2020202020202020, 0x8080808080808080
	names, open := to, 0 // where the string that is being read began; 0: none
	odd := uint64(0)
	for at := 1; at < end; at += 8 {
		w := word(rest[at:end])
		// The highest bit of a byte in odd: it is above 0x7f, below 0x20 or a backslash. In quotes: it is '"'. Borrows may add bits
		// above the first of a word: those in odd only make it another value, those in quotes are looked at once more.
		escape := w ^ ones*'\\'
		odd |= w | (w - low) | (escape-ones)&^escape
		quote := w ^ ones*'"'
		for quotes := (quote - ones) &^ quote & high; quotes != 0; quotes &= quotes - 1 {
			i := at + bits.TrailingZeros64(quotes)/8
			switch {
			case rest[i] != '"':
			case open > 0:
				names, open = append(names, rest[open:i]), 0
			case i == 1 || rest[i-1] == ',' && rest[i-2] == '"':
				open = i + 1
			default:
				return to, ""
			}
		}
	}
	if odd&high != 0 || open > 0 || rest[end-1] != '"' { // or an empty list
		return to, ""
	}
	x.at += end + 1
	return names, rest[:end+1]
}

// word has the first eight bytes of a text, the first lowest; spaces where it ends.
func word(text string) uint64 {
	if len(text) >= 8 {
		return uint64(text[0]) | uint64(text[1])<<8 | uint64(text[2])<<16 | uint64(text[3])<<24 |
			uint64(text[4])<<32 | uint64(text[5])<<40 | uint64(text[6])<<48 | uint64(text[7])<<56
	}
	w := uint64(0)
	for i := range 8 {
		c := byte(' ')
		if i < len(text) {
			c = text[i]
		}
		w |= uint64(c) << (8 * i)
	}
	return w
}

// string takes a string.
func (x *scanner) string() (string, error) {
	if !x.is('"') {
		return "", x.fail("a string is expected")
	}
	start := x.at
	plain := true
	for x.at < len(x.text) {
		switch c := x.text[x.at]; {
		case c == '"':
			text := x.text[start:x.at]
			x.at++
			if plain {
				return text, nil
			}
			var out string
			if err := json.Unmarshal([]byte(x.text[start-1:x.at]), &out); err != nil {
				return "", x.fail(err.Error())
			}
			return out, nil
		case c == '\\':
			plain = false
			x.at += 2
		case c < ' ':
			return "", x.fail("a control character in a string")
		default:
			plain = plain && c < 0x80
			x.at++
		}
	}
	return "", x.fail("a string does not end")
}

// raw takes any value and returns its text.
func (x *scanner) raw() (string, error) {
	x.space()
	start := x.at
	if err := x.skip(); err != nil {
		return "", err
	}
	return x.text[start:x.at], nil
}

// skip takes any value.
func (x *scanner) skip() error {
	x.space()
	start, depth := x.at, 0
	for x.at < len(x.text) {
		switch x.text[x.at] {
		case '"':
			if err := x.skipString(); err != nil {
				return err
			}
		case '{', '[':
			depth++
			x.at++
		case '}', ']':
			if depth == 0 {
				return x.valued(start)
			}
			depth--
			x.at++
		case ',', ':', ' ', '\t', '\n', '\r':
			if depth == 0 {
				return x.valued(start)
			}
			x.at++
			continue
		default:
			x.at++
			continue
		}
		if depth == 0 {
			return x.valued(start)
		}
	}
	if depth > 0 {
		return x.fail("a value does not end")
	}
	return x.valued(start)
}

// valued tells whether anything was skipped.
func (x *scanner) valued(start int) error {
	if x.at == start {
		return x.fail("a value is expected")
	}
	return nil
}

func (x *scanner) skipString() error {
	x.at++
	for {
		i := strings.IndexByte(x.text[x.at:], '"')
		if i < 0 {
			x.at = len(x.text)
			return x.fail("a string does not end")
		}
		end := x.at + i
		slashes := 0
		for end-slashes > x.at && x.text[end-slashes-1] == '\\' {
			slashes++
		}
		x.at = end + 1
		if slashes%2 == 0 {
			return nil
		}
	}
}
