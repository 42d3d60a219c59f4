#!/usr/bin/env bash
# On a machine with a GPU: every test that needs one, then a sample of kernels under compute-sanitizer.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
tests=(
  tests/runtime/test_cuda_device.py
  tests/frontends/torch/test_cuda_torch.py
  tests/frontends/models/test_models_device.py
  tests/bench/test_cudnn_device.py
  tests/bench/test_cuda_peers_device.py
  tests/reconstruct/test_reconstruct_device.py
)
python3 -m pytest "${tests[@]}" -q -n auto -o filterwarnings= -p no:cacheprovider
kernels=$(mktemp -d)
python3 benchmarks/gpu/sample.py "$kernels"
for tool in memcheck racecheck; do
  compute-sanitizer --tool "$tool" --error-exitcode 9 --kernel-name kns=conv2d_kernel --kernel-name kns=transform_kernel \
    python3 benchmarks/gpu/sample.py "$kernels"
done
