package pause

import (
	"context"
	"testing"
	"time"
)

func TestFor(t *testing.T) {
	if began := time.Now(); !For(t.Context(), 5*time.Millisecond) || time.Since(began) < 5*time.Millisecond {
		t.Error("it did not wait")
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(5*time.Millisecond, cancel)
	if For(ctx, time.Hour) {
		t.Error("an end of the context was not told")
	}
}
