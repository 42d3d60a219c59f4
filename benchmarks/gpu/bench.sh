#!/usr/bin/env bash
# On a machine with a GPU: measures what tune.sh tuned, with PyTorch and all of cuDNN, into OUT (default: benchmarks/results/nvidia-h200).
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-benchmarks/results/nvidia-h200} logs=${2:-tuning_logs}
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
bench() { python3 -c 'from im2win.cli import main; main()' bench "$@" --target cuda --logs "$logs" --untuned; }
bench papers12 --batch 128 --json "$out/papers12-float32-b128.json"
bench papers12 --batch 128 --accuracy exact --layers conv1,conv2,conv3,conv7 --json "$out/papers12-exact-float32-b128.json"
bench papers12 --batch 128 --dtype float16 --layout NHWC --json "$out/papers12-nhwc-float16-b128.json"
bench papers12 --batch 128 --dtype float16 --json "$out/papers12-float16-b128.json"
