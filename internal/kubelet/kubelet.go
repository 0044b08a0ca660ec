// Package kubelet talks to the kubelet of this node: its registry of device plugins, its PodResources
// service and its pods service, with the API server in place of the last where kubelet has none.
// It reads no file of kubelet's and decides nothing.
package kubelet

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"tranche.dev/tranche/internal/kubelet/wire"
)

const (
	// answerMax bounds one answer. 8 GPUs of 141 GiB have 5,312 IDs of 47 bytes; a pod's object is
	// 1.5 MiB at most.
	answerMax = 64 << 20
	// callTimeout bounds one call; kubelet itself waits 30 s for PreStartContainer.
	callTimeout = 5 * time.Second
	retryFirst  = 10 * time.Millisecond
	retryLast   = 200 * time.Millisecond

	// window is in bytes how much of an answer kubelet sends without being asked for more.
	window = 1 << 20
)

// dial makes a connection to a unix socket, which need not be there yet: calls connect.
func dial(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix:"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithInitialWindowSize(window), grpc.WithInitialConnWindowSize(window),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(answerMax), grpc.ForceCodecV2(wire.New())),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: retryFirst, Multiplier: 2, MaxDelay: time.Second},
			MinConnectTimeout: time.Second,
		}))
}

// retry calls f until it succeeds, fails for good, or the time for one call is over. What passes by itself
// is retried: kubelet restarting, and its limit on calls.
func retry(ctx context.Context, what string, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	for pause := retryFirst; ; pause = min(2*pause, retryLast) {
		err := f(ctx)
		if err == nil {
			return nil
		}
		if !passing(err) {
			return fmt.Errorf("kubelet, %s: %w", what, err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("kubelet, %s: %w", what, err)
		case <-time.After(pause):
		}
	}
}

// passing is true of a kubelet that is not there, and of its limit on calls. FailedPrecondition, "Kubelet is initializing",
// does not pass while one waits: kubelet may be admitting its first pods, and wait for us.
func passing(err error) bool {
	switch status.Code(err) {
	case codes.Unavailable, codes.ResourceExhausted:
		return true
	}
	return false
}

// Missing is true when kubelet, or this version of it, does not have the service that was called.
func Missing(err error) bool {
	return status.Code(errors.Unwrap(err)) == codes.Unimplemented || status.Code(err) == codes.Unimplemented
}
