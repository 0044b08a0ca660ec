package podspec

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// Place is where a container is reserved: by UUID, or, by the originals' scheduler, by position among
// the node's GPUs.
type Place struct {
	UUIDs   []string
	Indexes []int
}

// Reservation is what a scheduler wrote on a pod.
type Reservation struct {
	// Node is where; empty when it was not said.
	Node string
	// Since is when it was made; zero when it was not said.
	Since time.Time
	// Assigned is true once the node has done it.
	Assigned bool
	// Places by container name.
	Places map[string]Place
}

// Reserved reads a pod's reservation, ours before the originals'. False: there is none. An error says
// which annotation is damaged.
func Reserved(pod *corev1.Pod, names Names) (Reservation, bool, error) {
	a := pod.Annotations
	r := Reservation{Node: a[names.PredicateNode()], Assigned: a[names.GPUAssigned()] == "true", Places: map[string]Place{}}
	if text, ok := a[names.PredicateTime()]; ok {
		ns, err := strconv.ParseInt(text, 10, 64)
		if err != nil || ns < 0 {
			return r, false, &Error{"", names.PredicateTime(), fmt.Sprintf("%q: must be nanoseconds since 1970", text)}
		}
		r.Since = time.Unix(0, ns)
	}
	if text, ok := a[GPUs]; ok {
		places, err := DecodeGPUs(text)
		if err != nil {
			return r, false, &Error{"", GPUs, err.Error()}
		}
		for name, uuids := range places {
			r.Places[name] = Place{UUIDs: uuids}
		}
	}
	for i := range pod.Spec.Containers {
		name := pod.Spec.Containers[i].Name
		text, ok := a[names.GPUIndex(i)]
		if _, known := r.Places[name]; !ok || known {
			continue
		}
		indexes, err := decodeIndexes(text)
		if err != nil {
			return r, false, &Error{name, names.GPUIndex(i), err.Error()}
		}
		r.Places[name] = Place{Indexes: indexes}
	}
	return r, len(r.Places) > 0, nil
}

func decodeIndexes(text string) ([]int, error) {
	var out []int
	for item := range strings.SplitSeq(text, ",") {
		v, err := strconv.Atoi(strings.TrimSpace(item))
		if err != nil || v < 0 || v > 1024 || len(out) == MaxGPUs {
			return nil, fmt.Errorf("%q: must be a comma list of at most %d GPU numbers", text, MaxGPUs)
		}
		out = append(out, v)
	}
	return out, nil
}

// DecodeGPUs reads the value of GPUs.
func DecodeGPUs(text string) (map[string][]string, error) {
	var out map[string][]string
	if err := json.Unmarshal([]byte(text), &out); err != nil {
		return nil, fmt.Errorf("not an object of lists of UUIDs: %w", err)
	}
	for name, uuids := range out {
		if len(uuids) == 0 || len(uuids) > MaxGPUs {
			return nil, fmt.Errorf("container %s: %d GPUs, must be 1 to %d", name, len(uuids), MaxGPUs)
		}
		for _, u := range uuids {
			if u == "" || len(u) > 64 {
				return nil, fmt.Errorf("container %s: %q is no UUID", name, u)
			}
		}
	}
	return out, nil
}

// EncodeGPUs writes the value of GPUs.
func EncodeGPUs(places map[string][]string) string {
	data, err := json.Marshal(places)
	if err != nil {
		return "{}" // strings always marshal
	}
	return string(data)
}

// ReservationAnnotations are what a scheduler writes on a pod. indexes are the GPUs' positions on the node,
// by the same names as places, for the originals' readers.
func ReservationAnnotations(pod *corev1.Pod, names Names, node string, at time.Time, places map[string][]string, indexes map[string][]int) map[string]string {
	out := map[string]string{
		names.PredicateNode(): node,
		names.PredicateTime(): strconv.FormatInt(at.UnixNano(), 10),
		names.GPUAssigned():   "false",
		GPUs:                  EncodeGPUs(places),
	}
	for i := range pod.Spec.Containers {
		if at, ok := indexes[pod.Spec.Containers[i].Name]; ok {
			out[names.GPUIndex(i)] = joinIndexes(at)
		}
	}
	return out
}

func joinIndexes(indexes []int) string {
	parts := make([]string, len(indexes))
	for i, v := range indexes {
		parts[i] = strconv.Itoa(v)
	}
	return strings.Join(parts, ",")
}
