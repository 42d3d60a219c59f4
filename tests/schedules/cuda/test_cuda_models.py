"""What the cost models count of a GPU's limits: registers of a block's threads, and places for clusters."""

from __future__ import annotations

import pytest

from im2win.device.gpu import H200
from im2win.registry.backends import backend_for
from im2win.registry.schedules import SCHEDULES
from im2win.schedules.cuda.model import multistage, warp_specialized
from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.schedules.cuda.tiles.warp_specialized import WarpSpecializedTile
from im2win.spec.conv2d import Conv2d

CONV = Conv2d.parse("n32-c64x56x56-k64x3x3-p1")


def seconds(conv: Conv2d, name: str, tile: object) -> float:
    return float(SCHEDULES[name].on_gpu.estimate(conv, tile, H200).seconds)


@pytest.mark.parametrize(("columns", "slabs", "spills"), [(128, 2, False), (384, 1, True), (384, 2, True)])
def test_a_register_that_a_thread_does_not_have_costs(columns: int, slabs: int, spills: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three warpgroups leave 168 registers to a thread, one all that it can name."""
    tile = MultistageTile("wg_tf32x3", 64, columns, 64, 128, slabs, 3, "uvc", fetched=1)
    assert not backend_for(H200).violations(CONV, SCHEDULES["implicit_gemm/tiled"], tile)
    with_spills = seconds(CONV, "implicit_gemm/tiled", tile)
    monkeypatch.setattr(multistage, "SPILL_ISSUES", 0)
    multistage._work.cache_clear()
    assert (with_spills > seconds(CONV, "implicit_gemm/tiled", tile)) == spills
    multistage._work.cache_clear()


def test_clusters_that_share_accumulators_cost_more_where_they_fill_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the channels are twice the blocks: 256, of which 264 could run at once if a cluster could lie anywhere."""
    tile = WarpSpecializedTile(
        "wg_f16", 64, 1, 64, 2, 4, groups=1, cluster=8, images=1, taps=1, filter_stages=6, pingpong=1, shared="accumulators"
    )
    half, full = (Conv2d.parse(f"n1-c1024x14x14-k{channels}x1x1-float16-NHWC") for channels in (256, 512))
    times = [seconds(conv, "direct/warp_specialized", tile) for conv in (half, full)]
    monkeypatch.setattr(warp_specialized, "CROWDED", dict.fromkeys((2, 4, 8), 1.0))
    anywhere = [seconds(conv, "direct/warp_specialized", tile) for conv in (half, full)]
    assert times[0] == anywhere[0] and times[1] > 1.2 * anywhere[1]
