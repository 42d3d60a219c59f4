#!/usr/bin/env bash
# On a machine with a GPU: measures what tune.sh tuned, with PyTorch and all of cuDNN, into OUT (default: benchmarks/results/nvidia-h200).
# Usage: bench.sh [OUT [LOGS [PART...]]], PARTs as for tune.sh, bfloat16, depthwise, grouped, and tvm: with TVM's default search of all layers at once,
# which takes all CPUs for minutes (a folder TVM_CACHE in the environment keeps it).
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-benchmarks/results/nvidia-h200} logs=${2:-tuning_logs}
parts=" ${*:3} "
[[ $# -gt 2 ]] || parts=" papers12 exact float16 bfloat16 reduced resnet50 winograd64 depthwise grouped "
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
wanted() { [[ $parts == *" $1 "* ]]; }
bench() { python3 -c 'from im2win.cli.main import main; main()' bench "${@:2}" --target cuda --logs "$logs" --untuned --json "$out/$1.json"; }
half=(--dtype float16 --layout NHWC)

if wanted papers12; then bench papers12-float32-b128 papers12 --batch 128; fi
if wanted tvm; then (
  logs=$(mktemp -d) trials=${TRIALS:-64}  # ours with the same trials, not the records of longer runs
  python3 -c 'from im2win.cli.main import main; main()' tune papers12 --batch 128 --target cuda --trials "$trials" --logs "$logs"
  bench papers12-tvm"$trials"-float32-b128 papers12 --batch 128 --against torch,cudnn,tvm --tvm-trials "$trials" ${TVM_CACHE:+--tvm-cache "$TVM_CACHE"}
); fi
if wanted exact; then
  bench papers12-exact-float32-b128 papers12 --batch 128 --accuracy exact --layers conv1,conv2,conv3,conv7
fi
if wanted float16; then
  bench papers12-nhwc-float16-b128 papers12 --batch 128 "${half[@]}"
  bench papers12-float16-b128 papers12 --batch 128 --dtype float16
fi
if wanted bfloat16; then
  bf16=(--dtype bfloat16 --layout NHWC)
  bench papers12-nhwc-bfloat16-b128 papers12 --batch 128 "${bf16[@]}"
  bench resnet50-nhwc-bfloat16-b32 resnet50 --batch 32 "${bf16[@]}"
  bench depthwise-nhwc-bfloat16-b32 benchmarks/layers/depthwise.jsonl --batch 32 "${bf16[@]}"
fi
if wanted reduced; then
  bench papers12-nhwc-int8-out.int8-b128 papers12 --batch 128 --dtype int8 --out-dtype int8 --layout NHWC
  bench papers12-tf32-nhwc-float32-b128 papers12 --batch 128 --accuracy tf32 --layout NHWC
fi
if wanted resnet50; then
  for batch in 1 32; do
    bench resnet50-float32-b"$batch" resnet50 --batch "$batch"
    bench resnet50-nhwc-float16-b"$batch" resnet50 --batch "$batch" "${half[@]}"
    bench resnet50-float16-b"$batch" resnet50 --batch "$batch" --dtype float16
  done
fi
if wanted winograd64; then
  for batch in 1 16; do
    bench winograd64-float32-b"$batch" winograd64 --batch "$batch"
    bench winograd64-nhwc-float16-b"$batch" winograd64 --batch "$batch" "${half[@]}"
    bench winograd64-winograd-nhwc-float16-b"$batch" winograd64 --batch "$batch" "${half[@]}" --accuracy winograd
    bench winograd64-winograd-float16-b"$batch" winograd64 --batch "$batch" --dtype float16 --accuracy winograd
  done
fi
if wanted depthwise; then
  for options in "nhwc-float16-b32 --layout NHWC" "float16-b32" "nhwc-float16-b1 --layout NHWC" "nhwc-float32-b32 --layout NHWC" "float32-b32"; do
    read -r name layout <<< "$options"
    dtype=${name##*float} batch=${name##*-b}
    # shellcheck disable=SC2086
    bench depthwise-"$name" benchmarks/layers/depthwise.jsonl --batch "$batch" --dtype float"${dtype%%-*}" $layout
  done
fi
if wanted grouped; then
  for options in "nhwc-float16-b32 --layout NHWC" "float16-b32" "nhwc-float16-b1 --layout NHWC" "nhwc-bfloat16-b32 --layout NHWC"; do
    read -r name layout <<< "$options"
    dtype=${name#nhwc-} batch=${name##*-b}
    # shellcheck disable=SC2086
    bench grouped-"$name" benchmarks/layers/grouped.jsonl --batch "$batch" --dtype "${dtype%%-*}" $layout
  done
fi
