#!/usr/bin/env bash
# On a machine with a GPU: the study of Winograd on tensor cores, into OUT (default: benchmarks/studies/nvidia-h200). Needs PyTorch with CUDA and nvcc.
# Usage: winograd.sh [OUT [SECONDS]]: no problem is begun after SECONDS (default: 140). The next run goes on with those that are lacking.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-benchmarks/studies/nvidia-h200}
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
python3 benchmarks/winograd_tensor_cores.py --json "$out/winograd-tensor-cores.json" --limit "${2:-140}" --tries 2 --int8-tries 1 --seconds 0.1 \
  --layers map224,map320,map448,map640,map960 --layers-of-many map224,map320,map448
