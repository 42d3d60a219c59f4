"""Machine code of warpgroups' products: the assembler keeps the waits where they are needed, which no run on the emulator can show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from emulated import combined
from machine_code import disassembled

from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.schedules.cuda.tiles.persistent import PersistentTile
from im2win.schedules.cuda.tiles.warp_specialized import WarpSpecializedTile
from im2win.spec.conv2d import Conv2d

PRODUCT = re.compile(r"GMMA\.64x(\d+)x\S+ R(\d+), ")
CASES: dict[str, tuple[str, str, MultistageTile | PersistentTile]] = {
    # Seen to go wrong: conversions of sums were moved before the last wait.
    "fetched, odd sizes": (
        "n128-c3x227x227-k96x11x11-s4-float16", "implicit_gemm/tiled", MultistageTile("wg_f16", 96, 64, 96, 64, 1, 3, "cuv"),
    ),
    "fetched, two rows": (
        "n128-c3x227x227-k96x11x11-s4-float16", "implicit_gemm/tiled", MultistageTile("wg_f16", 96, 128, 96, 128, 1, 3, "cuv"),
    ),
    "halo tile fetched": (
        "n128-c64x112x112-k128x3x3-float16", "direct/tiled", MultistageTile("wg_f16", 128, 128, 64, 64, 1, 3, "Cuvc", 1, 11, 11),
    ),
    "copied": ("n128-c64x112x112-k128x3x3-float16-NHWC", "implicit_gemm/tiled", MultistageTile("wg_f16", 128, 128, 128, 64, 1, 4, "uvc")),
    "one step": ("n8-c32x28x28-k64x1x1-float16-NHWC", "implicit_gemm/tiled", MultistageTile("wg_f16", 64, 64, 64, 64, 1, 3, "uvc")),
    "promoted": ("n128-c512x7x7-k512x3x3", "implicit_gemm/tiled", MultistageTile("wg_tf32x3", 128, 128, 128, 64, 1, 3, "uvc")),
    "parts": (
        "n8-c64x112x112-k128x3x3-bias-relu", "direct/tiled", MultistageTile("wg_tf32x3", 128, 128, 128, 128, 1, 3, "Cuvc", 1, 11, 10),
    ),
    "resident": ("n1-c64x56x56-k64x3x3-p1-float16-NHWC-bias", "direct/persistent", PersistentTile("wg_f16", 64, 4, 56, 1, 2, 2)),
    "resident, rearranged": ("n1-c64x64x64-k64x3x3-p1-float16", "direct/persistent", PersistentTile("wg_f16", 64, 4, 32, 1, 2, 2)),
    "warp-specialized": (
        "n32-c256x14x14-k256x3x3-p1-float16-NHWC-bias", "direct/warp_specialized",
        WarpSpecializedTile("wg_f16", 128, 14, 14, 2, 2, 2, taps=1, filter_stages=4),
    ),
    "warp-specialized, ping-pong": (
        "n32-c512x28x28-k256x1x1-float16-NHWC", "direct/warp_specialized",
        WarpSpecializedTile("wg_f16", 64, 1, 256, 2, 4, 1, 4, filter_stages=4, pingpong=2),
    ),
    "integers": ("n8-c64x56x56-k64x3x3-int8", "implicit_gemm/tiled", MultistageTile("wg_s8", 64, 64, 64, 64, 1, 3, "uvc")),
}


def machine_code(conv: Conv2d, algorithm: str, tile: MultistageTile | PersistentTile, folder: Path) -> list[str]:
    """The kernel's instructions and labels."""
    found = disassembled(combined(conv, [(algorithm, tile)])[0], folder)
    return next(code for name, code in found.items() if "conv2d" in name)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_waits_stay_where_they_are(name: str, tmp_path: Path) -> None:
    key, algorithm, tile = CASES[name]
    code = machine_code(Conv2d.parse(key), algorithm, tile, tmp_path)
    products = [(i, match) for i, line in enumerate(code) if (match := PRODUCT.search(line))]
    sums = {int(match[2]) + k for _, match in products for k in range(int(match[1]) // 2)}
    assert products and sums

    def reads(line: str) -> bool:
        return bool({int(number) for number in re.findall(r"\bR(\d+)\b", line)} & sums)

    behind = code[products[-1][0] + 1 :]
    first_read = next(i for i, line in enumerate(behind) if reads(line) and "GMMA" not in line)
    assert any("DEPBAR.LE gsb0, 0x0" in line for line in behind[:first_read]), behind[first_read]
    for start, (i, _) in enumerate(products):
        if "gsb0" not in code[i] or "rearranged" in name:  # there threads meet meanwhile, for what the next products read
            continue
        end = products[start + 1][0] if start + 1 < len(products) else len(code)
        waits = [line for line in code[i + 1 : end] if "DEPBAR.LE gsb0" in line or line.startswith("BAR.SYNC")]
        assert waits and "DEPBAR" in waits[0], f"behind {code[i]}: {waits}"
