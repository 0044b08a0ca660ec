package scheduler

import (
	"encoding/json"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	extender "k8s.io/kube-scheduler/extender/v1"
)

func parseArgs(body string) (args, error) {
	var a args
	err := a.parse(body)
	return a, err
}

func TestArgs(t *testing.T) {
	p := testPod("p", 30, 4)
	p.Annotations[`odd "key"\`] = "{[ ü"
	names := []string{"a", "b", "ü\"x"}
	body, err := json.Marshal(extender.ExtenderArgs{Pod: p, NodeNames: &names})
	if err != nil {
		t.Fatal(err)
	}
	a, err := parseArgs(string(body))
	if err != nil || !reflect.DeepEqual(a.names, names) || a.whole {
		t.Fatalf("%+v %v", a, err)
	}
	asked, err := a.asked()
	if err != nil || asked.UID != p.UID || asked.Version != p.ResourceVersion {
		t.Errorf("%+v %v", asked, err)
	}
	if got, err := asked.Object(); err != nil || got.Name != "p" || !reflect.DeepEqual(got.Annotations, p.Annotations) {
		t.Errorf("%v %+v", err, got)
	}
	list := &corev1.NodeList{Items: []corev1.Node{*testNode("a", 1, "T4", gib), *testNode("b", 1, "T4", gib), *testNode("c", 1, "T4", gib)}}
	if body, err = json.Marshal(extender.ExtenderArgs{Pod: p, Nodes: list}); err != nil {
		t.Fatal(err)
	}
	if a, err = parseArgs(string(body)); err != nil || !reflect.DeepEqual(a.names, []string{"a", "b", "c"}) || !a.whole {
		t.Fatalf("%+v %v", a, err)
	}
	v := Verdict{Passed: []string{"a", "c"}, Failed: []Failure{{"b", `no "room"`}}}
	var out extender.ExtenderFilterResult
	if err := json.Unmarshal(appendFilter(nil, &a, &v), &out); err != nil {
		t.Fatal(err)
	}
	want := extender.ExtenderFilterResult{Nodes: &corev1.NodeList{Items: []corev1.Node{list.Items[0], list.Items[2]}}, FailedNodes: extender.FailedNodesMap{"b": `no "room"`}}
	if got, want := mustJSON(t, out), mustJSON(t, want); got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
}

func mustJSON(t *testing.T, v any) string {
	t.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestAnswers(t *testing.T) {
	a := args{names: []string{"a", "b"}}
	for _, c := range []struct {
		v    Verdict
		want string
	}{
		{Verdict{}, `{"NodeNames":[],"FailedNodes":{}}`},
		{Verdict{Passed: []string{"a"}, Failed: []Failure{{"b", "why"}}}, `{"NodeNames":["a"],"FailedNodes":{"b":"why"}}`},
		{Verdict{Unresolvable: "odd\n"}, `{"NodeNames":[],"FailedAndUnresolvableNodes":{"a":"odd\n","b":"odd\n"}}`},
	} {
		if got := string(appendFilter(nil, &a, &c.v)); got != c.want {
			t.Errorf("%s, want %s", got, c.want)
		}
	}
	if got := string(appendScores(nil, &a, []Score{{"a", 10}, {"b", 3}})); got != `[{"Host":"a","Score":10},{"Host":"b","Score":3}]` {
		t.Error(got)
	}
}

func TestBadBodies(t *testing.T) {
	for body, want := range map[string]string{
		``: "an object is expected", `{`: "a string is expected", `{"Pod":{}`: "a comma or the object's end is expected", `{"NodeNames":["a"]}`: "no pod",
		`{"Pod":null}`: "no pod", `{"Pod":{},"Nodes":{"items":[{"metadata":{"name":"a"}}]},"NodeNames":["b"]}`: "both nodes and names", `{"Pod":{},"NodeNames":["a",]}`: "a string is expected",
		`{"Pod":{},"NodeNames":[1]}`: "a string is expected", `{"Pod":{},"Nodes":{"items":[{}]}}`: "a node without a name",
		`{"Pod":{}} x`: "something follows", `{"Pod":}`: "a value is expected", `{"Pod":{},"NodeNames":["a`: "does not end",
	} {
		if _, err := parseArgs(body); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", body, err, want)
		}
	}
}

// What encoding/json takes is read the same way.
func FuzzArgs(f *testing.F) {
	f.Add(`{"Pod":{"metadata":{"uid":"u","resourceVersion":"7"}},"NodeNames":["a","b\n"]}`)
	f.Add(`{"Pod":{"metadata":{"uid":"u"}},"Nodes":{"items":[{"metadata":{"name":"a"},"x":[1,{"y":"]"}]}]}}`)
	f.Add(`{"Pod":{"metadata":{"uid":"u"}},"NodeNames":["node-00001","node-00002.example","] [","",","]}`)
	f.Add(`{"pod":{},"x":"\\\"","nodenames":null}`)
	f.Fuzz(func(t *testing.T, body string) {
		a, err := parseArgs(body)
		if err == nil {
			_, _ = a.asked()
		}
		var want struct {
			Pod       json.RawMessage
			NodeNames []string
		}
		keys := map[string]json.RawMessage{}
		if json.Unmarshal([]byte(body), &want) != nil || json.Unmarshal([]byte(body), &keys) != nil || len(keys) != strings.Count(strings.ToLower(body), `":`) {
			return // not JSON, or keys that are there twice or within others
		}
		if len(want.NodeNames) > 0 && err == nil && (!reflect.DeepEqual(a.names, want.NodeNames) || a.pod != string(want.Pod)) {
			t.Errorf("%q: %+v, want %+v", body, a, want)
		}
		if err != nil || a.whole {
			return
		}
		// All names, all but the first, and all with scores, are what encoding/json would have written.
		for _, passed := range [][]string{a.names, a.names[min(1, len(a.names)):]} {
			var out extender.ExtenderFilterResult
			text := appendFilter(nil, &a, &Verdict{Passed: passed})
			if err := json.Unmarshal(text, &out); err != nil || !slices.Equal(*out.NodeNames, passed) {
				t.Errorf("%q: %s, %v", body, text, err)
			}
		}
		var scores []Score
		for _, name := range a.names {
			scores = append(scores, Score{name, 3})
		}
		var list extender.HostPriorityList
		if text := appendScores(nil, &a, scores); json.Unmarshal(text, &list) != nil || len(list) != len(scores) || len(list) > 0 && list[0].Host != scores[0].Node {
			t.Errorf("%q: %s", body, text)
		}
	})
}

// Lists that are taken at once are what encoding/json reads, whatever is in them and wherever words of eight bytes end; lists of
// names of nodes are always taken.
func TestPlainStrings(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	taken := 0
	for range 200_000 {
		var text strings.Builder
		text.WriteByte('[')
		for i := range r.IntN(5) {
			if i > 0 {
				text.WriteByte(',')
			}
			text.WriteByte('"')
			for range r.IntN(20) {
				text.WriteByte("abcdefghij-.0123"[r.IntN(16)])
			}
			text.WriteByte('"')
		}
		text.WriteByte(']')
		body := []byte(text.String())
		odd := r.IntN(3) == 0
		if odd {
			body[r.IntN(len(body))] = []byte{'"', '\\', ',', ']', '[', ' ', 0x1f, 0x7f, 0x80, 0xff, '!', '#', '[', ']'}[r.IntN(14)]
		}
		x := scanner{text: string(body) + `,"next":[]}`}
		names, list := x.plainStrings(nil)
		if list == "" {
			if !odd && text.Len() > 2 {
				t.Fatalf("%s was not taken", body)
			}
			continue
		}
		taken++
		var want []string
		if err := json.Unmarshal([]byte(list), &want); err != nil || !slices.Equal(names, want) || x.at != len(list) {
			t.Fatalf("%q: %q, want %q: %v", body, names, want, err)
		}
	}
	if taken < 1000 {
		t.Error("hardly any was taken")
	}
}
