#!/bin/bash
# Accuracy of the compute limit for one tenant alone on its GPU: the GPU time it gets, by the
# simulated machine's own count (which the library cannot see), against its limit.
#
#   bench/alone/alone.sh [FILE.json]
#
# ALONE_SECONDS (8): length of a run. ALONE_LIMITS ("10 30 50 80"). ALONE_CASES: rows whose name
# holds this. Scored in windows of one second
# from 2 s after the start of the load. Ends with 1 when a mean is more than 1 point off.
set -euo pipefail
cd "$(dirname "$0")/../.."
json=${1:-}
seconds=${ALONE_SECONDS:-8}
limits=${ALONE_LIMITS:-10 30 50 80}
tranche=build/bin/tranche gpuload=build/bin/gpuload simctl=build/sim/simctl
sim=$(mktemp -d /dev/shm/tranche-bench.XXXXXX)
load=
trap '[ -z "$load" ] || kill "$load" 2>/dev/null || :; rm -rf "$sim"' EXIT

# name | gpuload's flags | HAMi-core at limits 10 30 50 80 (utilisation window of 1,000 / 167 ms)
cases='100 blocks x 10 ms|--kernel 10ms --grid 100|89/89 94/98 96/98 99/98
132 blocks x 0.1 ms|--kernel 0.1ms --grid 132|18/41 35/70 80/85 94/94
1,000 blocks x 1 ms|--kernel 1ms --grid 1000|20/52 57/71 78/88 94/93
100,000 blocks x 1 ms|--kernel 1ms --grid 100000|11/16 32/43 53/61 81/83
graph of 50 x 0.1 ms|--kernel 0.1ms --graph 50|- - - -'

# "NOW_NS BUSY_NS" of the simulated GPU, all its processes.
truth() {
	"$simctl" "$sim" truth --json |
		sed -n 's/,"procs".*//; s/.*"now_ns":\([0-9]*\).*"busy_ns":\([0-9]*\).*/\1 \2/p'
}

# run LIMIT FLAGS...: sets mean, low and high, in hundredths of a point of GPU time. LIMIT 0: none.
run() {
	local limit=$1 flags=$2 t0 b0 t b first_t first_b share cores=()
	rm -rf "${sim:?}"/*
	echo 'gpu model=h200-141g' >"$sim/spec"
	[ "$limit" = 0 ] || cores=(--cores "$limit")
	# shellcheck disable=SC2086 # flags are words
	"$tranche" run --sim "$sim" "${cores[@]}" --memory 8Gi -- \
		"$gpuload" $flags --time $((seconds + 2)) >"$sim/out" 2>&1 &
	load=$!
	# The load has begun when the GPU has been busy.
	for _ in $(seq 200); do
		read -r t0 b0 < <(truth || :) || b0=0
		[ "${b0:-0}" = 0 ] || break
		sleep 0.05
	done
	[ "${b0:-0}" != 0 ] || { echo "the load did not start:" >&2; cat "$sim/out" >&2; exit 1; }
	sleep 2
	read -r t0 b0 < <(truth)
	first_t=$t0 first_b=$b0 low=1000000 high=0
	for _ in $(seq $((seconds - 2))); do
		sleep 1
		read -r t b < <(truth)
		share=$(((b - b0) * 10000 / (t - t0)))
		[ $share -ge $low ] || low=$share
		[ $share -le $high ] || high=$share
		t0=$t b0=$b
	done
	mean=$(((b0 - first_b) * 10000 / (t0 - first_t)))
	wait "$load" || { echo "the load failed:" >&2; cat "$sim/out" >&2; exit 1; }
	load=
}

# Hundredths of a point as "12.34".
points() {
	local v=$1 sign=
	[ "$v" -ge 0 ] || { sign=-; v=$((-v)); }
	printf '%s%d.%02d' "$sign" $((v / 100)) $((v % 100))
}

rows=
row() { # CASE LIMIT
	rows+="${rows:+,}
 {\"case\":\"$1, limit $2\",\"metric\":\"GPU time achieved after 2 s\",\"unit\":\"% of one GPU\",\"value\":$(points "$mean"),\"spread\":[$(points "$low"),$(points "$high")],\"target\":$2,\"better\":\"nearest\",\"label\":\"sim\"}"
}

off=0
echo "One tenant alone on a simulated H200: GPU time from t = 2 s on, % of one GPU, $seconds s a run."
echo "HAMi-core: the same load on a model of GPU time, NVML window of 1,000 ms / 167 ms (docs/bench.md)."
printf '%-24s %6s %9s %8s %17s   %s\n' kernels limit achieved off 'seconds: min max' HAMi-core
while IFS='|' read -r name flags hami; do
	[[ $name == *"${ALONE_CASES:-}"* ]] || continue
	read -ra hami_at <<<"$hami"
	for limit in $limits; do
		run "$limit" "$flags"
		diff=$((mean - limit * 100))
		mark=
		[ ${diff#-} -le 100 ] || { mark=' MISSED'; off=$((off + 1)); }
		case $limit in 10) h=${hami_at[0]} ;; 30) h=${hami_at[1]} ;; 50) h=${hami_at[2]} ;; 80) h=${hami_at[3]} ;; *) h=- ;; esac
		printf '%-24s %6s %9s %8s %8s %8s   %s%s\n' "$name" "$limit" "$(points "$mean")" \
			"$(points "$diff")" "$(points "$low")" "$(points "$high")" "$h" "$mark"
		row "$name" "$limit"
	done
	# The same load without a limit must fill the GPU, or the figures above say nothing.
	long=$seconds seconds=4
	run 0 "$flags"
	seconds=$long
	mark=
	[ "$mean" -ge 9800 ] || { mark=' MISSED'; off=$((off + 1)); }
	printf '%-24s %6s %9s %8s %8s %8s   %s%s\n' "$name" none "$(points "$mean")" '' \
		"$(points "$low")" "$(points "$high")" 99 "$mark"
	row "$name" 100
done <<<"$cases"
if [ -n "$json" ]; then
	mkdir -p "$(dirname "$json")"
	printf '[%s\n]\n' "$rows" >"$json"
fi
[ $off = 0 ] || { echo "$off rows more than 1 point off"; exit 1; }
echo "all within 1 point"
