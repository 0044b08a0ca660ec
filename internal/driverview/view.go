package driverview

import (
	"debug/elf"
	"path"
)

// View is one directory of driver files. It is not changed after Build.
type View struct {
	// Name is the directory's, unique by content. Record it for every container that gets the view:
	// GC asks for it.
	Name string
	// Dir is where this process sees the view, HostDir where kubelet and the runtime do.
	Dir, HostDir string
	// Version of the driver.
	Version string
	// Report says what is in it, what was left out, and what was not there.
	Report Report

	arch       elf.Machine
	share, smi bool
	needs      []string
}

// Mount is a bind mount into a container.
type Mount struct {
	HostPath, ContainerPath string
	ReadOnly                bool
}

// Mounts are what a container needs of the view: the directory, and with our libraries in front
// those over the names in the usual library directories as well, so that they hold whatever
// LD_LIBRARY_PATH a pod sets. The directories need not exist in the image.
func (v *View) Mounts() []Mount {
	out := []Mount{{HostPath: v.HostDir, ContainerPath: MountPath, ReadOnly: true}}
	if v.share {
		for _, dir := range []string{"/usr/lib/" + triplet(v.arch), "/usr/lib64"} {
			for _, f := range []family{cuda, nvml} {
				from := path.Join(v.HostDir, "lib64", f.stem()+".so.1")
				for _, name := range []string{f.stem() + ".so.1", f.stem() + ".so"} {
					out = append(out, Mount{HostPath: from, ContainerPath: path.Join(dir, name), ReadOnly: true})
				}
			}
		}
	}
	if v.smi {
		out = append(out, Mount{HostPath: path.Join(v.HostDir, "bin/nvidia-smi"), ContainerPath: "/usr/bin/nvidia-smi", ReadOnly: true})
	}
	for _, dir := range v.needs {
		out = append(out, Mount{HostPath: dir, ContainerPath: dir, ReadOnly: true})
	}
	return out
}

// Env is the environment of a container with the view. compat32 is true for a container that has
// compat32=true in its own: 32-bit libraries are then found too, after the 64-bit ones.
func (v *View) Env(compat32 bool) map[string]string {
	libs := MountPath + "/lib64"
	if compat32 {
		libs += ":" + MountPath + "/lib"
	}
	return map[string]string{
		"LD_LIBRARY_PATH": libs,
		// NVIDIA's runtime, where it is the default one, must not add the driver again.
		"NVIDIA_VISIBLE_DEVICES": "void",
	}
}
