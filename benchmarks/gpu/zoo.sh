#!/usr/bin/env bash
# On a machine with a GPU: the zoo of networks, eager and as CUDA graphs, into OUT (default: benchmarks/studies/nvidia-h200). Resumable.
# Usage: zoo.sh [OUT [OPTION...]], OPTIONs of benchmarks/zoo.py for every run, such as --subjects ours_nhwc,torch_nchw,torch_nhwc.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-benchmarks/studies/nvidia-h200}
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
for dtype in float32 float16 bfloat16; do
  for batch in 1 32; do
    python3 benchmarks/zoo.py --device cuda --build-ahead --batch "$batch" --dtype "$dtype" --json "$out/zoo-$dtype-b$batch.json" "${@:2}"
  done
done
