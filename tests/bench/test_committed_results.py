"""The committed result files: which are older than the kernels they time, and that no layer's shipped choice is slower than the default.

A new file must be made by today's kernels, and a change of the kernels must say here which files it leaves behind. A file that is measured
anew leaves both tables.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from im2win.bench.results import Result, Row, slower_choices
from im2win.bench.source import stale
from im2win.studies.confirmation import timed

ROOT = Path(__file__).parents[2] / "benchmarks"
FILES = {path.relative_to(ROOT).as_posix(): path for kind in ("results", "studies") for path in sorted(ROOT.glob(f"{kind}/*/*.json"))}

H200 = "results/nvidia-h200"

# Files that are older than the kernels they time, with what `im2win.bench.source.stale` says of them. "no digest": they are from before
# files held digests, so that nothing proves which kernels they timed.
STALE = {
    "results/amd-epyc-znver4-2t/ladder-papers12-float32-b1.json": "other kernels and choice",
    "results/amd-epyc-znver4-2t/resnet50-exact-float32-b8.json": "other kernels and choice",
    "results/amd-epyc-znver5-2t/papers12-float32-b1.json": "other kernels and choice and runtime",
    "results/amd-epyc-znver5-2t/papers12-float32-b8.json": "other kernels and choice and runtime",
    "results/amd-epyc-znver5-2t/resnet50-float32-b1.json": "other kernels and choice and runtime",
    "results/intel-xeon-emeraldrapids-2t/depthwise-float32-b1.json": "other kernels and choice and runtime",
    "results/intel-xeon-emeraldrapids-2t/depthwise-nhwc-float32-b1.json": "other kernels and choice and runtime",
    "results/intel-xeon-emeraldrapids-2t/papers12-float32-b1.json": "other kernels and choice and runtime",
    "results/intel-xeon-emeraldrapids-2t/papers12-float32-b8.json": "other kernels and choice and runtime",
    "results/intel-xeon-emeraldrapids-2t/resnet50-float32-b1.json": "other kernels and choice and runtime",
    f"{H200}/float8-nhwc-float8_e4m3fn-out.float16-b32.json": "other kernels and choice",
    f"{H200}/grouped-float16-b32.json": "other kernels and choice",
    f"{H200}/grouped-nhwc-bfloat16-b32.json": "other kernels and choice",
    f"{H200}/grouped-nhwc-float16-b1.json": "other kernels and choice",
    f"{H200}/grouped-nhwc-float16-b32.json": "other kernels and choice",
    f"{H200}/ladder-papers12-float32-b128.json": "other kernels and choice",
    f"{H200}/memory-papers12-b128.json": "other kernels and choice",
    f"{H200}/papers12-exact-float32-b128.json": "other kernels and choice",
    f"{H200}/papers12-float16-b128.json": "other kernels and choice",
    f"{H200}/papers12-float32-b128.json": "other kernels and choice",
    f"{H200}/papers12-nhwc-float16-b128.json": "other kernels and choice",
    f"{H200}/papers12-nhwc-int8-out.int8-b128.json": "other kernels and choice",
    f"{H200}/papers12-tvm16-float32-b128.json": "no digest",
    f"{H200}/resnet50-float32-b1.json": "other kernels and choice",
    f"{H200}/resnet50-nhwc-bfloat16-b32.json": "other kernels and choice",
    f"{H200}/resnet50-nhwc-float16-b1.json": "other kernels and choice",
    f"{H200}/resnet50-nhwc-float16-b32.json": "other kernels and choice",
    f"{H200}/winograd64-float32-b1.json": "other kernels and choice",
    f"{H200}/winograd64-nhwc-float16-b1.json": "other kernels and choice",
    f"{H200}/winograd64-winograd-float16-b1.json": "other kernels and choice",
    f"{H200}/winograd64-winograd-nhwc-float16-b1.json": "other kernels and choice",
    "studies/amd-epyc-znver3-2t/models-b1.json": "other kernels and choice and models",
    "studies/amd-epyc-znver3-2t/operators.json": "other kernels and choice and models",
    "studies/amd-epyc-znver3-2t/untuned-drawn-cpu-3.json": "other kernels and choice",
    "studies/amd-epyc-znver4-2t/models-b1.json": "other kernels and choice and models",
    "studies/amd-epyc-znver4-2t/op-overhead.json": "other kernels and choice",
    "studies/amd-epyc-znver4-2t/operators.json": "other kernels and choice and models",
    "studies/amd-epyc-znver4-2t/untuned-drawn-cpu-1.json": "other kernels and choice and runtime",
    "studies/amd-epyc-znver4-2t/untuned-drawn-cpu-2.json": "other kernels and choice and runtime",
    "studies/amd-epyc-znver4-2t/untuned-drawn-cpu-4.json": "other kernels and choice",
    "studies/amd-epyc-znver4-2t/untuned-drawn-cpu-5.json": "other kernels and choice",
    "studies/amd-epyc-znver4-2t/zoo-float32-b1.json": "other kernels and choice",
    "studies/intel-xeon-emeraldrapids-11t/fuzz-cpu.json": "other kernels and choice",
    "studies/intel-xeon-emeraldrapids-2t/epilogues.json": "other kernels and choice and runtime",
    "studies/intel-xeon-emeraldrapids-2t/quantised-models-b1.json": "other kernels and choice and models",
    "studies/nvidia-h100-80gb-hbm3/untuned-drawn-cuda-2.json": "other kernels and choice",
    "studies/nvidia-h200/launch-overlap.json": "other kernels and choice",
    "studies/nvidia-h200/op-overhead.json": "other kernels and choice",
    "studies/nvidia-h200/pytorch-resnet50-float16-b32.json": "other kernels and choice",
    "studies/nvidia-h200/pytorch-resnet50-float32-b32.json": "other kernels and choice",
    "studies/nvidia-h200/rule-gains.json": "other kernels and choice",
    "studies/nvidia-h200/scheduled-narrow.json": "other kernels and choice",
    "studies/nvidia-h200/scheduled.json": "other kernels and choice",
    "studies/nvidia-h200/sliding-window.json": "other kernels and choice",
    "studies/nvidia-h200/untuned-drawn-cuda-1.json": "other kernels and choice",
    "studies/nvidia-h200/untuned-drawn-cuda-2.json": "other kernels and choice",
    "studies/nvidia-h200/untuned-drawn-cuda-3.json": "other kernels and choice",
    "studies/nvidia-h200/untuned-drawn-cuda-4.json": "other kernels and choice",
    "studies/nvidia-h200/winograd-tensor-cores.json": "no digest",
    "studies/nvidia-h200/zoo-bfloat16-b32.json": "other kernels and choice",
    "studies/nvidia-h200/zoo-float16-b1.json": "other kernels and choice",
    "studies/nvidia-h200/zoo-float16-b32.json": "other kernels and choice",
    "studies/nvidia-h200/zoo-float32-b1.json": "other kernels and choice",
    "studies/nvidia-h200/zoo-float32-b32.json": "other kernels and choice",
}

# Layers whose shipped choice was slower than the default tile. Only stale files may have any.
SLOWER = {
    f"{H200}/resnet50-nhwc-bfloat16-b32.json": ["res4_1_expand"],
    f"{H200}/resnet50-nhwc-float16-b1.json": ["res4_1_reduce", "res4_1_shortcut", "res5_2_reduce"],
    f"{H200}/papers12-tvm16-float32-b128.json": ["conv2"],
}

AGAIN = """Measure it again on its device with today's source, one file at a time and nothing else running, then run `im2win report`:
  results/*: im2win bench SUITE --untuned --json FILE (benchmarks/README.md; on a GPU benchmarks/gpu/bench.sh; ladder-*: im2win ablation;
    memory-*: im2win layers --memory); studies/*: the script of benchmarks/ whose study it is.
If only the source has changed, `python benchmarks/confirm.py` may find that kernels and choices have not.
Where the device is out of reach, state it in STALE in tests/bench/test_committed_results.py; a file measured anew leaves the tables."""


def found(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(FILES[name].read_text(encoding="utf-8"))
    return values


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_as_old_as_the_table_says(name: str) -> None:
    values = found(name)
    why, stated = stale(values.get("confirmed") or values.get("digests", {}), timed(values)), STALE.get(name)
    state = f"is older than the kernels it times ({why})" if why else "was made by today's kernels"
    assert why == stated, f"benchmarks/{name} {state}, and STALE says {stated!r}.\n{AGAIN}"


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("results/") and "/memory-" not in name])
def test_no_shipped_choice_is_slower_than_the_default(name: str) -> None:
    slower = [row.layer for row in slower_choices(Result.load(FILES[name]).layers)]
    again = f"Tune these layers, `im2win tune KEY` on that device with the keys of the file, and measure it again.\n{AGAIN}"
    assert slower == SLOWER.get(name, []), f"benchmarks/{name}: the default tile beats the shipped choice of {slower}.\n{again}"


def test_the_tables_name_files_that_exist_and_only_stale_ones_are_slower() -> None:
    assert set(STALE) <= set(FILES), "STALE names files that are no longer there"
    assert set(SLOWER) <= set(STALE), "a file made by today's kernels may hold no layer whose shipped choice is slower than the default"


def test_slower_means_more_than_three_percent() -> None:
    times = {"within": (1.03, 1.0), "slower": (1.04, 1.0), "faster": (0.5, 1.0), "failed": (None, 1.0), "alone": (2.0, None)}
    rows = [Row(name, "n1-c1x1x1-k1x1x1", ours_ms=ours, untuned_ms=default) for name, (ours, default) in times.items()]
    assert [row.layer for row in slower_choices(rows)] == ["slower"]
    same = Row("same", "n1-c1x1x1-k1x1x1", ours_ms=1.04, untuned_ms=1.0, algorithm="direct/tiled", tile={"rows": 1})
    assert slower_choices([same]) == [same]
    same.untuned_algorithm, same.untuned_tile = "direct/tiled", {"rows": 1}
    assert slower_choices([same]) == []  # one kernel, timed twice
