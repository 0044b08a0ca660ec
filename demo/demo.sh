#!/bin/bash
# Shows what a slice is, on a real GPU if there is one, else on a simulated one. Each line of the
# table is measured now; the script fails if one does not hold.
set -u
cd "$(dirname "$0")/.."
tranche=build/bin/tranche gpuload=build/bin/gpuload
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
sim=()

if "$tranche" run --cores 1 -- true 2>/dev/null; then
	echo "On this machine's GPU."
else
	sim=(--sim a100-80g)
	export TRANCHE_STATE_DIR=$work/state # a machine of its own
	echo "No NVIDIA GPU here, so on a simulated one (NVIDIA A100, 80 GB); every figure below is a sim figure.
The code path is the same."
fi
echo

slice() { # FLAGS... -- COMMAND
	"$tranche" run "${sim[@]}" "$@"
}
field() { # NAME < JSON
	sed -n "s/.*\"$1\":\"\{0,1\}\([^,\"}]*\).*/\1/p"
}
mib() {
	echo $(($1 >> 20))
}
row() { # OK TEXT VALUE
	local mark=ok
	[ "$1" = 0 ] || { mark='DID NOT HOLD' failed=1; }
	printf '   %-58s %14s   %s\n' "$2" "$3" "$mark"
}
percent() {
	awk -v x="$1" 'BEGIN { printf "%.1f", 100 * x }'
}
within() { # VALUE LOW HIGH
	awk -v x="$1" -v a="$2" -v b="$3" 'BEGIN { exit !(x >= a && x <= b) }'
}

echo "1. Memory: tranche run --memory 1Gi, a program that allocates until it is refused"
slice --memory 1Gi -- "$gpuload" --alloc plain:64Mi --json >"$work/out" 2>"$work/err"
free=$(field free_before <"$work/out") got=$(field bytes <"$work/out")
context=$((1024 - $(mib "${free:-0}")))
row 0 "the process's own context takes" "$context MiB"
[ "$(mib "${got:-0}")" -gt 0 ] && [ "$((context + $(mib "$got")))" -le 1024 ]
row $? "then it could allocate, in pieces of 64 MiB" "$(mib "${got:-0}") MiB"
[ "$(field error <"$work/out")" = CUDA_ERROR_OUT_OF_MEMORY ]
row $? "and then $(field refused_by <"$work/out") said" "OUT_OF_MEMORY"
sed 's/^/   | /' "$work/err"
echo

echo "2. Compute: the same load, kernels of 1 ms as fast as they go"
for cores in 100 30; do
	slice --cores $cores -- "$gpuload" --kernel 1ms --warmup 0 --time 4 --json >"$work/out"
	first=$(field share_first_s <"$work/out") rest=$(field share_after_2s <"$work/out")
	if [ $cores = 100 ]; then
		row 0 "--cores 100: share of the GPU's time" "$(percent "$rest") %"
	else
		within "$first" 0.25 0.35
		row $? "--cores 30: in the first second" "$(percent "$first") %"
		within "$rest" 0.29 0.31
		row $? "--cores 30: from the third second on" "$(percent "$rest") %"
	fi
done
echo

echo "3. A real program: ffmpeg scales a 10 s clip of 1080p on the GPU"
ffmpeg -nostdin -v error -f lavfi -i testsrc2=size=1920x1080:rate=30:duration=10 \
	-c:v libx264 -preset ultrafast -y "$work/clip.mkv" || exit
filter=format=nv12,hwupload_cuda,scale_cuda=1280:720,thumbnail_cuda=100,hwdownload,format=nv12
scale() { # MEMORY
	slice --memory "$1" -- ffmpeg -nostdin -hide_banner -v error -i "$work/clip.mkv" -vf $filter \
		-f null - 2>"$work/err"
}
scale $((context + 256))Mi
row $? "with its context + 256 MiB it finishes" "done"
if scale $((context + 64))Mi; then status=1; else status=0; fi
row $status "with its context + 64 MiB it does not" "failed"
grep -q 'cuMemAlloc.*CUDA_ERROR_OUT_OF_MEMORY' "$work/err"
row $? "because CUDA refused memory to it, as it says itself:" ""
grep -m1 'CUDA_ERROR_OUT_OF_MEMORY' "$work/err" | sed 's/^/   | /'
echo
[ $failed = 0 ] && echo "Everything held." || echo "Something did not hold." >&2
exit $failed
