package kubelet

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
	deviceplugin "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Socket is the name of kubelet's registry in the directory of device plugins.
const Socket = "kubelet.sock"

// errVanished: kubelet removes the sockets of plugins when it starts. Registered without one, it would wait for it.
var errVanished = errors.New("the plugin's own socket has vanished")

// Register tells kubelet, in the directory of device plugins, that a plugin listens on the socket named
// endpoint in the same directory. It fails as soon as that socket is not there.
func Register(ctx context.Context, dir, endpoint, resource string, options *deviceplugin.DevicePluginOptions) error {
	conn, err := dial(filepath.Join(dir, Socket))
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		tick := time.NewTicker(vanishedEvery)
		defer tick.Stop()
		for ctx.Err() == nil {
			if missing(dir, endpoint) {
				cancel(errVanished)
			}
			<-tick.C
		}
	}()
	err = retry(ctx, "register "+resource, func(ctx context.Context) error {
		_, err := deviceplugin.NewRegistrationClient(conn).Register(ctx, &deviceplugin.RegisterRequest{
			Version: deviceplugin.Version, Endpoint: endpoint, ResourceName: resource, Options: options})
		return err
	})
	if err != nil && errors.Is(context.Cause(ctx), errVanished) {
		return fmt.Errorf("%w: %w", err, errVanished)
	}
	return err
}

const (
	vanishedEvery = 20 * time.Millisecond
	// polled is how often the sockets are looked at in case a change was not told.
	polled = time.Second
	// failedPause is before a registration is tried again.
	failedPause = 200 * time.Millisecond
)

// WatchSockets calls f at first, again after a pause if it failed, and whenever kubelet's socket in dir is another
// than before, or own, the plugin's, has vanished: kubelet removes the plugins' sockets when it starts. Where f succeeded
// it was with the socket that is there afterwards. Until ctx ends, or dir is gone.
func WatchSockets(ctx context.Context, dir string, own func() string, f func(context.Context) error) error {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watch %s: %w", dir, err)
	}
	defer w.Close()
	if err := w.Add(dir); err != nil {
		return fmt.Errorf("watch %s: %w", dir, err)
	}
	tick := time.NewTicker(polled)
	defer tick.Stop()
	var last os.FileInfo
	for {
		now, err := os.Stat(filepath.Join(dir, Socket))
		switch {
		case err != nil:
			last = nil
		case last == nil || !os.SameFile(last, now) || !now.ModTime().Equal(last.ModTime()) || missing(dir, own()):
			if f(ctx) == nil {
				last, _ = os.Stat(filepath.Join(dir, Socket)) // nil: gone again
				break
			}
			last = nil
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(failedPause):
				continue
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-w.Events:
		case err := <-w.Errors:
			return fmt.Errorf("watch %s: %w", dir, err)
		case <-tick.C:
			if _, err := os.Stat(dir); err != nil {
				return err
			}
		}
	}
}

func missing(dir, name string) bool {
	_, err := os.Lstat(filepath.Join(dir, name))
	return err != nil
}
