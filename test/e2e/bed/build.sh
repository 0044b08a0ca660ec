#!/bin/sh
# Builds what the bed's machines run (Kubernetes, etcd, containerd, runc, CNI plugins, pause, helm) from Go
# modules, and prints the directory that has them: bin/ and cni/. Each part is built once per version,
# into a cache outside the repository: ${XDG_CACHE_HOME:-~/.cache}/tranche/bed. Cold it takes about ten
# minutes of two cores, 230 MB of downloads and 5 GB of Go's build cache; nothing is installed.
#   K8S=1.37    the Kubernetes version: one of modules/kubernetes-*
# Needs Go, gcc, pkg-config and libseccomp's headers (tools/setup.sh e2e).
set -eu
bed=$(cd "$(dirname "$0")" && pwd)
k8s=${K8S:-1.37}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/tranche/bed
[ -d "$bed/modules/kubernetes-$k8s" ] || {
	echo "bed: K8S=$k8s: have $(cd "$bed/modules" && ls -d kubernetes-* | sed 's/kubernetes-//' | tr '\n' ' ')" >&2
	exit 1
}
for tool in go gcc pkg-config flock; do
	command -v "$tool" >/dev/null || { echo "bed: no $tool: tools/setup.sh e2e installs what is missing" >&2; exit 1; }
done
unset GOROOT GOOS GOARCH GOWORK CC
export CGO_ENABLED=0 GOFLAGS=-buildvcs=false

mkdir -p "$cache"
[ -n "${BED_LOCKED-}" ] || BED_LOCKED=1 exec flock "$cache/lock" "$0" "$@"

# key NAME DIRECTORY: a hash of what decides a part's build: versions, sources, how it is built.
key() {
	{
		cat "$2"/go.* "$2"/*.go 2>/dev/null
		sed -n "/^build_$1() {/,/^}/p" "$0"
		go env GOVERSION GOARCH
	} | sha256sum | cut -c1-12
}

# version DIRECTORY MODULE
version() { (cd "$1" && go list -m -f '{{.Version}}' "$2"); }

# part NAME DIRECTORY: run build_NAME once in that module, with $out as where its files go.
part() {
	name=$1 dir=$2
	made=$cache/$name-$(key "$name" "$dir")
	if [ ! -d "$made" ]; then
		out=$made.new
		rm -rf "$out"
		mkdir -p "$out"
		start=$(date +%s)
		(cd "$dir" && "build_$name")
		mv "$out" "$made"
		echo "bed: $name built in $(($(date +%s) - start)) s" >&2
	fi
	touch "$made"
	parts="$parts $made"
}

build_kubernetes() {
	v=$(version . k8s.io/kubernetes)
	minor=${v#v1.}
	x=
	for p in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
		x="$x -X $p.gitVersion=$v -X $p.gitMajor=1 -X $p.gitMinor=${minor%%.*} -X $p.gitTreeState=clean"
		x="$x -X $p.gitCommit=0000000000000000000000000000000000000000 -X $p.buildDate=2026-01-01T00:00:00Z"
	done
	go build -trimpath -ldflags "-s -w$x" -o "$out/bin/kube" .
	for p in kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubelet kubectl; do
		ln -s kube "$out/bin/$p"
	done
}

build_etcd() {
	go build -trimpath -ldflags '-s -w' -o "$out/bin/etcd" go.etcd.io/etcd/server/v3
}

build_containerd() {
	m=github.com/containerd/containerd/v2
	go build -trimpath -tags 'no_btrfs no_devmapper no_zfs' -ldflags "-s -w -X $m/version.Version=$(version . $m)" \
		-o "$out/bin/" $m/cmd/containerd $m/cmd/containerd-shim-runc-v2 $m/cmd/ctr
}

# runc's first code in a container is C. Without the seccomp tag every sandbox of the CRI fails.
build_runc() {
	m=github.com/opencontainers/runc
	v=$(version . $m)
	CGO_ENABLED=1 go build -trimpath -tags seccomp -ldflags "-s -w -X main.version=${v#v}" -o "$out/bin/runc" $m
}

build_cni() {
	m=github.com/containernetworking/plugins/plugins
	go build -trimpath -ldflags '-s -w' -o "$out/cni/" $m/main/bridge $m/main/loopback $m/ipam/host-local
}

# With the client libraries of the newest Kubernetes here: most of it is in Go's cache by then.
build_helm() {
	go build -trimpath -ldflags '-s -w' -o "$out/bin/helm" helm.sh/helm/v4/cmd/helm
}

build_pause() {
	go build -trimpath -ldflags '-s -w' -o "$out/bin/pause" .
}

parts=
part pause "$bed/pause"
part cni "$bed/modules/cni"
part runc "$bed/modules/runc"
part containerd "$bed/modules/containerd"
part etcd "$bed/modules/etcd"
part kubernetes "$bed/modules/kubernetes-$k8s"
part helm "$bed/modules/helm"

all=$cache/all-$(echo "$parts" | sha256sum | cut -c1-12)
if [ ! -d "$all" ]; then
	rm -rf "$all.new"
	mkdir -p "$all.new/bin" "$all.new/cni"
	for made in $parts; do
		for d in bin cni; do
			[ ! -d "$made/$d" ] || cp -al "$made/$d/." "$all.new/$d/"
		done
	done
	mv "$all.new" "$all"
fi
touch "$all"
find "$cache" -mindepth 1 -maxdepth 1 -name '*-????????????' -mtime +30 -exec rm -rf {} +
echo "$all"
