"""float8_e4m3fn on a GPU of compute capability 9.0: correctness, and times beside cuDNN's graph interface in float8 and our own float16.

    python benchmarks/gpu/float8.py OUT [--batch 32] [--limit 150] [--plan-seconds 0.7] [--check]

First small layers of integers are computed, whose outputs must equal the float64 reference: they show how tensor cores add. Then layers of
papers12 and ResNet-50, channels last, with float16 outputs, and those of papers12 with float8_e4m3fn outputs. Every output is checked
against the float64 reference on random tensors before its kernel is timed; layers of fewer than 16 input channels have no float8 kernel and
are left out. Prints a table and writes a result for each type of output, one for float16's kernels, and OUT/float8-exact.json.

`--check` builds all kernels and times nothing, for machines without a GPU. nvidia-cudnn-frontend has to be importable for the peer; see
`peers.sh`, which unpacks a wheel.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from im2win import Conv2d
from im2win.bench.cuda_builds import Library, TileRecipe, build_all, load
from im2win.common.messages import brief
from im2win.device.gpu import H200, Gpu, device_gpu
from im2win.numerics.reference import converted, reference
from im2win.spec.suites import Layer, suite

DTYPE = "float8_e4m3fn"
EXACT = [
    "n2-c64x14x14-k128x3x3-p1-float8_e4m3fn-out.float32-NHWC",
    "n2-c192x14x14-k64x3x3-p1-float8_e4m3fn-out.float16-NHWC-bias-add-relu",
    "n4-c512x9x7-k256x1x1-float8_e4m3fn-out.bfloat16-NHWC-bias",
    "n3-c96x15x15-k192x3x3-s2-p1-float8_e4m3fn-out.float8_e4m3fn-NHWC-bias-add",
    "n2-c64x16x16-k70x5x5-p2-float8_e4m3fn-out.float8_e4m3fn-NHWC-relu",
]
Built = dict[tuple[Conv2d, str], Library | str]


def layers_of(batch: int) -> list[tuple[Layer, Layer]]:
    """(the layer in float8_e4m3fn, the same in float16) of the suites, those with float16 outputs first."""
    found: list[tuple[Layer, Layer]] = []
    for out, names in (("float16", ("papers12", "resnet50")), (DTYPE, ("papers12",))):
        for name in names:
            for layer in suite(name, batch):
                if layer.conv.in_channels % 16 == 0:
                    conv = layer.conv.with_(dtype=DTYPE, out_dtype=out, layout="NHWC")
                    half = layer.conv.with_(dtype="float16", layout="NHWC")
                    found.append((Layer(f"{name} {layer.name}", conv, layer.count), Layer(f"{name} {layer.name}", half, layer.count)))
    return found


def small_integers(conv: Conv2d) -> dict[str, Any]:
    """Integers of -3 to 3 in the problem's types, whose sums need few bits, and scales that are powers of two."""
    rng = np.random.default_rng(7)
    channels = (conv.out_channels,)
    shapes = {"data": conv.input_shape, "filter": conv.filter_shape, "bias": channels, "residual": conv.output_shape, "scale": channels}
    made = {}
    for name in conv.arguments[:-1]:
        values = rng.integers(-3, 4, shapes[name]).astype(np.float32)
        made[name] = converted(2.0 ** (values - 2) if name == "scale" else values, conv.dtypes[name])
    return made


def exact(keys: Sequence[str], built: Built) -> dict[str, str]:
    """What is wrong with each of these layers on integers; "" for nothing."""
    import torch

    from im2win.runtime.tensors import torch_tensor, torch_values

    found = {}
    for key in keys:
        conv = Conv2d.parse(key)
        try:
            given = small_integers(conv)
            right = reference(conv, given["data"], given["filter"], *map(given.get, ("bias", "residual", "scale")))
            held = {name: torch_tensor(array).cuda() for name, array in given.items()}
            layer = load(built[conv, "ours"]).bind(held["filter"], held.get("bias"), held["scale"])
            y = torch_values(layer(held["data"], held.get("residual")).cpu()).astype(np.float64)
            torch.cuda.synchronize()
            places = np.argwhere(~(y == right))
            at = tuple(places[0]) if len(places) else ()
            found[key] = f"{len(places)} of {y.size} differ, first {y[at]}, not {right[at]}" if at else ""
        except Exception as error:
            found[key] = brief(error, 300)
    return found


def recipes(gpu: Gpu, pairs: Sequence[tuple[Layer, Layer]]) -> dict[tuple[Conv2d, str], TileRecipe]:
    """Our kernels of all layers: float16's from the tuning records, as far as there are any."""
    convs = [*map(Conv2d.parse, EXACT), *(one.conv for pair in pairs for one in pair)]
    return {(conv, "ours"): TileRecipe(conv, "auto", gpu, recorded=True, logs=Path("tuning_logs")) for conv in dict.fromkeys(convs)}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds, after which no further layer is begun")
    parser.add_argument("--plan-seconds", type=float, default=0.7)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    begun = time.monotonic()
    given.out.mkdir(parents=True, exist_ok=True)
    gpu, pairs = H200 if given.check else device_gpu(), layers_of(given.batch)
    with tempfile.TemporaryDirectory(prefix="im2win-") as folder:
        built: Built = build_all(recipes(gpu, pairs), Path(folder))
        failed = {str(conv): one for (conv, _), one in built.items() if isinstance(one, str)}
        print(f"{len(built)} kernels built in {time.monotonic() - begun:.0f} s, {len(failed)} failed", flush=True)
        for key, reason in failed.items():
            print(f"  {key}: {reason[:200]}")
        if not given.check:
            said = exact(EXACT, built)
            (given.out / "float8-exact.json").write_text(json.dumps(said, indent=1) + "\n")
            print("\n".join(f"exact {key}: {wrong or 'equal'}" for key, wrong in said.items()), flush=True)
            timed(given, gpu, pairs, built, begun)


def timed(given: argparse.Namespace, gpu: Gpu, pairs: Sequence[tuple[Layer, Layer]], built: Built, begun: float) -> None:
    """Times the layers until the time is over, saves after each, and prints a table."""
    import torch

    from im2win.bench.cuda import measure_ceilings, new_result, time_layer
    from im2win.bench.cuda_harness import set_up_peers
    from im2win.bench.cuda_peers import GRAPH, Peers

    set_up_peers("float32")
    limits = measure_ceilings()
    by_type = dict[str, list[Layer]]()
    for one in (one for pair in pairs for one in pair):
        by_type.setdefault(one.conv.types, []).append(one)
    results = {types: new_result("float8", layers, gpu, limits) for types, layers in by_type.items()}
    halves: dict[Conv2d, float | None] = {}
    print(f"{'layer':44} {'out':14} {'ms':>8} {'cuDNN':>8} {'float16':>8} {'over cuDNN':>10} {'over f16':>8} {'error':>8}  remarks")
    for number, (layer, half) in enumerate(pairs):
        if time.monotonic() - begun > given.limit:
            print(f"{len(pairs) - number} layers are left: {given.limit:.0f} s are over")
            break
        with Peers([GRAPH], "float32", gpu, plan_s=given.plan_seconds) as peers:
            row = time_layer(layer, gpu, limits, "float32", {"ours": built[layer.conv, "ours"]}, 15, peers)
        results[layer.conv.types].layers.append(row)
        if half.conv not in halves:
            with Peers([], "float32", gpu) as peers:
                other = time_layer(half, gpu, limits, "float32", {"ours": built[half.conv, "ours"]}, 15, peers)
            results[half.conv.types].layers.append(other)
            halves[half.conv] = other.ours_ms
        torch.cuda.empty_cache()
        for result in results.values():
            result.save(given.out / f"{Path(result.stem).name}.json")
        ours, theirs, narrow = row.ours_ms, row.peers.get(GRAPH), halves[half.conv]
        ratios = (theirs / ours if ours and theirs else None, narrow / ours if ours and narrow else None)
        numbers = zip((ours, theirs, narrow, *ratios), (8, 8, 8, 10, 8), strict=True)
        shown = " ".join(f"{value:{width}.3f}" if value else f"{'-':>{width}}" for value, width in numbers)
        remark = " ".join(filter(None, (row.failed, row.peers_failed.get(GRAPH))))[:120]
        print(f"{layer.name:44} {layer.conv.out_dtype:14} {shown} {row.error or 0:8.1e}  {remark}", flush=True)


if __name__ == "__main__":
    main()
