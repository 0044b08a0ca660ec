package podspec

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"

	"tranche.dev/tranche/internal/quantity"
)

// Change is what the annotations of a running pod make of a container's limits. Each field is as the
// container asked where nothing was changed.
type Change struct {
	Container string
	// Cores, Ceiling in hundredths of each GPU, Memory in bytes of each GPU; 0 memory: not limited.
	Cores, Ceiling int
	Memory         quantity.Bytes
}

// Changes reads what the containers of a running pod are to have by now, init containers left out. A
// container whose annotation is wrong keeps what it asked; the errors say so, each of type *Error.
func Changes(pod *corev1.Pod, names Names) ([]Change, []error) {
	ask, err := Parse(pod, names)
	if err != nil {
		return nil, []error{err}
	}
	p := parser{names: names, annotations: pod.Annotations}
	var out []Change
	var errs []error
	for _, c := range ask.Containers {
		if c.Init && !c.Sidecar {
			continue
		}
		asked := Change{Container: c.Name, Cores: c.Request.Cores, Ceiling: c.Ceiling, Memory: c.Request.Memory}
		changed, err := p.change(c, asked)
		if err != nil {
			errs, changed = append(errs, err), asked
		}
		out = append(out, changed)
	}
	return out, errs
}

func (p *parser) change(c Container, to Change) (Change, error) {
	count := c.Request.Count
	cores, key, err := p.number(Cores, c.Name, 1, MaxGPUs*CoresWhole)
	if err != nil {
		return to, err
	}
	if cores > 0 {
		if cores%count != 0 || cores/count > CoresWhole {
			return to, &Error{c.Name, key, fmt.Sprintf("%d cores: must be divisible by the container's %d GPUs, and at most %d of each", cores, count, CoresWhole)}
		}
		each := cores / count
		// A hard limit stays one; a ceiling stays where it was, and one that was below the cores counts once they are lower.
		switch {
		case c.Limit > 0:
			to.Ceiling = max(c.Limit, each)
		case to.Ceiling == to.Cores || to.Ceiling < each:
			to.Ceiling = each
		}
		to.Cores = each
	}
	text, key := p.text(Memory, c.Name)
	if text == "" {
		return to, nil
	}
	bytes, err := quantityBytes(text)
	if err != nil {
		return to, &Error{c.Name, key, err.Error()}
	}
	if bytes/uint64(count) < 1<<20 {
		return to, &Error{c.Name, key, fmt.Sprintf("%s: less than 1 MiB of each of %d GPUs", text, count)}
	}
	to.Memory = quantity.Bytes(bytes / uint64(count))
	return to, nil
}
