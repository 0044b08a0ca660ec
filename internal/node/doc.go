// Package node is `tranche node`: it composes discovery, driver view, allocations, arbiter, device plugins
// and display into the process that makes one node's GPUs shareable. What is decided is decided in pure
// packages (books, placement); this one carries inputs to them and their outputs to kubelet, to the
// allocations' directories and to the API server.
//
// Nothing here waits for the API server: what goes there is sent by one goroutine, best effort.
package node
