#!/usr/bin/env bash
# On a machine with a GPU: ResNet-50 in PyTorch, every way to run it, and what a call costs, into OUT (default: benchmarks/studies/nvidia-h200).
# Usage: pytorch.sh [OUT [LOGS]]
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-benchmarks/studies/nvidia-h200} logs=${2:-tuning_logs}
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
for dtype in float32 float16; do
  python3 benchmarks/pytorch_models.py --device cuda --model resnet50 --batch 32 --dtype "$dtype" --logs "$logs" \
    --json "$out/pytorch-resnet50-$dtype-b32.json"
done
python3 benchmarks/op_overhead.py --device cuda --json "$out/op-overhead.json"
