#!/bin/sh
# Runs every fuzz target of the Go code for a time each (default 30s), two at once. The output of one that fails is shown, and
# its input is left in the package's testdata/fuzz.
#   fuzz.sh [TIME] [REGEXP of PACKAGE/TARGET]
set -eu
cd "$(dirname "$0")/.."
time=${1:-30s} only=${2:-.}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
# The engine fails a run whose time is over while it makes an input shorter, though it found nothing; a target that hangs is told
# otherwise ("deadlocked", after 10 s).
ended() { # output
	grep -q '^    context deadline exceeded$' "$1" && ! grep -qE 'Failing input|panic|deadlocked|hung' "$1"
}
one() { # directory, target
	name=$(echo "$1/$2" | tr / _)
	if go test -vet=off -run '^$' -fuzz "^$2\$" -fuzztime "$time" -fuzzminimizetime 200x -parallel 1 "./$1" >"$out/$name" 2>&1 ||
		ended "$out/$name"; then
		echo "ok   $1 $2: $(grep -o 'execs: [0-9]*' "$out/$name" | tail -1)"
	else
		echo "FAIL $1 $2"
		cat "$out/$name"
		: >"$out/failed"
	fi
}
n=0
for file in $(git ls-files '*_test.go'); do
	for target in $(sed -n 's/^func \(Fuzz[A-Za-z0-9_]*\)(.*/\1/p' "$file"); do
		echo "$(dirname "$file")/$target" | grep -Eq "$only" || continue
		one "$(dirname "$file")" "$target" &
		n=$((n + 1))
		if [ $((n % 2)) = 0 ]; then wait; fi
	done
done
wait
[ "$n" -gt 0 ] || { echo "fuzz: no target is called $only" >&2; exit 2; }
[ ! -e "$out/failed" ]
