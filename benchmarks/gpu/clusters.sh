#!/usr/bin/env bash
# On a machine with a GPU: what clusters of thread blocks gain, into OUT (default: benchmarks/studies/nvidia-h200). Needs PyTorch with CUDA and nvcc.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-benchmarks/studies/nvidia-h200}
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
python3 benchmarks/clusters.py --json "$out/clusters.json"
