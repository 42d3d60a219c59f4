"""Warp-specialized kernels, made for tests."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace

from emulated import Emulated, Made, differences, expected, goes_wrong, typed
from oracle import exact_tensors

from im2win.codegen import cuda as cuda_codegen
from im2win.device.gpu import H200
from im2win.registry import cuda_lowering
from im2win.registry.schedules import schedule_of
from im2win.schedules.cuda.legality.warp_specialized import violations
from im2win.schedules.cuda.tiles.warp_specialized import WarpSpecializedTile
from im2win.spec.conv2d import Conv2d

ROW, S8 = schedule_of("direct/warp_specialized"), "wg_s8"
SMALL = replace(H200, multiprocessors=2, threads=384)  # so few that blocks of small problems stay


def tile(
    block_m: int, images: int, rows: int, cols: int, *, slabs: int = 1, stages: int = 2, taps: int = 1, filter_stages: int = 2,
    groups: int = 1, pingpong: int = 1, cluster: int = 1, product: str = "wg_f16", shared: str = "windows",
    tma_boxes: str = "halo",
) -> WarpSpecializedTile:  # fmt: skip
    more = {"images": images, "taps": taps, "filter_stages": filter_stages, "pingpong": pingpong, "tma_boxes": tma_boxes}
    return WarpSpecializedTile(product, block_m, rows, cols, slabs, stages, groups, cluster, shared=shared, **more)


def made(conv: Conv2d, one: WarpSpecializedTile) -> Made:
    assert violations(conv, one, SMALL) == []
    source = cuda_codegen.generate_source(cuda_lowering.lower(conv, ROW, one, SMALL, overlap=False), SMALL)
    return Made(str(one), source, one.pack(conv), ROW.on_gpu.workspace_bytes(conv, one) // conv.itemsize)


def check_exact(conv: Conv2d, one: WarpSpecializedTile, seeds: range = range(2)) -> None:
    """Asserts that a tile's kernel computes exactly what the oracle does, for some orders of threads."""
    tensors, kernel = typed(conv, exact_tensors(conv)), made(conv, one)
    right, emulated = expected(conv, tensors), Emulated(conv, [kernel])
    for seed in seeds:
        wrong = differences(conv, [kernel], emulated(tensors, seed), right)
        assert not wrong, f"{conv}, {one}, seed {seed}:\n" + "\n".join(wrong)


def check_random(cases: Iterator[tuple[Conv2d, WarpSpecializedTile]], count: int) -> None:
    """Asserts that the first `count` legal ones of drawn cases are exact, each for another order of threads."""
    legal = ((conv, one) for conv, one in cases if not violations(conv, one, SMALL))
    for number, (conv, one) in enumerate(itertools.islice(legal, count), 1):
        check_exact(conv, one, range(number, number + 1))


_CALL = re.compile(r"im2win::(\w+)(?:<[\d, ]+>)?\((?=[^;]*;)")


def check_calls_are_needed(conv: Conv2d, kernel: Made, name: str, sites: int) -> None:
    """Asserts that a kernel calls a device function so often, and without any one call is refused, or wrong for some order of threads."""
    body = kernel.generated.source.partition('extern "C"')[2]
    assert [match[1] for match in _CALL.finditer(body)].count(name) == sites
    for which in range(sites):

        def without(source: str, which: int = which) -> str:
            start, end = [match for match in _CALL.finditer(source) if match[1] == name][which].span()
            return source[:start] + "[](auto...) {}(" + source[end:]

        assert goes_wrong(conv, kernel, without, range(16)), f"{name} {which}"
