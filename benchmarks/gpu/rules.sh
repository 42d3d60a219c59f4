#!/usr/bin/env bash
# On a machine with a GPU: what each rule of the reconstructor gains on TVM's schedules, and racecheck of their kernels, into OUT (default:
# benchmarks/studies/nvidia-h200). Needs PyTorch with CUDA, nvcc and compute-sanitizer.
# Usage: rules.sh [OUT [SECONDS]]: no problem is begun after SECONDS (default: 240). The next run goes on with those that are lacking.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
python3 benchmarks/rule_gains.py --json "${1:-benchmarks/studies/nvidia-h200}/rule-gains.json" --limit "${2:-240}"
