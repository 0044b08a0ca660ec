// Package scheduler is the extender of kube-scheduler that puts pods on nodes and GPUs.
//
// Core is the decision: a state machine without I/O, clock or goroutine. Events of pods and nodes, the
// extender's verbs and ticks go in; verdicts and bindings to send come out. It never gives an amount of a
// GPU to two pods: everything that is held, or may have been bound, counts from the moment of the decision,
// under one lock, and is let go only on a proof that it is not used (see phase).
//
// Server speaks the extender's protocol, Run feeds the core from the API server and sends what it decides.
// Nodes are never written, and pods only by binding them: the reservation travels in the Binding.
package scheduler
