package simulate

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"tranche.dev/tranche/internal/placement"
)

// Fit is the answer to how many more pods of a shape there is room for.
type Fit struct {
	Placed int `json:"placed"`
	// Failed are pods of the trace for which there was no room before.
	Failed int `json:"failed"`
	More   int `json:"more"`
}

// HowMany places the trace's pods in their order by a policy of the scheduler, and then as many of one more
// shape as fit. More than 10 million are an error.
func HowMany(ctx context.Context, config Config, policy placement.Policy, shape Pod) (Fit, error) {
	var out Fit
	if err := shape.check(); err != nil {
		return out, err
	}
	if shape.GPUs == 0 {
		return out, fmt.Errorf("pod %s: asks for no GPU", shape.Name)
	}
	if err := config.complete(); err != nil {
		return out, err
	}
	w := InOrder(config.trace(config.Seeds[0]))
	o, err := newOurs(policy, w.Nodes)
	if err != nil {
		return out, err
	}
	for i := range w.Pods {
		if ctx.Err() != nil {
			return out, ctx.Err()
		}
		_, _, ok, err := o.place(&w.Pods[i])
		if err != nil {
			return out, err
		}
		if ok {
			out.Placed++
		} else {
			out.Failed++
		}
		if config.Progress != nil {
			config.Progress(i+1, len(w.Pods))
		}
	}
	out.More, err = o.fill(ctx, &shape, maxPods)
	return out, err
}

// fill places pods of a shape until there is no room, at most so many.
func (o *ours) fill(ctx context.Context, shape *Pod, most int) (int, error) {
	for n := 0; ; n++ {
		if ctx.Err() != nil {
			return n, ctx.Err()
		}
		_, _, ok, err := o.place(shape)
		if err != nil || !ok {
			return n, err
		}
		if n == most {
			return n, fmt.Errorf("pod %s: more than %d fit: must ask for more of a GPU", shape.Name, most)
		}
	}
}

// ParseShape reads a pod's shape as key=value pairs: cores (hundredths of each GPU), memory (of each GPU), gpus,
// cpu, ram, model (with | between several).
func ParseShape(text string) (Pod, error) {
	p := Pod{Name: "fit", GPUs: 1}
	var cpu, ram, memory string
	for pair := range strings.SplitSeq(text, ",") {
		key, value, ok := strings.Cut(strings.TrimSpace(pair), "=")
		if !ok {
			return p, fmt.Errorf("%q: must be pairs like cores=30", pair)
		}
		var err error
		switch key {
		case "cores":
			p.Milli, err = parseCount(value, placement.CoresWhole)
			p.Milli *= Milli / placement.CoresWhole
		case "gpus":
			p.GPUs, err = parseCount(value, maxGPUs)
		case "memory":
			memory = value
		case "cpu":
			cpu = value
		case "ram":
			ram = value
		case "model":
			if p.Models = strings.Split(value, "|"); slices.Contains(p.Models, "") {
				err = fmt.Errorf("%q: must be a name, or several with | between them", value)
			}
		default:
			return p, fmt.Errorf("%q: must be cores, memory, gpus, cpu, ram or model", key)
		}
		if err != nil {
			return p, fmt.Errorf("%s: %w", key, err)
		}
	}
	host, err := amounts(cpu, ram, memory)
	if err != nil {
		return p, err
	}
	p.CPU, p.RAM, p.GPUMemory = host.cpu, host.ram, host.gpu
	return p, p.check()
}

func parseCount(text string, most int) (int, error) {
	v, err := strconv.Atoi(text)
	if err != nil || v < 1 || v > most {
		return 0, fmt.Errorf("%q: must be 1 to %d", text, most)
	}
	return v, nil
}
