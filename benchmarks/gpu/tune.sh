#!/usr/bin/env bash
# On a machine with GPUs: tunes the committed suites into LOGS (default: tuning_logs), all parts or those named. Layers are shared out among
# the GPUs. A run that is stopped goes on where it was.
# Usage: tune.sh [LOGS [PART...]], PARTs: papers12 exact float16 reduced resnet50 winograd64; TRIALS in the environment. The part hints, which
# must be named, measures today's default tile where LOGS' proof does not say that it was: of hints, and of records that had its rivals only;
# HINTS in the environment names the accuracies (default: all).
set -euo pipefail
cd "$(dirname "$0")/../.."
logs=${1:-tuning_logs}
parts=" ${*:2} "
[[ $# -gt 1 ]] || parts=" papers12 exact float16 reduced resnet50 winograd64 "
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
wanted() { [[ $parts == *" $1 "* ]]; }
tune() { python3 -c 'from im2win.cli.main import main; main()' tune "$@" --target cuda --logs "$logs" --trials "${TRIALS:-64}"; }
half=(--dtype float16 --layout NHWC)

if wanted hints; then (
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  python3 - "$logs" "$folder" <<'PYTHON'
import json, pathlib, sys
found = {}
for proof in pathlib.Path(sys.argv[1]).glob("nvidia-*/proof.json"):
    for row in json.loads(proof.read_text())["choices"]["layers"]:
        conv, accuracy, kind, *_ = row.split()
        if kind != "met":
            found.setdefault(accuracy, []).append(json.dumps({"schema": 1, "conv": conv, "count": 1, "target": "cuda"}) + "\n")
for accuracy, lines in found.items():
    (pathlib.Path(sys.argv[2]) / f"{accuracy}.jsonl").write_text("".join(lines))
PYTHON
  for accuracy in ${HINTS:-float32 tf32 winograd exact}; do
    layers=$folder/$accuracy.jsonl
    [[ ! -e $layers ]] || TRIALS=${TRIALS:-1} tune "$layers" --accuracy "$accuracy"
  done
); fi
if wanted papers12; then tune papers12 --batch 128; fi
if wanted exact; then TRIALS=${TRIALS:-96} tune papers12 --batch 128 --accuracy exact --layers conv1,conv2,conv3,conv7; fi
if wanted float16; then
  tune papers12 --batch 128 "${half[@]}"
  tune papers12 --batch 128 --dtype float16
fi
if wanted reduced; then
  tune papers12 --batch 128 --dtype int8 --out-dtype int8 --layout NHWC
  tune papers12 --batch 128 --accuracy tf32 --layout NHWC
fi
if wanted resnet50; then
  for batch in 1 32; do
    tune resnet50 --batch "$batch"
    tune resnet50 --batch "$batch" "${half[@]}"
  done
fi
if wanted winograd64; then
  for batch in 1 16; do
    tune winograd64 --batch "$batch"
    tune winograd64 --batch "$batch" "${half[@]}"
    tune winograd64 --batch "$batch" --dtype float16
    tune winograd64 --batch "$batch" "${half[@]}" --algorithm winograd --accuracy winograd
    tune winograd64 --batch "$batch" --dtype float16 --algorithm winograd --accuracy winograd
  done
fi
