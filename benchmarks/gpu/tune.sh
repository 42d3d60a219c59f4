#!/usr/bin/env bash
# On a machine with a GPU: tunes the committed suites into LOGS (default: tuning_logs). A run that is stopped goes on where it was.
set -euo pipefail
cd "$(dirname "$0")/../.."
logs=${1:-tuning_logs}
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
tune() { python3 -c 'from im2win.cli import main; main()' tune "$@" --target cuda --logs "$logs"; }
tune papers12 --batch 128
tune papers12 --batch 128 --accuracy exact --layers conv1,conv2,conv3,conv7 --trials 96
tune papers12 --batch 128 --dtype float16 --layout NHWC
tune papers12 --batch 128 --dtype float16
