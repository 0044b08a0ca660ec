package display

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	api "tranche.dev/tranche/api/display"
)

const exampleUsage = `{"usage":{` +
	`"11111111-2222":{"stat":{"side":{"dev":[{"id":"00000000:3B:00.0","card_idx":"0","device_mem":40960}]},` +
	`"train":{"dev":[{"id":"00000000:3B:00.0","card_idx":"0","gpu":41.5,"mem":6144,"pids":[410],"device_mem":40960}]}},` +
	`"project":"ml","user":"ann","cluster":"c1","spec":{"side":{"gpu":0.2,"mem":4096},"train":{"gpu":0.3,"mem":8192}}},` +
	`"33333333-4444":{"stat":{"serve":{"dev":[{"id":"00000000:3B:00.0","card_idx":"0","gpu":29,"mem":3072,"pids":[977],"device_mem":40960}]}},"project":"web","spec":{"serve":{"gpu":0.3,"mem":4096}}},` +
	`"55555555-6666":{"stat":{"w":{"dev":[{"id":"00000000:3C:00.0","card_idx":"1","gpu":99,"mem":30720,"pids":[1200],"device_mem":40960}]}},"project":"web","spec":{"w":{"gpu":1,"mem":40960}}}}}`

func newServer(t *testing.T, c Config) *Server {
	t.Helper()
	s, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestHTTP(t *testing.T) {
	one := Snapshot{Commit: "4b825dc6", Version: "v1", GPUs: []GPU{{Healthy: true, FreeCores: 100, Idle: true}}}
	const line = "|---GPU0 (pids: [], usedMemory: 0, totalMemory: 0, allocatableCores: 100, allocatableMemory: 0)"
	bad := Config{Source: fixed{}, Health: func(context.Context) error { return errors.New("vcore.sock: no answer") },
		Ready: func() []string { return []string{"no driver:\nnone found", "kubelet: not registered"} }}
	for _, c := range []struct {
		name           string
		config         Config
		method, path   string
		accept         string
		status         int
		kind, contains string
	}{
		{"graph", Config{Source: fixed(one)}, "GET", "/graph", "*/*", 200, "application/json", `{"graph":"ROOT:1\n` + line + `\n"}`},
		{"graph as text", Config{Source: fixed(one)}, "GET", "/graph", "text/plain", 200, "text/plain; charset=utf-8", "ROOT:1\n" + line + "\n"},
		{"usage", Config{Source: fixed(example())}, "GET", "/usage", "*/*", 200, "application/json", exampleUsage},
		{"usage is not text", Config{Source: fixed(example())}, "GET", "/usage", "text/plain", 200, "application/json", exampleUsage},
		{"nothing used", Config{Source: fixed{}}, "GET", "/usage", "", 200, "application/json", "{}"},
		{"version", Config{Source: fixed(one)}, "GET", "/version", "application/json", 200, "application/json", `{"version":"4b825dc6"}`},
		{"version without commit", Config{Source: fixed{Version: "v1"}}, "GET", "/version", "", 200, "application/json", `{"version":"v1"}`},
		{"healthy", Config{Source: fixed{}}, "GET", "/healthz", "", 200, "text/plain; charset=utf-8", "ok\n"},
		{"ready", Config{Source: fixed{}}, "GET", "/readyz", "", 200, "text/plain; charset=utf-8", "ok\n"},
		{"not healthy", bad, "GET", "/healthz", "", 503, "text/plain; charset=utf-8", "vcore.sock: no answer\n"},
		{"not ready", bad, "GET", "/readyz", "", 503, "text/plain; charset=utf-8", "no driver: none found\nkubelet: not registered\n"},
		{"nothing is changed", Config{Source: fixed{}}, "POST", "/usage", "", 405, "text/plain; charset=utf-8", "Method Not Allowed\n"},
		{"unknown", Config{Source: fixed{}}, "GET", "/graphs", "", 404, "text/plain; charset=utf-8", "404 page not found\n"},
	} {
		r := httptest.NewRequest(c.method, c.path, nil)
		if c.accept != "" {
			r.Header.Set("Accept", c.accept)
		}
		w := httptest.NewRecorder()
		newServer(t, c.config).ServeHTTP(w, r)
		if w.Code != c.status || w.Header().Get("Content-Type") != c.kind || w.Body.String() != c.contains {
			t.Errorf("%s: %d %s\n%s\nwant %d %s\n%s", c.name, w.Code, w.Header().Get("Content-Type"), w.Body, c.status, c.kind, c.contains)
		}
	}
}

func TestPage(t *testing.T) {
	s := example()
	s.Tenants[0].Pod = "<script>alert(1)</script>"
	w := httptest.NewRecorder()
	newServer(t, Config{Source: fixed(s), Ready: func() []string { return []string{"kubelet: not registered"} }}).ServeHTTP(w, httptest.NewRequest("GET", "/", nil))
	golden(t, "testdata/page.html", w.Body.String())
	if strings.Contains(w.Body.String(), "<script") || strings.Contains(w.Body.String(), "http://") || !strings.Contains(w.Header().Get("Content-Security-Policy"), "default-src 'none'") {
		t.Error("the page runs or loads something")
	}
}

// start serves on a loopback port and a unix socket until the test ends.
func start(t *testing.T, c Config) (url string, client api.GPUDisplayClient) {
	t.Helper()
	web, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "display.sock")
	socket, err := ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	s := newServer(t, c)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, web, socket) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error("Serve:", err)
		}
		if _, err := os.Stat(path); err == nil {
			t.Error("the socket was left behind")
		}
	})
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return "http://" + web.Addr().String(), api.NewGPUDisplayClient(conn)
}

// The same answers come over gRPC and, as JSON, over HTTP.
func TestGRPCAndGateway(t *testing.T) {
	url, client := start(t, Config{Source: fixed(example())})
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	graph, err := client.PrintGraph(ctx, &emptypb.Empty{})
	if err != nil {
		t.Fatal(err)
	}
	usage, err := client.PrintUsages(ctx, &emptypb.Empty{})
	if err != nil {
		t.Fatal(err)
	}
	version, err := client.Version(ctx, &emptypb.Empty{})
	if err != nil {
		t.Fatal(err)
	}
	if graph.Graph != Graph(example()) || version.Version != "4b825dc6" || !proto.Equal(usage, Usage(example())) {
		t.Errorf("%v %v %v", graph, version, usage)
	}
	for path, c := range map[string]struct{ got, want proto.Message }{
		"/graph": {&api.GraphResponse{}, graph}, "/usage": {&api.UsageResponse{}, usage}, "/version": {&api.VersionResponse{}, version}} {
		body, status := get(t, url+path)
		if err := protojson.Unmarshal([]byte(body), c.got); err != nil || status != 200 || !proto.Equal(c.got, c.want) {
			t.Errorf("%s: %v, status %d: %s", path, err, status, body)
		}
	}
}

func get(t *testing.T, url string) (string, int) {
	t.Helper()
	client := http.Client{Timeout: 10 * time.Second}
	defer client.CloseIdleConnections()
	r, err := client.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(body), r.StatusCode
}

func TestProfilesOnLoopbackOnly(t *testing.T) {
	url, _ := start(t, Config{Source: fixed{}})
	if body, status := get(t, url+"/debug/pprof/goroutine?debug=1"); status != 200 || !strings.Contains(body, "goroutine profile") {
		t.Errorf("on loopback: %d %s", status, body)
	}
	s := newServer(t, Config{Source: fixed{}})
	for _, c := range []struct{ to, from string }{{"10.0.0.5:5678", "10.0.0.9:1234"}, {"127.0.0.1:5678", "10.0.0.9:1234"}, {"10.0.0.5:5678", "127.0.0.1:1234"}, {"", "127.0.0.1:1234"}} {
		for _, path := range []string{"/debug/pprof/", "/debug/pprof/heap", "/debug/pprof/profile", "/debug/pprof/cmdline", "/debug/pprof/trace", "/debug/pprof/symbol"} {
			r := httptest.NewRequest("GET", path, nil)
			r.RemoteAddr = c.from
			if to, err := net.ResolveTCPAddr("tcp", c.to); err == nil && c.to != "" {
				r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, net.Addr(to)))
			}
			w := httptest.NewRecorder()
			s.ServeHTTP(w, r)
			if w.Code != http.StatusForbidden {
				t.Errorf("%s to %q from %s: %d", path, c.to, c.from, w.Code)
			}
		}
	}
}

func TestLimits(t *testing.T) {
	url, _ := start(t, Config{Source: fixed{}})
	r, err := http.NewRequest("GET", url+"/usage", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("X-Long", strings.Repeat("x", 3*maxHeader))
	client := http.Client{Timeout: 10 * time.Second}
	response, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Error(response.Status)
	}
}

func TestServeTellsOfALostListener(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	if err := newServer(t, Config{Source: fixed{}}).Serve(t.Context(), l, nil); err == nil || !strings.Contains(err.Error(), l.Addr().String()) {
		t.Error(err)
	}
}

func TestListenUnix(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	first, err := ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", info.Mode(), err)
	}
	if _, err := ListenUnix(path); err == nil || !strings.Contains(err.Error(), "another process answers") {
		t.Errorf("taken from its owner: %v", err)
	}
	// As a killed process leaves it.
	first.(*net.UnixListener).SetUnlinkOnClose(false)
	first.Close()
	second, err := ListenUnix(path)
	if err != nil {
		t.Fatalf("left by a dead process: %v", err)
	}
	second.Close()
	if err := os.WriteFile(path, []byte("a file"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ListenUnix(path); err == nil {
		t.Error("a file was replaced")
	}
}

// gpu-manager's clients depend on names and numbers.
func TestWireFormat(t *testing.T) {
	want := []string{
		"ContainerStat.stat=1", "ContainerStat.project=2", "ContainerStat.user=3", "ContainerStat.cluster=4", "ContainerStat.spec=5",
		"DeviceInfo.id=1", "DeviceInfo.card_idx=2", "DeviceInfo.gpu=10", "DeviceInfo.mem=11", "DeviceInfo.pids=12", "DeviceInfo.device_mem=13",
		"Devices.dev=1", "GraphResponse.graph=1", "Spec.gpu=1", "Spec.mem=2", "UsageResponse.usage=1", "VersionResponse.version=1",
	}
	var got []string
	messages := api.File_display_display_proto.Messages()
	for i := range messages.Len() {
		fields := messages.Get(i).Fields()
		for j := range fields.Len() {
			f := fields.Get(j)
			got = append(got, fmt.Sprintf("%s.%s=%d", messages.Get(i).Name(), f.Name(), f.Number()))
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("%v\nwant %v", got, want)
	}
	names := []string{api.GPUDisplay_PrintGraph_FullMethodName, api.GPUDisplay_PrintUsages_FullMethodName, api.GPUDisplay_Version_FullMethodName}
	if !slices.Equal(names, []string{"/display.GPUDisplay/PrintGraph", "/display.GPUDisplay/PrintUsages", "/display.GPUDisplay/Version"}) {
		t.Error(names)
	}
	raw, err := proto.Marshal(&api.DeviceInfo{Id: "x", Gpu: 0.5, Pids: []int32{1, 300}})
	if err != nil || string(raw) != "\x0a\x01x\x55\x00\x00\x00\x3f\x62\x03\x01\xac\x02" {
		t.Errorf("%x %v", raw, err)
	}
}
