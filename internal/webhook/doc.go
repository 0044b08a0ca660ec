// Package webhook is the admission webhook for pods: it sends pods that ask for slices to Tranche's scheduler,
// and, where that is wanted, says in Tranche's words what pods ask in HAMi's.
//
// Mutator is the decision: a pod goes in, a JSON patch or a refusal comes out, without I/O, clock or goroutine.
// A pod is translated wholly or refused, never in part; a pod that was changed is left alone the second time.
// Server speaks the protocol of the API server, Run gives it certificates and tells it which GPUs there are. It
// never writes pods, and nodes it only reads.
package webhook
