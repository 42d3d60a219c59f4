#!/usr/bin/env bash
# On a machine with a GPU: the thesis' GPU ladder and Alg. 9 without each technique, on the layers of the papers, into OUT (default:
# benchmarks/results/nvidia-h200). Needs PyTorch with CUDA and nvcc.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-benchmarks/results/nvidia-h200}
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
python3 -c 'from im2win.cli.main import main; main()' ablation papers12 --target cuda --batch 128 --json "$out/ladder-papers12-float32-b128.json"
