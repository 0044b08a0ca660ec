package node

import (
	"context"
	"time"

	"tranche.dev/tranche/internal/pause"
)

// backoff waits longer each time.
type backoff struct{ first, most, next time.Duration }

func newBackoff() *backoff {
	return &backoff{first: 200 * time.Millisecond, most: 10 * time.Second, next: 200 * time.Millisecond}
}

func (b *backoff) reset() { b.next = b.first }

// sleep waits, until ctx ends at the latest.
func (b *backoff) sleep(ctx context.Context) {
	d := b.next
	b.next = min(2*b.next, b.most)
	pause.For(ctx, d)
}
