#!/usr/bin/env bash
# On a machine with a GPU: device memory of every algorithm, by formula and measured, and of cuDNN's, into OUT (default: benchmarks/results/nvidia-h200).
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-benchmarks/results/nvidia-h200}
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
python3 -c 'from im2win.cli.main import main; main()' layers papers12 --batch 128 --target cuda --memory --json "$out/memory-papers12-b128.json"
