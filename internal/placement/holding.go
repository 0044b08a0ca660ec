package placement

// HeldAt is what a pod holds on a node if its containers have these GPUs, by UUID, in the pod's order: as
// PlacePod would say, but of a choice that was made elsewhere. UUIDs that the node does not have are left
// out; nothing is checked.
func HeldAt(node *Node, pod *Pod, containers [][]string) []Held {
	s := newSearch(node, pod, LeastFragmentation, nil)
	at := make(map[string]int, len(node.GPUs))
	for i := range node.GPUs {
		at[node.GPUs[i].UUID] = i
	}
	for i := range pod.Containers {
		if i >= len(containers) {
			break
		}
		for _, uuid := range containers[i] {
			if g, ok := at[uuid]; ok {
				s.chosen[i] |= 1 << g
			}
		}
		s.add(i, s.moments(i), 1)
	}
	return s.assignment().Held
}
