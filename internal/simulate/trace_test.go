package simulate

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
)

func TestReadNodes(t *testing.T) {
	got, err := ReadNodes(strings.NewReader("sn,cpu_milli,memory_mib,gpu,model,gpu_memory_mib\na,64000,1024,2,P100,16384\nb,1000,1,0,,\n"))
	want := []Node{{Name: "a", CPU: 64000, RAM: 1 << 30, GPUs: 2, Model: "P100", GPUMemory: 16 << 30}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}
}

func TestReadPods(t *testing.T) {
	got, err := ReadPods(strings.NewReader("name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos\np,500,1,1,460,T4|A10,LS\nq,1,1,0,0,,BE\n"))
	want := []Pod{{Name: "p", CPU: 500, RAM: 1 << 20, GPUs: 1, Milli: 460, Models: []string{"T4", "A10"}}, {Name: "q", CPU: 1, RAM: 1 << 20}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}
}

func TestReadErrors(t *testing.T) {
	const nodes, pods = "sn,cpu_milli,memory_mib,gpu\n", "name,cpu_milli,memory_mib,num_gpu,gpu_milli\n"
	for text, want := range map[string]string{
		"":                   "header: EOF",
		"sn,gpu\n":           "header: no column cpu_milli",
		nodes + "a,x,1,1\n":  `line 2: cpu_milli "x": must be a whole number from 0 to 4294967296`,
		nodes + "a,1,1,-1\n": `line 2: gpu "-1": must be a whole number from 0 to 4294967296`,
		nodes + "a,1,1,99\n": `line 2: node "a" with 99 GPUs: must have a name and at most 64`,
	} {
		if _, err := ReadNodes(strings.NewReader(text)); err == nil || err.Error() != want {
			t.Errorf("%q: %v; want %s", text, err, want)
		}
	}
	for text, want := range map[string]string{
		pods + ",1,1,1,1\n":     "line 2: a pod without a name",
		pods + "p,1,1,1,1001\n": "line 2: pod p: 1001 thousandths of 1 GPUs: must be at most 1000 of 64",
		pods + "p,1,1,1,0\n":    "line 2: pod p: asks for GPUs but for nothing of them",
	} {
		if _, err := ReadPods(strings.NewReader(text)); err == nil || err.Error() != want {
			t.Errorf("%q: %v; want %s", text, err, want)
		}
	}
}

const exampleYAML = `
nodes:
- {name: big, count: 2, cpu: "64", ram: 512Gi, gpus: 8, model: H100, gpuMemory: 80Gi}
pods:
- {name: train, cpu: "8", ram: 32Gi, gpus: 2, cores: 100}
- {name: serve, count: 2, cpu: 500m, cores: 30, gpuMemory: 8Gi, models: [H100]}
`

func TestReadYAML(t *testing.T) {
	nodes, pods, err := ReadYAML([]byte(exampleYAML))
	got := fmt.Sprintf("%+v\n%+v\n%v", nodes, pods, err)
	want := "[{Name:big-0000 CPU:64000 RAM:549755813888 GPUs:8 Model:H100 GPUMemory:80 GiB} {Name:big-0001 CPU:64000 RAM:549755813888 GPUs:8 Model:H100 GPUMemory:80 GiB}]\n" +
		"[{Name:train CPU:8000 RAM:34359738368 GPUs:2 Milli:1000 GPUMemory:0 B Models:[]} " +
		"{Name:serve-00000 CPU:500 RAM:0 GPUs:1 Milli:300 GPUMemory:8 GiB Models:[H100]} {Name:serve-00001 CPU:500 RAM:0 GPUs:1 Milli:300 GPUMemory:8 GiB Models:[H100]}]\n<nil>"
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestYAMLErrors(t *testing.T) {
	const node = "nodes: [{name: a, gpus: 1}]\n"
	for text, want := range map[string]string{
		node + "pods: [{name: p, gpuMemory: 1k}]":                   "pods[0]: pod p: 1000 B of GPU memory: must be at least 1 MiB",
		"nodes: [{name: a, gpus: 1}, {name: b, gpus: 1, count: 0}]": "nodes[1]: node b: count 0: must be 1 or more (1 if left out), and at most 1000000 in all",
		"nodes: [{name: a, gpus: 65}]":                              "nodes[0]: node a: gpus 65: must be 1 to 64",
		"nodes: [{gpus: 1}]":                                        "nodes[0]: a node without a name",
		node + "pods: [{name: p, cores: 1, count: 0}]":              "pods[0]: pod p: count 0: must be 1 or more (1 if left out), and at most 1000000 in all",
		node + "pods: [{name: p, cores: 1, count: -1}]":             "pods[0]: pod p: count -1: must be 1 or more (1 if left out), and at most 1000000 in all",
		node + "pods: [{name: p, cores: 800}]":                      "pods[0]: pod p: cores 800: must be 0 to 100: one GPU has 100; several need gpus, with the cores of each",
		node + "pods: [{name: p, gpus: -1}]":                        "pods[0]: pod p: gpus -1: must be 0 to 64",
		node + "pods: [{name: p, cores: 1}, {cores: 1}]":            "pods[1]: a pod without a name",
	} {
		if _, _, err := ReadYAML([]byte(text)); err == nil || err.Error() != want {
			t.Errorf("%q:\n%v; want\n%s", text, err, want)
		}
	}
}

// Equal amounts of host and GPU memory are both read.
func TestEqualAmounts(t *testing.T) {
	nodes, pods, err := ReadYAML([]byte("nodes: [{name: a, ram: 16Gi, gpus: 1, gpuMemory: 16Gi}]\npods: [{name: p, ram: 8Gi, cores: 10, gpuMemory: 8Gi}]"))
	if err != nil || nodes[0].RAM != 16<<30 || nodes[0].GPUMemory != 16<<30 || pods[0].RAM != 8<<30 || pods[0].GPUMemory != 8<<30 {
		t.Errorf("%+v %+v %v", nodes, pods, err)
	}
	if shape, err := ParseShape("cores=10,memory=8Gi,ram=8Gi"); err != nil || shape.RAM != 8<<30 || shape.GPUMemory != 8<<30 {
		t.Errorf("%+v %v", shape, err)
	}
}

func TestOddInput(t *testing.T) {
	if nodes, err := ReadNodes(strings.NewReader("\ufeffsn,cpu_milli,memory_mib,gpu\r\na,1,1,1\r\n")); err != nil || len(nodes) != 1 || nodes[0].Name != "a" {
		t.Errorf("with a byte order mark: %+v, %v", nodes, err)
	}
	many := "nodes: [{name: a, gpus: 1}, {name: b, gpus: 1, count: 9223372036854775807}]"
	if _, _, err := ReadYAML([]byte(many)); err == nil || !strings.Contains(err.Error(), "at most 1000000 in all") {
		t.Errorf("%s: %v", many, err)
	}
	for _, memory := range []string{"1", "1023Ki"} {
		if _, err := ParseShape("memory=" + memory); err == nil || !strings.Contains(err.Error(), "of GPU memory: must be at least 1 MiB") {
			t.Errorf("%s: %v", memory, err)
		}
	}
	if _, err := ParseShape("memory=1Mi"); err != nil {
		t.Error(err)
	}
	if _, err := ParseShape("cores=10,model="); err == nil || !strings.Contains(err.Error(), "must be a name") {
		t.Error(err)
	}
}

func FuzzCSV(f *testing.F) {
	f.Add("sn,cpu_milli,memory_mib,gpu,model\na,64000,1024,2,P100\n")
	f.Add("name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\np,500,1,1,460,T4|A10\n")
	f.Add("name,cpu_milli,memory_mib,num_gpu,gpu_milli\n\"p\n\",1e3,,8,1000\n")
	f.Fuzz(func(t *testing.T, text string) {
		if nodes, err := ReadNodes(strings.NewReader(text)); err == nil {
			for _, n := range nodes {
				if n.GPUs < 1 || n.GPUs > maxGPUs || n.CPU < 0 || n.RAM < 0 {
					t.Errorf("%+v", n)
				}
			}
		}
		if pods, err := ReadPods(strings.NewReader(text)); err == nil {
			checkPods(t, pods)
		}
	})
}

func FuzzYAML(f *testing.F) {
	f.Add([]byte(exampleYAML))
	f.Add([]byte("nodes: [{name: a, gpus: 1}]\npods: [{name: b, cores: 101}]"))
	f.Fuzz(func(t *testing.T, data []byte) {
		if strings.Contains(string(data), "count") && len(data) > 60 {
			return // large counts are allowed, and slow
		}
		if _, pods, err := ReadYAML(data); err == nil {
			checkPods(t, pods)
		}
	})
}

func FuzzShape(f *testing.F) {
	f.Add("cores=30,memory=8Gi,gpus=2,cpu=4,ram=16Gi,model=A100|H100")
	f.Fuzz(func(t *testing.T, text string) {
		if p, err := ParseShape(text); err == nil {
			checkPods(t, []Pod{p})
		}
	})
}

func checkPods(t *testing.T, pods []Pod) {
	for _, p := range pods {
		placed := p.placementPod()
		if err := placed.Validate(); err != nil || p.GPUMilli() < 0 || p.CPU < 0 || p.RAM < 0 {
			t.Errorf("%+v: %v", p, err)
		}
	}
}
