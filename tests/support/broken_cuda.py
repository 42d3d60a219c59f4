"""Deliberately broken CUDA kernels: generated sources with one mistake each."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from emulated import MARK, Kernel, generated
from waiting_kernels import KERNELS, STEP, TABLE

from im2win.schedules.cuda.tiles.multistage import MultistageTile
from im2win.spec.conv2d import Conv2d

Edit = Callable[[str], str]
REQUANTISED: dict[str, tuple[str, Kernel, tuple[str, ...]]] = {  # judged with the tensors of the check before timing on a GPU
    "requantised": (
        "n1-c20x5x6-k32x3x3-p1-int8-out.int8-NHWC-bias", ("implicit_gemm/tiled", MultistageTile("s8", 32, 32, 16, 16, 2, 3, "uvc")),
        (TABLE, STEP),
    ),
}  # fmt: skip
ALL = KERNELS | REQUANTISED
BARRIER = "__syncthreads();"


@dataclass(frozen=True)
class BrokenCuda:
    """A kernel of `ALL` with a mistake: its kind, and which of the places where a source can have it."""

    kernel: str
    mistake: str
    place: int = 0

    def __str__(self) -> str:
        return f"{self.kernel}: {self.mistake} {self.place}"


def _first(pattern: str, new: str | Callable[[re.Match[str]], str]) -> Edit:
    """Changes the first match."""
    return lambda source: re.sub(pattern, new, source, count=1)


def _all(pattern: str, new: str | Callable[[re.Match[str]], str]) -> Edit:
    """Changes every match."""
    return lambda source: re.sub(pattern, new, source)


def without_barrier(number: int) -> Edit:
    """Takes the barrier of this number out of a source."""

    def edit(source: str) -> str:
        start = [match.start() for match in re.finditer(re.escape(BARRIER), source)][number]
        return source[:start] + source[start + len(BARRIER) :]

    return edit


def _more(match: re.Match[str]) -> str:
    return f"{match[1]}{int(match[2]) + 1}{match[3]}"


def _less(match: re.Match[str]) -> str:
    return f"{match[1]}{int(match[2]) - 1}{match[3]}"


MISTAKES: dict[str, Edit] = {
    "no wait": _all(r"im2win::wait_copies<\d+>\(\);", ""),
    "waiting for one copy less": _all(r"im2win::wait_copies<(\d+)>", lambda match: f"im2win::wait_copies<{int(match[1]) + 1}>"),
    "copies not committed": _all(r"im2win::commit_copies\(\);", ""),
    "sums start at one": _all(r"(sums\w*_ptr\[[^;=]*\] = )0x0p\+0f", r"\g<1>0x1p+0f"),
    "outputs shifted": _all(r"(\boutput_ptr\[)", r"\g<1>1 + "),
    "filters shifted": _first(r"(\bfilter_ptr\[)", r"\g<1>1 + "),
    "windows shifted": _all(r"(\bdata_ptr\[)", r"\g<1>1 + "),
    "last row taken for padding": _all(r"(top_ptr\[\d+\]\)* < )(\d+)(\))", _less),
    "first row taken for padding": _all(r"\(0 <= (\(\(entry_ptr\w*\[1\] >> 16\))", r"(0 < \1"),
    "a step lost": _first(r"(for \(int v_\d+ = 0; v_\d+ < )(\d+)(; \+\+v_\d+\) \{\s+im2win::wait_copies)", _less),
    "stale slab": _all(r"\(\(v_(\d+) \+ (\d+)\) % (\d+)\)", lambda match: f"((v_{match[1]} + {int(match[2]) - 1}) % {match[3]})"),
    "tail one longer": _all(r"( < )(\d+)(\) \{\s+values_ptr)", _more),
    "tail one shorter": _all(r"( < )(\d+)(\) \{\s+values_ptr)", _less),
    "whole sums start at one": _all(r"(sums_ptr\[[^;=]*\] = )0;", r"\g<1>1;"),
    "sums of sixteen bits": _all(r"scaled\(\((sums_ptr\[.*?\]) \+ bias", r"scaled((max(min(\g<1>, 32767), -32768) + bias"),
    "a bias one higher": _first(r"\+ bias_ptr\[", "+ 1 + bias_ptr["),
    "bias of the next channel": _first(r"\bbias_ptr\[\(", "bias_ptr[1 + ("),
    "scale of the next channel": _first(r"\bscale_ptr\[\(", "scale_ptr[1 + ("),
    "rounded towards zero": _first(r"= (im2win::scaled\(.*\));", r"= truncf(\g<1>);"),
    "another end of the range": _first(r"= (im2win::scaled\(.*\));", r"= fminf(\g<1>, 120.0f);"),
    "table of another tap": _first(r"(\(\(int\*\)shared_ptr\)\[[^;=]*\] = [^;?]*\? )", r"\g<1>1 + "),
}


def edit_of(one: BrokenCuda) -> Edit:
    """What makes the mistake, from a source that begins at `MARK`."""
    return without_barrier(one.place) if one.mistake == "no barrier" else MISTAKES[one.mistake]


def injected() -> list[BrokenCuda]:
    """All broken kernels: each of the barriers lost, and each mistake that a source can have."""
    found: list[BrokenCuda] = []
    for name, (key, (algorithm, tile), barriers) in ALL.items():
        source = generated(Conv2d.parse(key), algorithm, tile).source
        source = source[source.index(MARK) :]
        found += [BrokenCuda(name, "no barrier", number) for number in range(len(barriers))]
        found += [BrokenCuda(name, mistake) for mistake, edit in MISTAKES.items() if edit(source) != source]
    return found
