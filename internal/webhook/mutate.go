package webhook

import (
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"

	"tranche.dev/tranche/internal/podspec"
	"tranche.dev/tranche/internal/quantity"
)

const (
	// OptOut is the label of pods and namespaces that are left alone when its value is Ignore.
	OptOut = "tranche.dev/webhook"
	// Ignore is described at OptOut.
	Ignore = "ignore"
	// Translated is written on a pod that was translated: what its containers asked for before.
	Translated = "tranche.dev/translated"
)

// Mutator decides what becomes of a pod. Safe for concurrent use.
type Mutator struct {
	Names podspec.Names
	// Scheduler is the name of the scheduler for pods that ask for slices and name none; empty: the cluster's own
	// knows of slices.
	Scheduler string
	// HAMi says how to translate HAMi's resources; nil: they are left as they are.
	HAMi *HAMi
}

// GPU is one of the cluster's.
type GPU struct {
	UUID, Model string
	// Memory that can be shared.
	Memory quantity.Bytes
}

// Validate says what is wrong with the settings.
func (m *Mutator) Validate() error {
	if err := m.Names.Validate(); err != nil {
		return err
	}
	if h := m.HAMi; h != nil && (h.DefaultCores < 0 || h.DefaultCores > podspec.CoresWhole || h.DefaultMemory > 1<<40) {
		return fmt.Errorf("HAMi's defaults: %d cores, %v: must be at most %d cores and 1 TiB", h.DefaultCores, h.DefaultMemory, podspec.CoresWhole)
	}
	return nil
}

// Mutate returns the patch for a pod that is to be made, empty if it stays as it is, and warnings for whoever
// makes it. gpus are those of the cluster, nil if they are not known. An error is a refusal, of type *podspec.Error.
func (m *Mutator) Mutate(pod *corev1.Pod, gpus []GPU) ([]Operation, []string, error) {
	// A mirror pod shows what kubelet runs already.
	if pod.Labels[OptOut] == Ignore || pod.Annotations[corev1.MirrorPodAnnotationKey] != "" {
		return nil, nil, nil
	}
	e := &editor{pod: pod.DeepCopy()}
	var warnings []string
	if m.HAMi != nil && pod.Labels[hamiOptOut] != Ignore {
		var err error
		if warnings, err = m.translate(e, gpus); err != nil {
			return nil, nil, err
		}
	}
	if !podspec.Wants(e.pod, m.Names) {
		return e.ops, warnings, nil
	}
	m.schedule(e)
	ask, err := podspec.Parse(e.pod, m.Names)
	if err == nil {
		spec := ask.Placement()
		err = spec.Validate()
	}
	if err != nil {
		// Its node refuses it, and says so where few look.
		warnings = append(warnings, err.Error())
	}
	return e.ops, append(warnings, ask.Warnings...), nil
}

// schedule names the scheduler, unless the pod has another one or a node already.
func (m *Mutator) schedule(e *editor) {
	if e.pod.Spec.NodeName != "" {
		return
	}
	switch now := e.pod.Spec.SchedulerName; {
	case m.Scheduler != "" && (now == "" || now == corev1.DefaultSchedulerName || now == hamiScheduler && m.HAMi != nil):
		e.schedulerName(m.Scheduler)
	case m.Scheduler == "" && now == hamiScheduler && m.HAMi != nil:
		e.schedulerName(corev1.DefaultSchedulerName)
	}
}

// problem is a refusal: container and key may be empty.
func problem(container, key, format string, args ...any) error {
	return &podspec.Error{Container: container, Key: key, Problem: fmt.Sprintf(format, args...)}
}

// refused tells a refusal from other errors.
func refused(err error) bool {
	var e *podspec.Error
	return errors.As(err, &e)
}
