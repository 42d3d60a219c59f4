#!/usr/bin/env bash
# On a machine with a GPU: what docs/papers.md compares there, part by part; `make papers` is the part of a CPU. Needs PyTorch with CUDA and nvcc.
# Usage: papers.sh STUDIES RESULTS [PART...], the folders of both kinds of files, such as benchmarks/studies/nvidia-h200 and
# benchmarks/results/nvidia-h200. PARTs (default: all): layers ladder memory scheduled winograd search sliding. What is made again goes on where it
# ended in winograd and search, and begins anew in the others.
set -euo pipefail
cd "$(dirname "$0")/../.."
studies=${1:?"the folder of studies"} results=${2:?"the folder of results"}
parts=" ${*:3} "
[[ $# -gt 2 ]] || parts=" layers ladder memory scheduled winograd search sliding "
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
wanted() { [[ $parts == *" $1 "* ]]; }

if wanted layers; then benchmarks/gpu/bench.sh "$results" tuning_logs papers12 exact float16; fi
if wanted ladder; then benchmarks/gpu/ablation.sh "$results"; fi
if wanted memory; then benchmarks/gpu/memory.sh "$results"; fi
if wanted scheduled; then python3 benchmarks/scheduled.py --json "$studies/scheduled.json"; fi
if wanted winograd; then benchmarks/gpu/winograd.sh "$studies"; fi
if wanted search; then benchmarks/gpu/tvm_search.sh "$studies"; fi
if wanted sliding; then benchmarks/gpu/sliding.sh "$studies"; fi
