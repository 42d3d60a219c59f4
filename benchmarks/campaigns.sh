#!/usr/bin/env bash
# The campaigns that say how far kernels, checks and tests can be trusted, one after the other, into the folder OUT: a result file and a
# log for each PART, and a table of all. Needs no checkout, network or GPU. Each part is written as it goes and ends by itself when its
# time is over: run the script again with the same OUT, and it goes on where it was. Files that are whole go to benchmarks/studies/DEVICE.
# Usage: campaigns.sh OUT [PART...], PARTs fuzz-cpu and fuzz-cuda (random kernels), broken-cpu, broken-cuda and broken-reconstructed
# (kernels with mistakes), mutation (changes of the source), fleet (workers that wait; run nothing else meanwhile); all of them if none is
# named.
# In the environment: PROCESSES (default: all CPUs but two); LIMIT, seconds for a part (default 480); TOTAL, seconds for all parts of this
# call (default: no limit), after which the next parts have no time left; COUNT_CPU (default 10000), COUNT_CUDA (default 1000) and SEED
# (default 0) of random kernels; MUTANTS, the list of mutants (default OUT/mutants.json; drawn if it is missing and Cosmic Ray is
# installed), COUNT_MUTANTS (default 300) and TEST_SECONDS, what a file of tests may take in a mutation run (default 120); WAIT, seconds
# of a fleet's candidate (default 2); IM2WIN_COMMIT, the commit that files name where there is no checkout; PYTHON (default python3).
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:?usage: campaigns.sh OUT [PART...]}")
parts=("${@:2}")
[[ ${#parts[@]} -gt 0 ]] || parts=(fuzz-cpu fuzz-cuda broken-cpu broken-cuda broken-reconstructed mutation fleet)
cpus=$(nproc)
python=${PYTHON:-python3} processes=${PROCESSES:-$((cpus > 3 ? cpus - 2 : 1))} limit=${LIMIT:-480} total=${TOTAL:-}
mutants=${MUTANTS:-$out/mutants.json}
mkdir -p "$out"
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH} CUDA_VISIBLE_DEVICES=""

for part in "${parts[@]}"; do
  left=$limit
  if [[ -n $total && $((total - SECONDS)) -lt $left ]]; then left=$((total - SECONDS)); fi
  if [[ $left -lt 20 ]]; then echo "$part: no time left" && continue; fi
  file=$out/$part.json log=$out/$part.log
  spent=(--processes "$processes" --seconds "$((left - 10))" --json "$file") # ten seconds to end what runs
  case $part in
    fuzz-cpu) run=(tests/fuzz/kernels.py --count "${COUNT_CPU:-10000}" --seed "${SEED:-0}" --batch 25 "${spent[@]}") ;;
    fuzz-cuda) run=(tests/fuzz/kernels.py --target cuda --count "${COUNT_CUDA:-1000}" --seed "${SEED:-0}" --batch 25 "${spent[@]}") ;;
    broken-*) run=(tests/fuzz/broken.py "${part#broken-}" "${spent[@]}") ;;
    mutation) run=(tests/mutation/mutants.py run "$mutants" --test-seconds "${TEST_SECONDS:-120}" "${spent[@]}") ;;
    fleet) run=(benchmarks/fleet.py --devices cpu,cpu,cpu,cpu --wait "${WAIT:-2}" --json "$file" n1-c16x14x14-k16x3x3-p1) ;;
    *) echo "PART (=$part) must be fuzz-cpu, fuzz-cuda, broken-cpu, broken-cuda, broken-reconstructed, mutation or fleet." >&2 && exit 2 ;;
  esac
  if [[ $part == mutation && ! -f $mutants ]]; then
    "$python" tests/mutation/mutants.py draw --count "${COUNT_MUTANTS:-300}" "$mutants" >"$log" 2>&1 || true
    if [[ ! -f $mutants ]]; then echo "mutation: no list of mutants: $(tail -n 1 "$log")" && continue; fi
  fi
  if [[ $part == fleet && -f $file ]]; then echo "fleet: there is a result" && continue; fi
  begun=$SECONDS status=0
  timeout -k 20 "$((left + 60))" "$python" "${run[@]}" >"$log" 2>&1 || status=$?
  echo "$part: $((SECONDS - begun)) s, status $status: $(tail -n 1 "$log")"
done
"$python" benchmarks/campaigns_table.py "$out"
