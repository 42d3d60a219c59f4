#!/usr/bin/env bash
# On a machine with a GPU of compute capability 9.0: papers12 (batch 128) and ResNet-50 (batch 32) in float16 and NHWC against the strongest
# peers, into the folder OUT, one result file for each PART, and a table of all. A part that fails or is stopped loses no other: run the script
# again, and it goes on where it was.
# Usage: peers.sh OUT [PART...], PARTs papers12-graph, resnet50-graph (PyTorch, cuDNN's algorithms by name and its graph interface),
# papers12-inductor, resnet50-inductor, papers12-cutlass, resnet50-cutlass; all of them if none is named.
# In the environment: CARRIED, a folder (default .gpu/peers) with nvidia_cudnn_frontend-*.whl and cutlass-include.tar.xz, which holds include/
# and tools/util/include/ of CUTLASS's source; LIMIT, seconds for a part (default 560); PLAN_SECONDS (default 25), see `im2win bench --help`;
# INDUCTOR, its layouts (default inductor_nhwc; inductor is both); LOGS, tuning records (default tuning_logs).
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:?usage: peers.sh OUT [PART...]}
parts=("${@:2}")
[[ ${#parts[@]} -gt 0 ]] || parts=(papers12-graph resnet50-graph papers12-cutlass resnet50-cutlass papers12-inductor resnet50-inductor)
carried=${CARRIED:-.gpu/peers} limit=${LIMIT:-560}
work=$(realpath -m "${WORK:-.gpu/peers-built}") # what is unpacked and compiled here; kept for the next run
mkdir -p "$out" "$work"
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH} TORCHINDUCTOR_CACHE_DIR=$work/inductor
wheels=("$carried"/nvidia_cudnn_frontend-*.whl)
if [[ -f ${wheels[0]} && ! -d $work/site/cudnn ]]; then python3 -m zipfile -e "${wheels[0]}" "$work/site"; fi
if [[ -d $work/site ]]; then export PYTHONPATH=$PYTHONPATH:$work/site; fi
if [[ -f $carried/cutlass-include.tar.xz && ! -d $work/cutlass ]]; then
  mkdir -p "$work/cutlass.new" && tar -C "$work/cutlass.new" -xJf "$carried/cutlass-include.tar.xz" && mv "$work/cutlass.new" "$work/cutlass"
fi

for part in "${parts[@]}"; do
  suite=${part%%-*} peer=${part##*-}
  batch=128
  [[ $suite == papers12 ]] || batch=32
  file=$out/$suite-$peer-nhwc-float16-b$batch.json
  common=("$suite" --batch "$batch" --logs "${LOGS:-tuning_logs}" --resume --json "$file")
  bench=(python3 -c 'from im2win.cli.main import main; main()' bench "${common[@]}" --target cuda --dtype float16 --layout NHWC)
  case $peer in
    graph) run=("${bench[@]}" --against torch,cudnn,cudnn-graph --plan-seconds "${PLAN_SECONDS:-25}") ;;
    inductor) run=("${bench[@]}" --against "torch,${INDUCTOR:-inductor_nhwc}") ;;
    cutlass) run=(python3 benchmarks/gpu/cutlass_peer/cutlass_peer.py "${common[@]}" --cutlass "$work/cutlass" --build "$work/variants") ;;
    *) echo "PART (=$part) must be papers12 or resnet50, with -graph, -inductor or -cutlass behind it." >&2 && exit 2 ;;
  esac
  begun=$SECONDS status=0
  timeout -k 20 "$limit" "${run[@]}" >"$out/$part.log" 2>&1 || status=$?
  said=done
  [[ $status == 0 ]] || said="status $status (124: it ran past $limit s; run it again to go on): $(tail -n 1 "$out/$part.log")"
  echo "$part: $((SECONDS - begun)) s, $said"
done
python3 benchmarks/gpu/peers_table.py "$out"
