// Package quota limits what the pods of a namespace may hold of a cluster's GPUs: whole cards of a model,
// as gpu-admission did, and cores and memory, over all GPUs or per model. It reads the ConfigMap and judges;
// what is in use is the caller's to count. Pure: no I/O.
package quota

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"tranche.dev/tranche/internal/placement"
	"tranche.dev/tranche/internal/quantity"
)

// Key of the ConfigMap's data that holds the quotas of all namespaces, as gpu-admission named it.
const Key = "gpu_quota"

// maxBytes is more than a ConfigMap can hold.
const maxBytes = 4 << 20

// Amount of GPUs. In a limit, a negative field limits nothing.
type Amount struct {
	Cores  int64 // hundredths of a GPU
	Memory int64 // bytes
}

// Namespace is what one namespace may have.
type Namespace struct {
	// Total is over all GPUs.
	Total Amount
	// Models by name, sorted: the value of a node's model label, or a GPU's model as placement.ModelMatches
	// has it. If there are any, GPUs of other models are not allowed.
	Models []Model
	// Pools are the values of the nodes' pool label that are allowed; none: all.
	Pools []string
}

// Model is what a namespace may have of one model.
type Model struct {
	Name  string
	Limit Amount
}

// Quotas by namespace. A namespace that is not there is not limited.
type Quotas map[string]Namespace

// entry is the value of a namespace. Quota are whole cards by model; Models the same in cores and memory.
type entry struct {
	Quota  map[string]float64 `json:"quota"`
	Pool   []string           `json:"pool"`
	Cores  *int64             `json:"cores"`
	Memory string             `json:"memory"`
	Models map[string]limit   `json:"models"`
}

type limit struct {
	Cores  *int64 `json:"cores"`
	Memory string `json:"memory"`
}

// Parse reads a ConfigMap's data: under Key a JSON object from namespaces to objects, in one of two forms.
// {"quota": {"M40": 4}, "pool": ["public"]} is gpu-admission's, to which Tranche adds "cores", "memory" (as
// 64Gi) and "models": {"T4": {"cores": 400, "memory": "60Gi"}}. {"M40": 4} is the same without pools: an object
// of numbers, none of them "cores" or "memory".
func Parse(data map[string]string) (Quotas, error) {
	text, ok := data[Key]
	if !ok {
		return nil, fmt.Errorf("no key %q", Key)
	}
	if len(text) > maxBytes {
		return nil, fmt.Errorf("%s: %d bytes, more than %d", Key, len(text), maxBytes)
	}
	var raw map[string]json.RawMessage
	if err := json.Unmarshal([]byte(text), &raw); err != nil {
		return nil, fmt.Errorf("%s: not an object of namespaces: %w", Key, err)
	}
	out := make(Quotas, len(raw))
	for name, value := range raw {
		n, err := parseNamespace(value)
		if err != nil {
			return nil, fmt.Errorf("%s: namespace %s: %w", Key, name, err)
		}
		out[name] = n
	}
	return out, nil
}

func parseNamespace(value json.RawMessage) (Namespace, error) {
	var e entry
	err := json.Unmarshal(value, &e.Quota)
	_, cores := e.Quota["cores"]
	_, memory := e.Quota["memory"]
	if err != nil || cores || memory || e.Quota == nil {
		e = entry{}
		d := json.NewDecoder(bytes.NewReader(value))
		d.DisallowUnknownFields()
		if err := d.Decode(&e); err != nil {
			return Namespace{}, err
		}
	}
	total, err := amount(limit{e.Cores, e.Memory})
	if err != nil {
		return Namespace{}, err
	}
	models := map[string]Amount{}
	for name, cards := range e.Quota {
		if !(cards >= 0 && cards <= 1e6) {
			return Namespace{}, fmt.Errorf("model %s: %v cards: must be 0 to 1000000", name, cards)
		}
		models[name] = Amount{Cores: int64(cards * placement.CoresWhole), Memory: -1}
	}
	for name, l := range e.Models {
		a, err := amount(l)
		if err != nil {
			return Namespace{}, fmt.Errorf("model %s: %w", name, err)
		}
		if cards, both := models[name]; both && (a.Cores < 0 || cards.Cores < a.Cores) {
			a.Cores = cards.Cores
		}
		models[name] = a
	}
	n := Namespace{Total: total, Pools: e.Pool}
	for name, a := range models {
		if strings.TrimSpace(name) == "" {
			return Namespace{}, fmt.Errorf("a model without a name")
		}
		n.Models = append(n.Models, Model{name, a})
	}
	slices.SortFunc(n.Models, func(a, b Model) int { return strings.Compare(a.Name, b.Name) })
	return n, nil
}

func amount(l limit) (Amount, error) {
	a := Amount{Cores: -1, Memory: -1}
	if l.Cores != nil {
		if a.Cores = *l.Cores; a.Cores < 0 || a.Cores > 1e8 {
			return a, fmt.Errorf("%d cores: must be 0 to 100000000", a.Cores)
		}
	}
	if l.Memory != "" {
		q, err := quantity.ParseKubernetes(l.Memory)
		if err != nil {
			return a, fmt.Errorf("memory %q: must be an amount, as 64Gi", l.Memory)
		}
		if a.Memory = q.Value(); a.Memory < 0 {
			return a, fmt.Errorf("memory %q: is negative", l.Memory)
		}
	}
	return a, nil
}

// Place is a kind of GPU: that a node's label says Label (empty: not labelled), that it sits in Pool, and
// that it is of a Model.
type Place struct{ Label, Pool, Model string }

// is tells whether a model of the quota is this kind.
func (m Model) is(p Place) bool {
	return p.Label != "" && p.Label == m.Name || placement.ModelMatches(p.Model, m.Name)
}

// Used is what a namespace has, by kind.
type Used map[Place]Amount

// Add counts, or with a negative amount takes off.
func (u Used) Add(p Place, a Amount) {
	sum := Amount{u[p].Cores + a.Cores, u[p].Memory + a.Memory}
	if sum == (Amount{}) {
		delete(u, p)
		return
	}
	u[p] = sum
}

// The reasons of Refuse: few and constant, apart from the model's name.
const (
	wrongPool    = "quota: GPU pool not allowed for the namespace"
	noModel      = "quota: GPU model not allowed for the namespace"
	overTotal    = "quota of the namespace exceeded"
	overModelFmt = "quota of the namespace exceeded for %s"
)

// Refuse tells why a pod that asks for so much may not have it in this place; empty: it may. detail has the
// figures.
func (n *Namespace) Refuse(used Used, p Place, asks Amount) (reason, detail string) {
	if len(n.Pools) > 0 && !slices.Contains(n.Pools, p.Pool) {
		return wrongPool, fmt.Sprintf("pool %q is none of %s", p.Pool, strings.Join(n.Pools, ", "))
	}
	var total Amount
	for _, a := range used {
		total.Cores, total.Memory = total.Cores+a.Cores, total.Memory+a.Memory
	}
	if d := n.Total.over(total, asks); d != "" {
		return overTotal, d
	}
	known := len(n.Models) == 0
	for _, m := range n.Models {
		if !m.is(p) {
			continue
		}
		known = true
		var sum Amount
		for at, a := range used {
			if m.is(at) {
				sum.Cores, sum.Memory = sum.Cores+a.Cores, sum.Memory+a.Memory
			}
		}
		if d := m.Limit.over(sum, asks); d != "" {
			return fmt.Sprintf(overModelFmt, m.Name), m.Name + ": " + d
		}
	}
	if !known {
		return noModel, fmt.Sprintf("model %q has no quota", p.Model)
	}
	return "", ""
}

// over says by what the sum of used and asks is above a limit; empty: by nothing.
func (l Amount) over(used, asks Amount) string {
	var parts []string
	if l.Cores >= 0 && asks.Cores > 0 && used.Cores+asks.Cores > l.Cores {
		parts = append(parts, fmt.Sprintf("%d cores asked, %d of %d used", asks.Cores, used.Cores, l.Cores))
	}
	if l.Memory >= 0 && asks.Memory > 0 && used.Memory+asks.Memory > l.Memory {
		parts = append(parts, fmt.Sprintf("memory %v asked, %v of %v used", quantity.Bytes(asks.Memory), quantity.Bytes(used.Memory), quantity.Bytes(l.Memory)))
	}
	return strings.Join(parts, "; ")
}
