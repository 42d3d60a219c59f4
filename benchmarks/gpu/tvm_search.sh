#!/usr/bin/env bash
# On a machine with a GPU: TVM's default MetaSchedule search beside ours, 64 trials each, into OUT (default: benchmarks/studies/nvidia-h200). Needs
# PyTorch with CUDA and nvcc. Usage: tvm_search.sh [OUT [SECONDS]]: no layers are begun that would not end within SECONDS (default: 290), by those before;
# the next run goes on with the rest. TRIALS in the environment: another number of trials.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-benchmarks/studies/nvidia-h200}
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
python3 benchmarks/tvm_search.py --json "$out/tvm-search.json" --limit "${2:-290}" --trials "${TRIALS:-64}"
