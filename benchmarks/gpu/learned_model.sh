#!/usr/bin/env bash
# On a machine with GPUs: measures the candidates of the study of the learned model, and packs them into OUT/learned-model.tgz. Needs PyTorch with CUDA
# and nvcc. Usage: learned_model.sh OUT [SECONDS [ARGUMENT...]]: at most about SECONDS (default: 290); ARGUMENTs are those of
# benchmarks/learned_model.py. The next run goes on if build/learned-model is still there. The searches are replayed anywhere, without a GPU:
#   tar -xzf OUT/learned-model.tgz && python benchmarks/learned_model.py --replay-only --target cuda --device nvidia-h200 --layers papers12:conv1,conv2 \
#     --logs build/learned-model --json benchmarks/studies/nvidia-h200/learned-model.json
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:?"the folder of the result"} seconds=${2:-290}
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
python3 benchmarks/learned_model.py --target cuda --logs build/learned-model --top 128 --uniform 128 --limit "$seconds" "${@:3}"
mkdir -p "$out"
tar -czf "$out/learned-model.tgz" build/learned-model
