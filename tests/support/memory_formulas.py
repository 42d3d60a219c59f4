"""The papers' formulas of memory, by hand."""

from __future__ import annotations

from collections.abc import Callable

from im2win.spec.conv2d import Conv2d

# Elements of the whole transformed tensor, in the letters of the papers; Wi and Hi count the padding. Thesis eq. 2-4, 2-5; MEC section 3.
FORMULAS: dict[str, Callable[..., int]] = {
    "direct/tiled": lambda **_: 0,
    "direct/depthwise": lambda **_: 0,
    "direct/persistent": lambda **_: 0,
    "direct/dot_product": lambda **_: 0,
    "direct/warp_specialized": lambda **_: 0,
    "im2col/tiled": lambda N, Ci, Hf, Wf, Ho, Wo, **_: N * Ci * Hf * Wf * Ho * Wo,
    "im2win/stored": lambda N, Ci, Hf, Wi, Ho, **_: N * Ci * Ho * Hf * Wi,
    "im2win/fused": lambda **_: 0,
    "implicit_gemm/tiled": lambda **_: 0,
    "implicit_gemm/split_k": lambda N, Co, Ho, Wo, **_: 2 * N * Co * Ho * Wo,
    "mec/tiled": lambda N, Ci, Wf, Hi, Wo, **_: N * Ci * Wo * Hi * Wf,
    "mcfa/tiled": lambda **_: 0,
    "direct/scheduled": lambda **_: 0,
    "im2win/scheduled": lambda N, Ci, Hf, Wi, Ho, **_: N * Ci * Ho * Hf * Wi,
    "im2col/scheduled": lambda N, Ci, Hf, Wf, Ho, Wo, **_: N * Ci * Hf * Wf * Ho * Wo,
    "implicit_gemm/scheduled": lambda **_: 0,
    "mec/scheduled": lambda N, Ci, Wf, Hi, Wo, **_: N * Ci * Wo * Hi * Wf,
    "mcfa/scheduled": lambda **_: 0,
    "winograd/tiled": lambda **_: 0,
    "winograd/tensor_cores": lambda N, Ci, Ho, Wo, **_: N * Ci * 36 * -(-Ho // 4) * -(-Wo // 4),
}


def letters(conv: Conv2d) -> dict[str, int]:
    """The sizes of a problem in the papers' letters."""
    top, left, bottom, right = conv.padding
    (Hf, Wf), (Ho, Wo) = conv.kernel, conv.output_size
    return {
        "N": conv.batch, "Co": conv.out_channels, "Ci": conv.in_channels, "Hi": conv.height + top + bottom, "Wi": conv.width + left + right,
        "Hf": Hf, "Wf": Wf, "Ho": Ho, "Wo": Wo,
    }  # fmt: skip
