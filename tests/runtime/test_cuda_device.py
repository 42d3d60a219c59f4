"""Built operators on a GPU, against the float64 reference: every algorithm and arithmetic, streams, graphs, studies, and what refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import quantised
from gpu_only import this_gpu

import im2win
from im2win import Conv2d
from im2win.bench import cuda as cuda_bench
from im2win.bench.cuda_builds import Library, Recipe, load
from im2win.bench.cuda_memory import measure_layer
from im2win.numerics.tolerance import tolerance
from im2win.registry.backends import backend_for
from im2win.registry.schedules import SCHEDULES, schedule_of
from im2win.runtime.tensors import ArgumentError
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.schedules.studies import sliding
from im2win.schedules.studies.cuda_ladder import RUNGS, WITHOUT
from im2win.schedules.studies.winograd_tc.tile import TensorCoreTile
from im2win.spec.suites import Layer, suite
from im2win.studies import cuda_ladder as cuda_ablation
from im2win.studies import sliding as cuda_sliding
from im2win.tuner.runners.cuda import device_tensors, reference

torch = pytest.importorskip("torch")


GPU = this_gpu()

LAYERS = [
    "n4-c64x28x28-k96x3x3-p1",  # what most networks are made of
    "n2-c3x57x57-k32x7x7-s2-p3-bias-relu",  # the first layer: few channels, a stride, padding
    "n3-c40x15x17-k24x3x3-p1-add-relu6",  # nothing divides anything
    "n2-c64x20x20-k64x1x1-bias",  # 1x1
    "n2-c32x19x19-k32x3x3-g4-d2-p2",  # groups, dilation
    "n1-c512x7x7-k512x3x3-p1",  # one image, a deep sum
    "n40-c64x28x28-k96x3x3-p1",  # windows in parts: two of 20 images
    "n1-c32x299x290-k64x3x3-p1",  # and of an image's rows, the last ones fewer
]
CASES = [
    (f"{key}-{dtype}-{layout}" if dtype != "float32" else f"{key}-{layout}", name)
    for key in LAYERS
    for name, row in SCHEDULES.items()
    for dtype in ("float32", "float16", "int8")
    for layout in ("NCHW", "NHWC")
    if row.cuda is not None
]


def tiles(conv: Conv2d, name: str) -> list[Any]:
    """The model's order of an algorithm's tiles that are legal here; none where it does not compute the problem."""
    row = schedule_of(name)
    if row.supports(conv, "cuda", "winograd") is not None:
        return []
    return [tile for _, tile in backend_for(GPU, "winograd").ranked(conv, row)]


CASES = [(key, name) for key, name in CASES if tiles(Conv2d.parse(key), name)]


def in_rows(tile: Any) -> bool:
    """Whether tiles of rows are transformed as they are loaded."""
    return isinstance(tile, MultistageTile) and tile.in_rows


def _error(conv: Conv2d, op: im2win.Op, tensors: dict[str, object]) -> float:
    bound = {name: tensors[name] for name in ("bias", "scale") if name in tensors}
    got = op.bind(tensors["filter"], **bound)(tensors["data"], tensors.get("residual"))
    want, scale = reference(conv, tensors)
    assert got.shape == conv.output_shape
    return float((got.double() - want).abs().max()) / scale


@pytest.mark.parametrize("key, name", CASES)
def test_right_with_every_arithmetic(key: str, name: str) -> None:
    conv = Conv2d.parse(key)
    backend, ranked = backend_for(GPU, "winograd"), tiles(conv, name)
    tensors = device_tensors(conv, 1)
    for product in dict.fromkeys(tile.product for tile in ranked):
        of_product = [tile for tile in ranked if tile.product == product]
        # Winograd's square form with many outputs is offered to the tuner alone, which measures whether it keeps the tolerance here;
        # so is that of int8, which is for who asks for it, and keeps its own
        fit = (tile for tile in of_product if backend.proven(conv, tile) or tile.dtype == "int8" or in_rows(tile))
        tile = next(fit, None)
        assert tile is not None, f"{product}: no tile is sure to keep the tolerance"
        op = im2win.build(conv, "cuda", algorithm=name, tile=tile, accuracy="winograd")
        error = _error(conv, op, tensors)
        assert error <= tolerance(conv, backend.accuracy(tile)), f"{product}, {tile}"


@pytest.mark.parametrize("product", ["tf32x3", "wg_tf32x3"])
@pytest.mark.parametrize("key", ["n8-c64x28x28-k64x3x3-p1", "n8-c256x14x14-k64x3x3-p1", "n8-c512x14x14-k64x3x3-p1-NHWC"])
def test_sums_of_parts_do_not_shrink(key: str, product: str) -> None:
    """What truncation takes of all outputs alike is restored: it would add up over the layers of a network."""
    conv = Conv2d.parse(key)
    tile = next(tile for tile in tiles(conv, "implicit_gemm/tiled") if tile.product == product and not tile.outputs)
    op = im2win.build(conv, "cuda", algorithm="implicit_gemm/tiled", tile=tile)
    tensors = device_tensors(conv, 1)
    got, (want, _) = op.bind(tensors["filter"])(tensors["data"]).double(), reference(conv, tensors)
    common = float((got * want).sum() / (want * want).sum() - 1)
    assert abs(common) < 1e-6, f"{tile}: {common:+.2e}"


REQUANTISED = [
    "n4-c64x28x28-k96x3x3-p1-int8-out.int8-NHWC-bias-relu",  # lanes exchange channels
    "n2-c64x57x53-k64x3x3-p1-int8-out.int8-NHWC",
    "n2-c64x57x53-k70x3x3-p1-int8-out.int8-NHWC-add",
    "n2-c64x28x28-k64x3x3-p1-int8-out.float16-NHWC-bias-add-relu6",
    "n2-c128x28x28-k64x3x3-s2-p1-int8-out.float32-NHWC-bias",
    "n3-c40x15x17-k24x3x3-p1-int8-out.int8-bias-add-relu",
    "n2-c64x40x96-k70x3x3-p1-int8-out.int8-bias-relu",  # lanes exchange columns
    "n2-c128x14x14-k64x3x3-p1-int8-out.float16-relu",
]


EXACT = [
    "direct/persistent", "direct/warp_specialized", "direct/tiled", "implicit_gemm/tiled", "implicit_gemm/split_k", "im2win/stored",
    "mcfa/tiled",
]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "name"), [(key, name) for key in REQUANTISED for name in EXACT if schedule_of(name).supports(Conv2d.parse(key), "cuda") is None]
)
def test_requantised_outputs_are_exact(key: str, name: str) -> None:
    """To the last bit, with every kind of product, as often as it is run; other scales take the place of those bound."""
    conv, row = Conv2d.parse(key), schedule_of(name)
    tensors = device_tensors(conv, 5)
    want, _ = reference(conv, tensors)
    other = {**tensors, "scale": -0.5 * tensors["scale"]}
    bound = {one: tensors[one] for one in ("bias", "scale") if one in tensors}
    ranked = [tile for _, tile in backend_for(GPU).ranked(conv, row)]
    for product in dict.fromkeys(tile.product for tile in ranked):
        tile = next(tile for tile in ranked if tile.product == product)
        op = im2win.build(conv, "cuda", algorithm=name, tile=tile)
        layer = op.bind(tensors["filter"], **bound)
        for _ in range(3):
            got = layer(tensors["data"], tensors.get("residual"))
            assert got.dtype == getattr(torch, conv.out_dtype) and torch.equal(got.double(), want), tile
        layer.rebind(tensors["filter"], **{**bound, "scale": other["scale"]})
        assert torch.equal(layer(tensors["data"], tensors.get("residual")).double(), reference(conv, other)[0]), tile


@pytest.mark.parametrize("out", ["int8", "float16"])
def test_requantised_layers_are_timed_beside_cudnn(out: str) -> None:
    layer = Layer("layer", Conv2d.parse(f"n4-c64x56x56-k64x3x3-p1-int8-out.{out}-NHWC"))
    result = cuda_bench.run([layer], algorithm="direct/persistent", rounds=3)
    [row] = result.layers
    assert row.failed is None and row.error == 0 and result.dtype == f"int8-out.{out}"
    assert any(name.startswith("cudnn_") for name in [*row.peers, *row.peers_failed])


QUANTISED = [
    TensorCoreTile(2, 16, 32, 16, "16x16x16", "sync_free", "none", product="s8"),
    TensorCoreTile(2, 32, 64, 32, "8x32x16", "sync_free", "shmem", product="s8"),
    TensorCoreTile(2, 32, 16, 16, "32x8x16", "sync_free", "llc", 16, "s8"),
    TensorCoreTile(2, 64, 32, 64, "16x16x16", "bgemm", "none", product="s8"),
]


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("tile", QUANTISED, ids=str)
def test_winograd_in_int8_is_its_arithmetic_to_the_last_bit(tile: TensorCoreTile, layout: str) -> None:
    """Over the whole range of int8, and where inputs are as large as they can be."""
    conv = Conv2d.parse(f"n2-c68x37x30-k56x3x3-p1-int8-{layout}-bias-add-relu")
    op = im2win.build(conv, "cuda", algorithm="winograd/tensor_cores", tile=tile, accuracy="winograd")
    for largest in (False, True):
        host = quantised.random_tensors(conv, 0, largest)
        tensors = {name: torch.from_numpy(array).cuda() for name, array in host.items()}
        right = torch.from_numpy(quantised.expected(conv, host)).cuda()
        for _ in range(5):
            assert torch.equal(op(tensors["data"], tensors["filter"], tensors["bias"], tensors["residual"]), right)


@pytest.mark.parametrize("name", ["im2win/stored", "mcfa/tiled"])
def test_export_and_load(name: str, tmp_path: object) -> None:
    conv = Conv2d.parse("n2-c64x28x28-k64x3x3-p1-bias-relu")
    op = im2win.build(conv, "cuda", algorithm=name)
    loaded = im2win.load(op.export(f"{tmp_path}/conv.so"))
    tensors = device_tensors(conv, 2)
    arguments = tensors["data"], tensors["filter"], tensors["bias"]
    assert torch.equal(loaded(*arguments), op(*arguments))
    plan = schedule_of(name).cuda
    assert plan is not None and loaded.extra_bytes == plan.transform_bytes(conv) > 0


@pytest.mark.parametrize("name", ["implicit_gemm/tiled", "im2win/stored", "mcfa/tiled"])
def test_a_side_stream_and_a_graph(name: str) -> None:
    """A graph of a call replays with new input; on a side stream the call waits for nothing but that stream."""
    conv = Conv2d.parse("n2-c64x28x28-k64x3x3-p1")
    tensors = device_tensors(conv, 3)
    layer = im2win.build(conv, "cuda", algorithm=name).bind(tensors["filter"])
    expected = layer(tensors["data"])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x = tensors["data"] * 1
        late = layer(x)
    stream.synchronize()
    assert torch.equal(late, expected)
    x = torch.zeros_like(tensors["data"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.copy_(tensors["data"])
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, expected)


@pytest.mark.parametrize("key", ["n16-c64x56x56-k64x3x3-bias", "n40-c64x28x28-k96x3x3-p1-float16-NHWC"])
def test_calls_hold_what_the_formula_says(key: str) -> None:
    """Within the rounding of PyTorch's allocator; PyTorch and cuDNN are asked as well."""
    conv = Conv2d.parse(key)
    row = measure_layer(Layer("layer", conv))
    possible = {name for name, one in SCHEDULES.items() if one.supports(conv, "cuda") is None}
    assert row.measured_bytes.keys() == possible and row.measured_bytes["im2win/fused"] == 0
    assert not row.failed.keys() & possible, row.failed
    assert row.torch_bytes.keys() == {"torch_nchw", "torch_nhwc"}
    assert bool(row.cudnn_bytes) != conv.bias


@pytest.mark.parametrize("name", ["im2win/stored", "mcfa/tiled"])
def test_the_transform_is_timed_alone(name: str) -> None:
    layer = Layer("layer", Conv2d.parse("n16-c64x56x56-k64x3x3"))
    result = cuda_bench.run([layer], algorithm=name, rounds=5)
    [row] = result.layers
    assert row.failed is None and row.transform_ms and row.ours_ms and row.transform_ms < row.ours_ms
    assert "transform" in row.spread and "transform" not in row.peers
    [row] = cuda_bench.run([layer], algorithm="implicit_gemm/tiled", rounds=3).layers
    assert row.failed is None and row.transform_ms is None


def test_every_device() -> None:
    conv = Conv2d.parse("n1-c64x14x14-k64x3x3-p1")
    op = im2win.build(conv, "cuda")
    tensors = device_tensors(conv, 4)
    expected = op(tensors["data"], tensors["filter"]).cpu()
    for index in range(torch.cuda.device_count()):
        moved = {name: tensor.to(f"cuda:{index}") for name, tensor in tensors.items()}
        assert torch.equal(op(moved["data"], moved["filter"]).cpu(), expected)


def test_what_refuses() -> None:
    conv = Conv2d.parse("n2-c64x14x14-k64x3x3-p1")
    tensors = device_tensors(conv, 5)
    layer = im2win.build(conv, "cuda").bind(tensors["filter"])
    x = tensors["data"]
    for wrong, message in (
        (x.cpu(), "is on cpu; this kernel runs on cuda:0"),
        (x.half(), "has dtype float16; it must be float32"),
        (x[:1], r"has shape \(1, 64, 14, 14\)"),
        (x.contiguous(memory_format=torch.channels_last), "is not contiguous"),
        (x.clone().requires_grad_(), "requires grad"),
        (x.new_empty(x.numel() + 1)[1:].view(x.shape), "must begin at a multiple of 16 bytes"),
    ):
        with pytest.raises(ArgumentError, match=message):
            layer(wrong)
    with pytest.raises(ArgumentError, match="`residual` must be left out"):
        layer(x, residual=x)
    with pytest.raises(ValueError, match=r"fields \[.product.\] must be"):
        im2win.build(conv, "cuda", algorithm="direct/tiled", tile={"product": "fma"})


def test_tuning_records_and_finds_again(tmp_path: object) -> None:
    conv = Conv2d.parse("n4-c64x28x28-k64x3x3-p1-float16-NHWC")
    record = im2win.tune(conv, "cuda", trials=10, logs=f"{tmp_path}/logs")
    assert record.outcome == "ok" and record.target == "cuda" and record.seconds
    op = im2win.build(conv, "cuda", logs=f"{tmp_path}/logs")
    assert op.tuned and op.algorithm == record.algorithm and op.tile == record.tile


def test_exact_keeps_tensor_cores_out() -> None:
    conv = Conv2d.parse("n4-c64x28x28-k64x3x3-p1")
    assert im2win.build(conv, "cuda", accuracy="exact").tile["product"] == "fma"


# --- the studies' kernels


def _right(conv: Conv2d, recipe: Recipe, path: Path) -> None:
    op = load(Library(path, recipe.compile(path)))
    assert _error(conv, op, device_tensors(conv, 6)) <= tolerance(conv)


@pytest.mark.parametrize("key", ["n3-c20x28x30-k80x3x3-p1-bias-relu", "n2-c3x57x57-k96x7x7-s2-p3", "n2-c32x19x18-k64x4x4-g4-add"])
@pytest.mark.parametrize("name", [*RUNGS, *WITHOUT])
def test_every_rung_of_the_ladder(name: str, key: str, tmp_path: Path) -> None:
    conv, gpu = Conv2d.parse(key), GPU
    _right(conv, cuda_ablation.recipe(conv, {**RUNGS, **WITHOUT}[name], gpu), tmp_path / "rung.so")


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("form", sliding.FORMS)
def test_sliding_windows(form: str, stride: int, tmp_path: Path) -> None:
    conv, gpu = Conv2d.parse(f"n1-c3x130x131-k3x3x3-s{stride}-p1"), GPU
    for block in (4, 32):
        _right(conv, cuda_sliding.SlidingRecipe(conv, form, block, gpu), tmp_path / f"{block}.so")


def test_the_ladder_is_measured() -> None:
    result = cuda_ablation.run([Layer("small", Conv2d.parse("n8-c64x28x28-k64x3x3"))], rounds=3)
    [row] = result.layers
    assert row.failed is None and row.peers_failed == {}
    assert set(row.spread) == {*RUNGS, *WITHOUT, "transform"} and all(spread.median > 0 for spread in row.spread.values())
    assert row.spread["prefetch"].median < row.spread["plain"].median


def test_the_sliding_study_is_measured() -> None:
    study = cuda_sliding.run(list(suite("sliding"))[:1], (8, 64), rounds=3)
    entries = {(entry["form"], entry["block"]): entry for entry in study["entries"]}
    for form in ("global", "shared"):
        assert entries[form, 8]["ms"] > 0 and entries[form, 64]["ms"] is None and "4096 threads" in entries[form, 64]["failed"]
    for form in ("im2col", "default", "torch_nchw"):
        assert entries[form, None]["ms"] > 0, entries[form, None]
