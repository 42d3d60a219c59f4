"""The registry: what it lists is there, what a plan names exists, and what an algorithm refuses it refuses with a reason."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from ops import host
from regimes import REGIMES
from tvm import s_tir, te

import im2win.compute
from im2win.compute import nest
from im2win.device.gpu import H200
from im2win.packing.cpu_blocked import FilterPack
from im2win.registry.algorithms import ALGORITHMS
from im2win.registry.backends import backend_for
from im2win.registry.cpu_schedules import CudaOnly, Windows
from im2win.registry.ranking import ranked_tiles
from im2win.registry.schedules import SCHEDULES, candidates, schedule_of
from im2win.spec.conv2d import Conv2d
from im2win.spec.methods import OLD_NAMES, shown, split
from im2win.spec.objective import cost

KEYS = (
    "direct/tiled", "direct/persistent", "direct/warp_specialized", "direct/depthwise", "direct/dot_product", "im2col/tiled",
    "im2win/stored", "im2win/fused", "implicit_gemm/tiled", "implicit_gemm/split_k", "mec/tiled", "mcfa/tiled", "winograd/tiled",
    "winograd/tensor_cores", "direct/scheduled", "im2win/scheduled", "im2col/scheduled", "implicit_gemm/scheduled", "mec/scheduled",
    "mcfa/scheduled",
)  # fmt: skip
ON_CPUS = [name for name, row in SCHEDULES.items() if not isinstance(row.scheduler, CudaOnly)]
WINDOWS = {name: row.scheduler for name, row in SCHEDULES.items() if isinstance(row.scheduler, Windows)}
COMPUTE = Path(next(iter(im2win.compute.__path__)))


def test_every_algorithm_and_schedule_is_there_under_its_own_name() -> None:
    assert sorted(SCHEDULES) == sorted(KEYS) and all(row.key == key for key, row in SCHEDULES.items())
    assert list(ALGORITHMS) == list(dict.fromkeys(key.split("/")[0] for key in SCHEDULES))
    assert all(row.name == name and row.title and row.paper for name, row in ALGORITHMS.items())
    assert all(row.algorithm is ALGORITHMS[row.algorithm.name] and row.title for row in SCHEDULES.values())


def test_every_algorithm_s_definition_is_scheduled() -> None:
    """No definition that nothing is made from."""
    assert {row.algorithm.name for row in SCHEDULES.values() if not isinstance(row.scheduler, CudaOnly)} == set(ALGORITHMS)


def test_names_of_before_are_understood() -> None:
    younger = ("depthwise", "dot_product", "scheduled")  # than the names of today
    assert set(OLD_NAMES.values()) == {key for key, row in SCHEDULES.items() if row.name not in younger}
    for old, key in OLD_NAMES.items():
        assert split(old) == tuple(key.split("/")) == split(key) and shown(old) == shown(key) == " / ".join(split(key))
        if old not in ALGORITHMS:
            assert schedule_of(old) is SCHEDULES[key]
    assert shown("best of cuDNN") == "best of cuDNN"


def test_every_file_of_compute_is_used() -> None:
    """A definition that no row uses would never be tested."""
    # what definitions have in common, the orders of axes that rows name, and the direct form without a sum over channels or of words
    shared = {"__init__", "arithmetic", "nest", "padded", "lowered", "depthwise", "dot_product", "rounding"}
    files = {path.stem for path in COMPUTE.glob("*.py")} - shared
    assert {row.define.__module__.rsplit(".", 1)[1] for row in SCHEDULES.values()} == files


def test_definitions_know_no_schedule_and_no_target() -> None:
    for path in COMPUTE.glob("*.py"):
        imported = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        modules = {node.module or "" for node in imported}
        assert not any(re.search(r"schedule|s_tir|target|machine", name) for name in modules), path.name


@pytest.mark.parametrize("name", WINDOWS)
def test_every_block_of_a_plan_exists(name: str) -> None:
    """Block names are the contract between compute/ and schedules/; the output's and the product's too."""
    row = schedule_of(name)
    for conv in REGIMES.values():
        arguments = row.define(conv, FilterPack(4), 1)
        assert len(arguments) == len(conv.arguments)
        sch, plan = s_tir.Schedule(te.create_prim_func(arguments)), row.plan(conv)
        blocks = [nest.CONV, nest.ROWS, nest.OUT, *([nest.TRANSPOSED] if conv.residual else []), *([plan.stage] if plan.stage else [])]
        for block in blocks:
            sch.get_sblock(block)  # raises where there is none
        present = {str(sch.get(child).name_hint) for child in sch.get_child_blocks(sch.get_sblock("root"))}
        assert present == set(blocks), f"{conv}: blocks that no schedule handles"


@pytest.mark.parametrize("name", WINDOWS)
def test_a_stored_tensor_is_staged_at_the_root_and_nothing_else_is(name: str) -> None:
    row = schedule_of(name)
    for conv in REGIMES.values():
        plan = row.plan(conv)
        assert (plan.where == "root") == bool(row.transform_bytes(conv)), str(conv)
        assert (plan.stage is not None) or plan.where == "inline"
        assert (plan.where == "row_block") == bool(WINDOWS[name].row_block_elements(conv, 1)), str(conv)


@pytest.mark.sampled(80)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("conv", REGIMES.values(), ids=str)
def test_what_is_supported_has_a_space_of_legal_tiles(conv: Conv2d, name: str) -> None:
    """No problem is accepted and then left without a tile."""
    row = schedule_of(name)
    if row.supports(conv) is not None:
        return
    tiles = [tile for _, tile in ranked_tiles(conv, row, host())]
    assert tiles, f"{name} supports {conv} and has no tile for it"
    assert len(set(tiles)) == len(tiles)
    assert not any(row.scheduler.violations(conv, tile, host()) for tile in tiles)


@pytest.mark.parametrize("name", ON_CPUS)
def test_reasons(name: str) -> None:
    row = schedule_of(name)
    conv = REGIMES["n1-c16x9x11-k16x3x3-p1-g16" if name == "direct/depthwise" else "n2-c8x12x14-k16x3x3-p1"]
    known = row.scheduler.dtypes
    conv = conv.with_(dtype=known[0])
    assert row.supports(conv) is None
    assert row.supports(conv, "vulkan") == "no schedule for target 'vulkan'"
    assert row.supports(conv, accuracy="exact") is None or not row.scheduler.exact
    for dtype in ("float32",) if "int8" in known else ("float16", "int8"):
        assert row.supports(conv.with_(dtype=dtype)) == f"its CPU schedule computes {', '.join(known)}, not {dtype}"


def test_a_transform_that_32_bits_cannot_index_is_refused() -> None:
    huge = Conv2d.parse("n1-c64x1500x1500-k1x7x7-p3")
    reason = schedule_of("im2col/tiled").supports(huge)
    assert reason == "its transformed tensor would have 7056000000 elements, more than 2147483647"
    assert schedule_of("direct/tiled").supports(huge) is None
    assert "im2col/tiled" not in [row.key for row in candidates("auto", huge)]


def test_candidates() -> None:
    conv = REGIMES["n2-c8x12x14-k16x3x3-p1"]
    plain = [name for name in ON_CPUS if name not in ("direct/depthwise", "direct/dot_product")]
    assert [row.key for row in candidates("auto", conv)] == plain
    for dtype in ("uint8", "bfloat16", "float16"):
        assert [row.key for row in candidates("auto", conv.with_(dtype=dtype))] == ["direct/dot_product"]
    assert "direct/depthwise" in [row.key for row in candidates("auto", REGIMES["n1-c16x9x11-k16x3x3-p1-g16"])]
    assert [row.key for row in candidates("mec", conv)] == ["mec/tiled"]
    assert [row.key for row in candidates("im2win", conv)] == ["im2win/stored", "im2win/fused"]
    assert candidates("im2win/fused", conv) == candidates("im2win_fused", conv) == [SCHEDULES["im2win/fused"]]
    assert schedule_of("mec") is SCHEDULES["mec/tiled"] and schedule_of("direct").name == "tiled"
    known = r"auto, one of direct, im2win, im2col, .*, or with its schedule one of direct/tiled, direct/persistent, "
    with pytest.raises(ValueError, match=rf"`algorithm` \(='fft'\) must be {known}"):
        candidates("fft", conv)
    with pytest.raises(ValueError, match="no algorithm computes n2-c8x12x14-k16x3x3-p1-int8-silu on 'cpu': direct / tiled"):
        candidates("auto", conv.with_(dtype="int8", activation="silu"))


def test_a_gpu_s_workspace_costs_the_model_what_it_costs_the_tuner() -> None:
    """So that the default tile of a layer and the winner of its tuning are the best by one measure."""
    conv = Conv2d.parse("n1-c1024x14x14-k256x1x1")
    backend, row = backend_for(H200), schedule_of("implicit_gemm/split_k")
    estimate, tile = backend.ranked(conv, row)[0]
    workspace = backend.workspace_bytes(conv, row, tile)
    assert workspace and estimate == cost(conv, row.on_gpu.estimate(conv, tile, H200).seconds, workspace)
