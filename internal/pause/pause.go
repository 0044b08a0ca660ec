// Package pause waits for a while or until a context ends, whichever comes first.
package pause

import (
	"context"
	"time"
)

// For waits for d. It tells whether it waited all of it; false: ctx ended before.
func For(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
