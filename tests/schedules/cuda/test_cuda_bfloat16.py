"""bfloat16 layers: what they take of float16's records, their tolerance, and what they refuse. Exactness is tested schedule by schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from recorded import TODAY, beside_default, fill, ok

from im2win.device.gpu import H200
from im2win.numerics.tolerance import tolerance
from im2win.records.log import Log
from im2win.records.lookup import choose, search
from im2win.registry.backends import backend_for
from im2win.registry.ranking import default_tile
from im2win.registry.schedules import SCHEDULES, candidates, schedule_of
from im2win.spec.conv2d import Conv2d

HALF = Conv2d.parse("n4-c64x28x28-k64x3x3-p1-float16-NHWC")
CONV = HALF.with_(dtype="bfloat16", out_dtype=None)
NAME = "implicit_gemm/tiled"


def record(conv: Conv2d, tile: Any) -> Any:
    facts = {"algorithm": NAME, "device": backend_for(H200).name, "target": "cuda", "threads": 1, "tvm": tvm.__version__}
    return ok(1e-5, conv, generator=TODAY, tile=tile.as_dict(), error=0.0, tolerance=tolerance(conv), **facts)


def test_default_tiles_are_those_of_float16() -> None:
    (name, half), (same, tile) = (default_tile(conv, "auto", H200) for conv in (HALF, CONV))
    assert name == same and tile.product == "wg_bf16" and half.in_type("bfloat16") == tile and tile.in_type("float16") == half


def test_records_of_float16_serve(tmp_path: Path) -> None:
    ranked = backend_for(H200).ranked(HALF, schedule_of(NAME))
    best = next(tile for _, tile in ranked[len(ranked) // 2 :] if tile.product == "wg_f16")
    log = Log(tmp_path)
    fill(log, *beside_default(record(HALF, best), H200, [NAME]))
    found = choose(CONV, H200, [NAME], tmp_path)
    assert found is not None and (found.tier, found.tile) == ("other type", best.in_type("bfloat16")) and not found.exact
    own = backend_for(H200).ranked(CONV, schedule_of(NAME))[1][1]
    fill(log, *beside_default(record(CONV, own), H200, [NAME]))
    found = choose(CONV, H200, [NAME], tmp_path)
    assert found is not None and (found.tier, found.tile) == ("exact", own)
    assert search(HALF, H200, [NAME], tmp_path).tier == "exact", "float16 does not ask bfloat16's records"


def test_outputs_differ_by_half_a_unit_in_their_last_place() -> None:
    assert tolerance(CONV) == 8 * tolerance(HALF) < 2.0**-7
    assert tolerance(CONV, "winograd") == tolerance(CONV), "bfloat16 holds no square tiles"


def test_what_computes_it() -> None:
    on_gpu = {row.key for row in candidates("auto", CONV, "cuda", "winograd")}
    assert on_gpu == {row.key for row in candidates("auto", HALF, "cuda", "winograd")} - {"winograd/tensor_cores"}
    reason = "bfloat16 does not hold transformed tiles as accurately as its tolerance asks"
    assert schedule_of("winograd/tiled").on_gpu.unsupported_reason(CONV.with_(kernel=(5, 5), padding=2), "winograd") == reason
    refused = schedule_of("winograd/tensor_cores").supports(CONV, "cuda", "winograd")
    assert refused == "Winograd's form on tensor cores multiplies float16 or int8, not bfloat16"
    assert {row.supports(CONV, "cpu") for row in SCHEDULES.values()} >= {"its CPU schedule computes float32, not bfloat16", None}
    assert [row.key for row in candidates("auto", CONV, "cpu")] == ["direct/dot_product"]


def test_tensors_between_numpy_and_pytorch_keep_their_bits() -> None:
    torch = pytest.importorskip("torch")
    from im2win.runtime.tensors import torch_tensor, torch_values

    values = np.array([1.5, -2.0, np.inf, np.nan, 2.0**-130], "bfloat16")
    tensor = torch_tensor(values)
    assert tensor.dtype is torch.bfloat16 and torch_values(tensor).dtype == values.dtype
    assert (torch_values(tensor).view(np.uint16) == values.view(np.uint16)).all()
    assert torch_tensor(np.ones(2, np.float32)).dtype is torch.float32
