"""Winograd's form on tensor cores: every mapping, fusion and fragment is right, and what does not match is refused."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tvm
from emulated import MARK, ROWS, Emulated, Kernel, differences, expected, generated, typed
from oracle import exact_tensors, normal_tensors
from recorded import TODAY, fill, ok

from im2win.builder.build import cuda_manifest
from im2win.codegen import cuda as cuda_codegen
from im2win.codegen.llvm import TileError, ToolchainError
from im2win.codegen.rewritten import functions
from im2win.device.gpu import H200
from im2win.emulator import EmulationError
from im2win.numerics.reference import error, reference
from im2win.numerics.tolerance import tolerance
from im2win.reconstruct import ReconstructError
from im2win.reconstruct.fusion.pairs import pair
from im2win.reconstruct.fusion.uniform import FEW, few
from im2win.records.log import Log
from im2win.records.lookup import choose, search
from im2win.registry import cuda_lowering, interface
from im2win.registry.backends import backend_for
from im2win.registry.ranking import default_tile
from im2win.registry.schedules import candidates, schedule_of
from im2win.runtime.manifest import Manifest, manifest_path
from im2win.schedules.studies.winograd_tc import kernel, legality
from im2win.schedules.studies.winograd_tc.legality import violations
from im2win.schedules.studies.winograd_tc.passes import PIPELINE
from im2win.schedules.studies.winograd_tc.tile import FRAGMENTS, Sizes, TensorCoreTile
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import suite
from im2win.tuner.build_worker import BuildJob, build
from im2win.tuner.runners.cpu import Outcome
from im2win.tuner.session import Session

ROW = schedule_of("winograd/tensor_cores")
WAYS = (("sync_free", "none", 0), ("sync_free", "shmem", 0), ("sync_free", "llc", 0), ("sync_free", "llc", 1), ("bgemm", "none", 0),
        ("bgemm", "llc", 1))  # fmt: skip
FUSED = TensorCoreTile(2, 16, 32, 16, "16x16x16", "sync_free", "shmem")
CONV = Conv2d.parse("n1-c64x56x56-k64x3x3-p1-float16-NHWC")


def kernels(outputs: int, fragment: str, block_k: int = 16, ways: Any = WAYS) -> list[Kernel]:
    """One of every mapping and fusion, and with twice the warps."""
    block_m, block_n = max(FRAGMENTS[fragment][0], 16), FRAGMENTS[fragment][1]
    tiles = [TensorCoreTile(outputs, block_m, block_n, block_k, fragment, *way) for way in ways]
    tiles += [replace(tile, groups=2) for tile in tiles if tile.mapping == "sync_free" and tile.wave == 0]
    return [("winograd/tensor_cores", tile) for tile in tiles]


# --- outputs

EXACT = (
    ("n2-c20x9x10-k10x3x3-p1-float16", "16x16x16", 16, "two images, two steps of channels, four blocks of tiles"),
    ("n2-c17x4x11-k27x3x3-p0.2.1.0-float16-NHWC-bias-add-relu6", "8x32x16", 32, "four sides, steps of two fragments, the whole epilogue"),
    ("n1-c5x14x17-k10x3x3-float16-NHWC", "32x8x16", 16, "two blocks of filters, fewer channels than a fragment, no padding"),
)  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("key", "fragment", "block_k"), [row[:3] for row in EXACT])
def test_two_outputs_are_exact(key: str, fragment: str, block_k: int) -> None:
    """Its matrices hold 0, 1 and halves: small integers stay exact. Blocks run in turns."""
    conv = Conv2d.parse(key)
    chosen = kernels(2, fragment, block_k)
    tensors = typed(conv, exact_tensors(conv))
    right, emulated = expected(conv, tensors), Emulated(conv, chosen)
    wrong = differences(conv, chosen, emulated(tensors, seed=1, resident=5), right)
    assert not wrong, f"{conv}:\n" + "\n".join(wrong)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_both_forms_keep_their_tolerance(layout: str) -> None:
    conv = Conv2d(2, 24, 11, 13, 16, 3, padding=1, layout=layout, dtype="float16", bias=True, residual=True, activation="silu")
    ways, forms = (WAYS[1:3], (2, 4)) if layout == "NHWC" else (WAYS[3:5], (4,))
    chosen = [one for outputs in forms for one in kernels(outputs, "16x16x16", ways=ways)]
    tensors = typed(conv, normal_tensors(conv, 0))
    right = reference(conv, tensors["data"], tensors["filter"], tensors["bias"], tensors["residual"])
    found = Emulated(conv, chosen)(tensors)
    assert all(error(y, right) <= tolerance(conv, "winograd") for y in found)
    assert tolerance(conv) < max(error(y, right) for y in found), "float16 in Winograd's form needs an accuracy of its own"


# --- what the rules make


def sources(conv: Conv2d, tile: TensorCoreTile) -> str:
    source = generated(conv, "winograd/tensor_cores", tile).source
    return source[source.index(MARK) :]


def test_barriers_and_launches_are_those_of_the_document() -> None:
    """Without synchronization but of a warp: fused in shared memory, one barrier stands between the parts; through the cache, three."""
    found = {}
    for way in WAYS:
        tile = kernels(2, "16x16x16", ways=[way])[0][1]
        launches = [one for one in generated(CONV, "winograd/tensor_cores", tile).launches if one.kernel.startswith("conv2d")]
        source = sources(CONV, tile)  # type: ignore[arg-type]
        found[way] = source.count("__syncthreads();"), source.count("__syncwarp();") > 0, len(launches)
    assert found == {
        ("sync_free", "none", 0): (0, True, 3), ("sync_free", "shmem", 0): (1, True, 2), ("sync_free", "llc", 0): (3, True, 3),
        ("sync_free", "llc", 1): (3, True, 3), ("bgemm", "none", 0): (2, False, 3), ("bgemm", "llc", 1): (5, False, 3),
    }  # fmt: skip


@pytest.mark.parametrize(("way", "count"), [(WAYS[1], 1), (WAYS[2], 3), (WAYS[4], 2)], ids=str)
def test_a_missing_barrier_is_caught(way: tuple[str, str, int], count: int) -> None:
    """Without any one barrier of the block that is left, some order of threads gives another result."""
    conv = Conv2d.parse(f"n1-c32x8x8-k{32 if way[0] == 'bgemm' else 16}x3x3-p1-float16-NHWC")
    chosen: Kernel = ("winograd/tensor_cores", TensorCoreTile(2, 16, conv.out_channels, 16, "16x16x16", *way))
    tensors = typed(conv, exact_tensors(conv))
    right, source = expected(conv, tensors), sources(conv, chosen[1])  # type: ignore[arg-type]
    waits = list(re.finditer(r"__syncthreads\(\);", source))
    assert len(waits) == count
    for wait in waits:

        def without(text: str, wait: re.Match[str] = wait) -> str:
            return text[: wait.start()] + text[wait.end() :]

        assert not right_everywhere(conv, chosen, without, tensors, right), f"{wait[0]} is not missed"


def right_everywhere(conv: Conv2d, chosen: Kernel, edit: Any, tensors: Any, right: Any) -> bool:
    emulated = Emulated(conv, [chosen], edit)
    try:
        return all(not differences(conv, [chosen], emulated(tensors, seed, 4), right) for seed in range(12))
    except EmulationError:
        return False


def test_rules_that_do_not_match_are_errors() -> None:
    small = replace(H200, block_shared=8192)
    with pytest.raises(ReconstructError, match=r"^pkf-shmem does not apply: tiles takes 36864 bytes of a block's shared memory"):
        cuda_lowering.emit(CONV, ROW, FUSED, small)
    with pytest.raises(ReconstructError, match=r"^pkf-llc does not apply: `wave` \(=-1\) must be at least 0"):
        cuda_lowering.emit(CONV, ROW, replace(FUSED, fusion="llc", wave=-1), H200)


def test_warps_that_share_what_they_load_are_not_free_of_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_sync_free", _shared_by_warps)
    with pytest.raises(ReconstructError, match=r"^barriers changes nothing: kernel conv2d_kernel_1, barrier 0 .* needed, "):
        cuda_lowering.emit(CONV, ROW, replace(FUSED, fusion="none"), H200)


def _shared_by_warps(sizes: Sizes, tiles: Any, filters: Any, products: Any, bx: Any, by: Any, lane: Any, warp: Any) -> None:
    """Products as the other mapping has them, of the first position only."""
    kernel._together(sizes, tiles, filters, products, (bx, by, 0), lane, warp)


def test_a_rule_that_does_not_match_is_an_outcome_of_the_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(legality, "_fits", lambda conv, tile, gpu: [])
    built = build(BuildJob(CONV, "winograd/tensor_cores", FUSED, replace(H200, block_shared=8192), tmp_path / "kernel.so"))
    assert built.outcome == "build_error" and built.message.startswith("pkf-shmem does not apply: tiles takes 36864 bytes")


def test_few_blocks_stand_for_all() -> None:
    """The tiling is that of the whole grid, and it does not take a grid of the whole."""
    module = cuda_codegen.kernel_module(kernel.functions(CONV, replace(FUSED, fusion="llc"), "conv2d", "transform_parts"))
    [whole, _] = functions(module, H200, PIPELINE)
    found = pair(whole.unit)
    part = few(found)
    assert part.producer.launch.grid[0] == FEW < found.producer.launch.grid[0] == 49
    assert part.elements * 49 == found.elements * FEW
    one, other = found.tiling(), part.tiling()
    assert (one.along, one.origin, one.layout, one.element) == (other.along, other.origin, other.layout, other.element)
    moved = whole.unit.source.replace("(((int)blockIdx.x) * 16384)", "((((int)blockIdx.x) % 7) * 16384)")
    crossed = pair(replace(whole.unit, source=moved))
    assert few(crossed) is crossed, "blocks that share a piece stand for nobody"


def test_a_grid_that_nobody_could_enumerate() -> None:
    conv = Conv2d.parse("n16-c64x960x960-k64x3x3-p1-float16-NHWC")
    tile = replace(FUSED, outputs=4, block_m=32, block_n=64)
    launches = generated(conv, "winograd/tensor_cores", tile).launches
    assert (launches[0].grid, launches[0].dynamic_bytes) == ((28800, 1, 1), 36 * 32 * (64 + 8) * 2)


@pytest.mark.parametrize(("block_k", "dynamic"), [(16, 16 * 16 * (64 + 8) * 2), (64, 49152)])
def test_a_launch_asks_for_shared_memory_that_it_does_not_get_unasked(block_k: int, dynamic: int) -> None:
    """48 KiB with what the kernel declares: 9216 bytes of filters here, and 36864."""
    tile = replace(FUSED, block_n=64, block_k=block_k)
    assert generated(CONV, "winograd/tensor_cores", tile).launches[0].dynamic_bytes == dynamic


# --- tiles

TILE = TensorCoreTile(4, 32, 64, 32, "16x16x16", "sync_free", "shmem")
RULES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"outputs": 6}, "`outputs` (=6) must be one of 2, 4"),
    ({"fragment": "16x16x8"}, "`fragment` (=16x16x8) must be one of 16x16x16, 32x8x16, 8x32x16"),
    ({"mapping": "free"}, "`mapping` (=free) must be one of bgemm, sync_free"),
    ({"fusion": "pkf"}, "`fusion` (=pkf) must be one of none, shmem, llc"),
    *(({name: 0}, f"`{name}` (=0) must be at least 1") for name in ("block_m", "block_n", "block_k", "groups")),
    ({"groups": 4}, "`groups` (=4) must divide the tile's 6 rows, and be 1 but with `mapping` sync_free"),
    ({"fusion": "llc", "wave": -1}, "`wave` (=-1) must be at least 0"),
    ({"fusion": "llc", "wave": 400}, "`wave` (=400) must be less than the 392 blocks of tiles"),
    ({"block_m": 24}, "`block_m` (=24) must be a multiple of the fragment's 16"),
    ({"fragment": "8x32x16", "block_n": 16}, "`block_n` (=16) must be a multiple of the fragment's 32"),
    ({"block_k": 24}, "`block_k` (=24) must be a multiple of the fragment's 16"),
    ({"mapping": "bgemm"}, "`fusion` shmem is for `mapping` sync_free: a block must need all positions"),
    ({"wave": 16}, "`wave` (=16) must be 0 without `fusion` llc"),
    ({"block_n": 80}, "`block_n` (=80) must not hold 16 filters or more beyond the 64"),
    ({"block_k": 80}, "`block_k` (=80) must not hold 16 channels or more beyond the 64"),
    ({"mapping": "bgemm", "fusion": "none", "block_m": 128}, "the block's 1024 threads must be at most 512"),
    ({"block_m": 96}, "the 192 sums of a thread must be at most 168"),
    ({"fusion": "none", "block_m": 64, "block_k": 64}, "the block's 110592 bytes of operands must be at most 49152"),
    (
        {"block_m": 48},
        "a block's 248832 bytes of transformed tiles and 27648 of filters must be at most 232448 of shared memory",
    ),
    (
        {"fusion": "llc", "block_m": 64, "block_k": 16},
        "the 38928384 bytes of transformed tiles of 132 blocks at once must be at most the 20971520 that the last-level cache holds",
    ),
)


@pytest.mark.parametrize(("changes", "message"), RULES)
def test_rules(changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legality, "LAST_LEVEL_BYTES", 20 << 20)
    conv = Conv2d.parse("n16-c64x112x112-k64x3x3-p1-float16-NHWC")
    assert violations(conv, TILE, H200) == []
    found = violations(conv, replace(TILE, **changes), H200)
    assert message in found and (len(found) == 1 or {"block_m", "block_k", "wave"} & set(changes))


def test_elements_are_indexed_by_32_bits() -> None:
    huge = Conv2d.parse("n32-c64x960x960-k64x3x3-p1-float16-NHWC")
    elements = "the 4246732800 elements of"
    assert violations(huge, replace(TILE, fusion="none"), H200) == [
        f"{elements} {what} must be at most 2147483647" for what in ("transformed tiles", "products")
    ]
    assert violations(huge, TILE, H200) == [f"{elements} products must be at most 2147483647"]


@pytest.mark.parametrize(
    ("key", "accuracy", "reason"),
    [
        ("n1-c64x9x9-k64x5x5-p2-float16", "winograd", "Winograd's form on tensor cores is for kernels of 3x3, not 5x5"),
        ("n1-c64x9x9-k64x3x3-s2-float16", "winograd", "Winograd's form is for stride 1 and dilation 1"),
        ("n1-c64x9x9-k64x3x3", "winograd", "Winograd's form on tensor cores multiplies float16 or int8, not float32"),
        ("n1-c64x9x9-k64x3x3-g2-float16", "winograd", "Winograd's form on tensor cores is for one group, not 2"),
        ("n1-c64x9x9-k64x3x3-float16", "exact", "it rounds more than a sum of products, which accuracy 'exact' leaves out"),
        (
            "n1-c64x9x9-k64x3x3-float16", "tf32",
            "float16 does not hold transformed tiles as accurately as its tolerance asks; accuracy 'winograd' allows it",
        ),
    ],
)  # fmt: skip
def test_what_it_cannot_compute(key: str, accuracy: Any, reason: str) -> None:
    conv = Conv2d.parse(key)
    assert ROW.supports(conv, "cuda", accuracy) == reason
    assert ROW.supports(CONV, "cuda", "winograd") is None and ROW.supports(CONV.with_(dtype="float32")) == "no CPU schedule"


def test_only_who_asks_for_it_gets_it() -> None:
    assert ROW in candidates("auto", CONV, "cuda", "winograd") and ROW not in candidates("auto", CONV, "cuda", "tf32")
    strict = backend_for(H200, "tf32")
    [message] = strict.violations(CONV, ROW, FUSED)
    assert message.endswith("accuracy 'winograd' allows it") and backend_for(H200, "winograd").violations(CONV, ROW, FUSED) == []


LAYERS = [layer.conv.with_(dtype="float16") for name in ("papers12", "resnet50", "winograd64") for layer in suite(name, 16)]


@pytest.mark.parametrize("conv", [conv for conv in LAYERS if ROW.supports(conv, "cuda", "winograd") is None][::3], ids=str)
def test_spaces_are_legal_and_have_every_fusion(conv: Conv2d) -> None:
    backend = backend_for(H200, "winograd")
    ranked = backend.ranked(conv, ROW)
    tiles = [tile for _, tile in ranked]
    assert len(set(tiles)) == len(tiles) > 100 and {tile.mapping for tile in tiles} == {"bgemm", "sync_free"}
    assert {"none", "llc"} <= {tile.fusion for tile in tiles} and (conv.in_channels > 256 or "shmem" in {tile.fusion for tile in tiles})
    assert all(0 < cost < 0.1 for cost, _ in ranked)
    assert len({len(backend.features(conv, ROW, tile, cost)) for cost, tile in ranked[::40]}) == 1
    direct = default_tile(conv, "implicit_gemm/tiled", H200)[1]
    row = schedule_of("implicit_gemm/tiled")
    assert len(backend.features(conv, row, direct, 1e-3)) == len(backend.features(conv, ROW, tiles[0], 1e-3)), "one model for all"


def test_what_is_made_between_kernels_fits_its_tensor() -> None:
    for way, outputs in itertools.product(WAYS, (2, 4)):
        tile = kernels(outputs, "16x16x16", ways=[way])[0][1]
        assert isinstance(tile, TensorCoreTile)
        found = generated(CONV, "winograd/tensor_cores", tile)
        assert Sizes(CONV, tile).workspace_bytes == ROW.on_gpu.workspace_bytes(CONV, tile)
        assert all("data" in one.arguments for one in found.launches) and not found.workspace


# --- records and libraries


def test_records_come_back(log: Log) -> None:
    tile = default_tile(CONV, "winograd/tensor_cores", H200, "winograd")[1]
    assert TensorCoreTile.from_dict(tile.as_dict()) == tile == backend_for(H200).tile(ROW, tile.as_dict())
    facts = {"algorithm": "winograd/tensor_cores", "device": H200.name, "target": "cuda", "threads": 1, "tvm": tvm.__version__}
    facts |= {"generator": TODAY, "tile": tile.as_dict()}
    fill(log, ok(1e-5, CONV, error=1e-3, tolerance=tolerance(CONV, "winograd"), **facts))
    found = choose(CONV, H200, ["winograd/tensor_cores"], log.folder, "winograd")
    assert found is not None and (found.tier, found.tile) == ("exact", tile)
    assert search(CONV, H200, ["winograd/tensor_cores"], log.folder, "tf32").record is None, "nobody gets it who has not asked for it"


@pytest.mark.parametrize(("name", "value", "kind"), [("wave", "16", "int"), ("fusion", 1, "str"), ("block_m", True, "int")])
def test_values_that_are_no_tile(name: str, value: Any, kind: str) -> None:
    with pytest.raises(ValueError, match=rf"`{name}` \(={value!r}\) must be of type {kind}"):
        TensorCoreTile.from_dict({**FUSED.as_dict(), name: value})
    with pytest.raises(ValueError, match=r"fields .* must be \['block_k', "):
        TensorCoreTile.from_dict({name: value})


def test_an_illegal_tile_is_not_lowered() -> None:
    with pytest.raises(TileError, match=r"winograd/tensor_cores on .*`wave` \(=16\) must be 0 without `fusion` llc"):
        cuda_lowering.lower(CONV, ROWS["winograd/tensor_cores"], replace(FUSED, wave=16), H200)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fusion", ["none", "shmem", "llc"])
def test_libraries_hold_the_kernels(fusion: str, tmp_path: Path) -> None:
    """Machine code for sm_90a, and what `runtime.cuda.Kernels` looks for."""
    try:
        cuda_codegen.compiler()
    except ToolchainError as problem:
        pytest.skip(str(problem))
    tile = replace(TILE, fusion=fusion, block_m=32, block_k=16)
    source = generated(CONV, "winograd/tensor_cores", tile).source
    assert cuda_codegen.cubin(source, H200).startswith(b"\x7fELF")
    built = build(BuildJob(CONV, "winograd/tensor_cores", tile, H200, tmp_path / "kernel.so"))
    assert built.kernel is not None and built.kernel.extra_bytes == Sizes(CONV, tile).workspace_bytes, built.message
    library = (tmp_path / "kernel.so").read_bytes()
    assert library.startswith(b"\x7fELF") and (b"transform_parts" in library) == (fusion != "shmem")


def test_a_session_proposes_records_and_resumes(log: Log) -> None:
    """What is tried has every fusion in it from the start; a later session takes the trials over, refusals among them."""
    session = Session(CONV, ["winograd/tensor_cores"], H200, log, 32, 0, accuracy="winograd")
    batch = session.next_batch()
    assert session.default == session.search.all[0] and session.default in batch and len({choice.tile for choice in batch}) == len(batch)
    assert {choice.tile.fusion for choice in batch} == {"none", "shmem", "llc"}
    first, second, *_ = batch
    session.record(first, Outcome("ok", error=1e-3, samples_s=[1e-5]), interface.Kernel(Sizes(CONV, first.tile).workspace_bytes, "0" * 16))
    session.record(second, Outcome("build_error", "pkf-llc does not apply: there is no pair"), None)
    again = Session(CONV, ["winograd/tensor_cores"], H200, log, 32, 0, accuracy="winograd")
    assert again.tried == session.tried and again.best == session.best and again.best is not None and again.best[0] == first
    [good, refused] = log.read(CONV, H200.name)
    assert good.tolerance == tolerance(CONV, "winograd") and refused.message.startswith("pkf-llc does not apply")


def test_manifests_say_what_a_library_needs(tmp_path: Path) -> None:
    conv, tile = CONV.with_(bias=True), replace(TILE, fusion="llc", block_m=16, wave=16)
    made = Sizes(conv, tile).workspace_bytes
    manifest = cuda_manifest(conv, "winograd/tensor_cores", tile.as_dict(), tile.pack(conv), H200, threads=tile.threads, made=made)
    library = tmp_path / "conv.so"
    library.write_bytes(b"library")
    manifest_path(library).write_text(manifest.to_json(library))
    read, *_ = Manifest.read(manifest_path(library))
    assert read == manifest and read.made * conv.itemsize == made and TensorCoreTile.from_dict(read.tile) == tile
    assert read.pack == tile.pack(conv) and read.pack.shape(conv) == (1, 6, 6, 64, 64)
