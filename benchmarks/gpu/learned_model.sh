#!/usr/bin/env bash
# On a machine with GPUs: the study of the learned model, into OUT (default: benchmarks/studies/nvidia-h200). Needs PyTorch with CUDA and nvcc.
# Other arguments are those of benchmarks/learned_model.py. A stopped run goes on if build/learned-model is kept.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-benchmarks/studies/nvidia-h200}
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
python3 benchmarks/learned_model.py --target cuda --logs build/learned-model --json "$out/learned-model.json" "${@:2}"
