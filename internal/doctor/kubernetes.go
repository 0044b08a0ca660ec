package doctor

import (
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// kubelet's directories and sockets.
const (
	kubeletDir   = "/var/lib/kubelet"
	pluginDir    = kubeletDir + "/device-plugins"
	podResources = kubeletDir + "/pod-resources/kubelet.sock"
	podsAPI      = kubeletDir + "/pods-api/pods-api.sock"
)

func (h *host) hasKubelet() bool {
	return h.exists(pluginDir) || h.exists(kubeletDir+"/config.yaml")
}

// socket says whether somebody listens there: "" or what is wrong.
func (h *host) socket(name string) string {
	local, err := place(h.Root, name)
	if err != nil {
		return name + " is not there"
	}
	if n, err := h.stat(local); err != nil || n.mode&fs.ModeSocket == 0 {
		return name + " is no socket"
	}
	if err := h.Dial(local); err != nil {
		return "nobody answers at " + name
	}
	return ""
}

func (h *host) kubernetes(r *Report) {
	if !h.hasKubelet() {
		r.add("kubernetes", "kubelet", Skip, "no kubelet here: `tranche run` and `tranche node --standalone` need none", "")
		return
	}
	if why := h.socket(pluginDir + "/kubelet.sock"); why != "" {
		r.add("kubernetes", "device plugins", Fail, why, "start kubelet; in a container mount "+pluginDir)
	} else {
		r.add("kubernetes", "device plugins", OK, pluginDir+"/kubelet.sock", "")
	}
	if why := h.socket(podResources); why != "" {
		r.add("kubernetes", "pod resources", Fail, why, "start kubelet (1.28 or newer); in a container mount "+path.Dir(podResources))
	} else {
		r.add("kubernetes", "pod resources", OK, podResources, "")
	}
	if why := h.socket(podsAPI); why != "" {
		r.add("kubernetes", "pods API", Skip, why+": pods are read from the API server, as before 1.37", "")
	} else {
		r.add("kubernetes", "pods API", OK, podsAPI, "")
	}
	var others []string
	for _, name := range names(h.Root, pluginDir) {
		if strings.HasSuffix(name, ".sock") && strings.HasPrefix(name, "nvidia") {
			others = append(others, name)
		}
	}
	if len(others) > 0 {
		r.add("kubernetes", "other plugins", Warn, strings.Join(others, ", ")+": NVIDIA's device plugin gives out the same GPUs",
			"label the node nvidia.com/gpu.deploy.device-plugin=false, or take that plugin off it")
	} else {
		r.add("kubernetes", "other plugins", OK, "none that gives out the same GPUs", "")
	}
}

// runtimeOf is a container runtime: its socket, where its default runtime is written, and how.
type runtimeOf struct {
	name    string
	sockets []string
	configs []string // files, or directories of files
	setting *regexp.Regexp
}

var runtimes = []runtimeOf{
	{"containerd", []string{"/run/containerd/containerd.sock", "/run/k3s/containerd/containerd.sock", "/run/k0s/containerd.sock",
		"/var/snap/microk8s/common/run/containerd.sock"},
		[]string{"/etc/containerd/config.toml", "/etc/containerd/conf.d", "/var/lib/rancher/k3s/agent/etc/containerd/config.toml"},
		regexp.MustCompile(`(?m)^\s*default_runtime_name\s*=\s*["']([^"']*)["']`)},
	{"CRI-O", []string{"/run/crio/crio.sock"}, []string{"/etc/crio/crio.conf", "/etc/crio/crio.conf.d"},
		regexp.MustCompile(`(?m)^\s*default_runtime\s*=\s*["']([^"']*)["']`)},
	{"Docker", []string{"/run/cri-dockerd.sock", "/run/docker.sock"}, []string{"/etc/docker/daemon.json"},
		regexp.MustCompile(`"default-runtime"\s*:\s*"([^"]*)"`)},
}

const toolkitConfig = "/etc/nvidia-container-runtime/config.toml"

var unprivilegedEnv = regexp.MustCompile(`(?m)^\s*accept-nvidia-visible-devices-envvar-when-unprivileged\s*=\s*false`)

func (h *host) runtimes(r *Report) {
	seen := false
	for _, rt := range runtimes {
		i := slices.IndexFunc(rt.sockets, h.exists)
		if i < 0 {
			continue
		}
		seen = true
		if why := h.socket(rt.sockets[i]); why != "" {
			r.add("runtime", rt.name, Warn, why, "start it; as another user than root this cannot be told")
			continue
		}
		text := rt.sockets[i]
		if d := h.defaultRuntime(rt); d != "" {
			text += ", default runtime " + d
		}
		r.add("runtime", rt.name, OK, text, "")
	}
	switch {
	case !seen && h.hasKubelet():
		r.add("runtime", "container runtime", Warn, "no socket of containerd, CRI-O or Docker at its usual place",
			"none is needed by tranche itself; kubelet needs one: `crictl info`")
	case !seen:
		r.add("runtime", "container runtime", Skip, "none here", "")
	}
	h.toolkit(r)
	var specs []string
	for _, dir := range []string{"/etc/cdi", "/var/run/cdi"} {
		for _, name := range names(h.Root, dir) {
			if strings.Contains(name, "nvidia") {
				specs = append(specs, path.Join(dir, name))
			}
		}
	}
	if len(specs) > 0 {
		r.add("runtime", "CDI", Warn, strings.Join(specs, ", ")+": who may name a CDI device gets a whole GPU past its slice",
			"pods can name them by annotation only if the runtime has CDI annotations on; restrict who may set cdi.k8s.io/*")
	} else {
		r.add("runtime", "CDI", OK, "no NVIDIA devices in /etc/cdi and /var/run/cdi", "")
	}
}

// toolkit looks for a way past every limit: NVIDIA's runtime gives whole GPUs to whoever sets an environment
// variable, and a pod's own value wins over the one that a device plugin sets.
func (h *host) toolkit(r *Report) {
	nvidia := false
	for _, rt := range runtimes {
		nvidia = nvidia || strings.Contains(h.defaultRuntime(rt), "nvidia")
	}
	config := read(h.Root, toolkitConfig)
	switch {
	case !nvidia && config == "":
		r.add("runtime", "NVIDIA runtime", OK, "not installed", "")
	case unprivilegedEnv.MatchString(config):
		r.add("runtime", "NVIDIA runtime", OK, "installed; NVIDIA_VISIBLE_DEVICES of a pod is not obeyed", "")
	case nvidia:
		r.add("runtime", "NVIDIA runtime", Warn, "the default, and a pod that sets NVIDIA_VISIBLE_DEVICES gets whole GPUs past its slice",
			"accept-nvidia-visible-devices-envvar-when-unprivileged = false in "+toolkitConfig+", or another default runtime")
	default:
		r.add("runtime", "NVIDIA runtime", OK, "installed, not the default: a pod gets it only by its RuntimeClass", "")
	}
}

// defaultRuntime is the last setting in a runtime's files, "" if none has it.
func (h *host) defaultRuntime(rt runtimeOf) string {
	found := ""
	for _, config := range rt.configs {
		files := []string{config}
		for _, name := range names(h.Root, config) {
			files = append(files, path.Join(config, name))
		}
		for _, file := range files {
			for _, m := range rt.setting.FindAllStringSubmatch(read(h.Root, file), -1) {
				found = m[1]
			}
		}
	}
	return found
}

// failCgroupV1 is kubelet's setting; nil: not set, or no file to read.
func (h *host) failCgroupV1() *bool {
	var config struct {
		FailCgroupV1 *bool `json:"failCgroupV1"`
	}
	if yaml.Unmarshal([]byte(read(h.Root, kubeletDir+"/config.yaml")), &config) != nil {
		return nil
	}
	return config.FailCgroupV1
}
