"""The C header of an exported convolution: shapes as constants, and the two functions that pack filters and compute."""

from __future__ import annotations

import math
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from im2win import __version__
from im2win.codegen import pool
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import ELEMENT_TYPES

SOURCES = Path(__file__).parent
_PACKED, _FILTERS = "packed_w", "w"


def identifier(text: str) -> str:
    """A layer's name or key as part of a C identifier: runs of other characters than letters and digits become one underscore."""
    return re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")


def checked(name: str) -> str:
    """The name, if it can be the suffix of a C identifier.

    Raises:
        ValueError: it cannot.
    """
    if not re.fullmatch(r"[A-Za-z0-9_]+", name):
        raise ValueError(f"`name` (={name!r}) must consist of letters, digits and underscores: it ends the names of C functions.")
    if name.endswith("_pack"):
        raise ValueError(f"`name` (={name!r}) must not end with _pack, as the functions do that pack filters.")
    return name


@dataclass(frozen=True)
class Interface:
    """The C interface of a layer.

    Attributes:
        name: suffix of the names of functions and files.
        made: a description of the kernel for the reader.
        packed: elements of the packed filters.
        workspace: bytes.
        threads: the most that a call uses, on a CPU; None for a GPU.
    """

    conv: Conv2d
    name: str
    made: str
    packed: int
    workspace: int
    threads: int | None = None

    @property
    def function(self) -> str:
        """Name of the function that computes."""
        return f"im2win_conv_{self.name}"

    @property
    def functions(self) -> tuple[str, str]:
        """Names of all its functions."""
        return self.function, f"{self.function}_pack"

    @property
    def tensors(self) -> dict[str, str]:
        """Names of the tensor arguments, in order, with the C types of their elements."""
        names = {"data": "x", "filter": _PACKED, "output": "y"}
        return {names.get(name, name): ELEMENT_TYPES[dtype].c for name, dtype in self.conv.dtypes.items()}

    def prototypes(self) -> tuple[str, str]:
        """Prototypes of the two functions, in the order of `functions`."""
        element = ELEMENT_TYPES[self.conv.dtypes["filter"]].c
        arguments = [f"{'' if name == 'y' else 'const '}{kind} *{name}" for name, kind in self.tensors.items()]
        stream = ["cudaStream_t stream"] if self.threads is None else []
        call, pack = self.functions
        return (
            f"int {call}({', '.join([*arguments, 'void *workspace', *stream])})",
            f"int {pack}(const {element} *{_FILTERS}, {element} *packed)",
        )

    def constants(self) -> dict[str, int | str]:
        """Constants of the header by the suffix of their names."""
        conv = self.conv
        rows, cols = conv.output_size
        sizes: dict[str, int | str] = {
            "KEY": f'"{conv}"', "BATCH": conv.batch, "IN_CHANNELS": conv.in_channels, "HEIGHT": conv.height, "WIDTH": conv.width,
            "OUT_CHANNELS": conv.out_channels, "OUT_HEIGHT": rows, "OUT_WIDTH": cols, "KERNEL_HEIGHT": conv.kernel[0],
            "KERNEL_WIDTH": conv.kernel[1], "STRIDE_DOWN": conv.stride[0], "STRIDE_ACROSS": conv.stride[1], "PADDING_TOP": conv.padding[0],
            "PADDING_LEFT": conv.padding[1], "DILATION_DOWN": conv.dilation[0], "DILATION_ACROSS": conv.dilation[1], "GROUPS": conv.groups,
        }  # fmt: skip
        sizes |= {
            "INPUT_ELEMENTS": math.prod(conv.input_shape), "FILTER_ELEMENTS": math.prod(conv.filter_shape), "PACKED_ELEMENTS": self.packed,
            "OUTPUT_ELEMENTS": math.prod(conv.output_shape), "WORKSPACE_BYTES": self.workspace,
        }  # fmt: skip
        return sizes | ({} if self.threads is None else {"THREADS": self.threads})

    def header(self) -> str:
        """The text of NAME.h."""
        prefix = self.function.upper()
        constants = [f"#define {prefix}_{name} {value}" for name, value in self.constants().items()]
        call, pack = self.prototypes()
        includes = [] if self.conv.dtype == "float32" else ["#include <stdint.h>"]
        runtime = ["#include <cuda_runtime_api.h>"] if self.threads is None else []
        shared = ["im2win.h"] if self.threads is None else ["im2win.h", "threads.h"]
        lines = [
            f"/* Convolution {self.conv}, made by im2win {__version__}: {self.made}. */", f"#ifndef {prefix}_H", f"#define {prefix}_H", "",
            *includes, *runtime, *([""] if includes or runtime else []), "#ifdef __cplusplus", 'extern "C" {', "#endif", "",
            *((pool.SOURCES / name).read_text() for name in shared), *constants, "",
            *self._packing(), f"{pack};", "", *self._calling(), f"{call};", "", "#ifdef __cplusplus", "}", "#endif", "", "#endif", "",
        ]  # fmt: skip
        return "\n".join(lines)

    def _packing(self) -> list[str]:
        where = "" if self.threads is not None else " Both lie in the host's memory; copy `packed` to the device."
        return _comment(
            f"Packs filters w {list(self.conv.filter_shape)} into PACKED_ELEMENTS elements, once for any number of calls.{where} "
            "Returns an im2win_status."
        )

    def _calling(self) -> list[str]:
        conv = self.conv
        sizes = {"bias": conv.out_channels, "scale": conv.scales}
        epilogue = [f"{name} [{size}]" for name, size in sizes.items() if name in self.tensors]
        epilogue += ["residual like y"] if conv.residual else []
        shapes = f"x {list(conv.input_shape)} and y {list(conv.output_shape)} are {conv.layout}, dense"
        bits = "".join(f"; {name} as its bits" for name in ELEMENT_TYPES if name in conv.dtypes.values() and ELEMENT_TYPES[name].narrow)
        if self.threads is not None:
            rules = (
                "Any number of threads may call at the same time, each with a workspace of its own; one of them gets the pool of threads, "
                "the others compute alone. Nothing is allocated."
            )
        else:
            rules = (
                f"All tensors and the workspace lie on the device, tensors at multiples of 16 bytes{bits}. Kernels are launched on the "
                "stream and not waited for; calls that may run at the same time need workspaces of their own. Nothing is allocated, so a "
                "call can be captured in a graph."
            )
        return _comment(
            f"y = {self._formula()}. {', '.join([shapes, *epilogue])}{bits if self.threads is not None else ''}. The workspace holds "
            f"WORKSPACE_BYTES bytes at any address, NULL if 0, and its contents do not matter. {rules} Returns an im2win_status."
        )

    def _formula(self) -> str:
        conv = self.conv
        if ELEMENT_TYPES[conv.dtype].scaled:
            sums = " + ".join(["conv(x, w) * scale", *(["bias"] if conv.bias else []), *(["residual"] if conv.residual else [])])
            ends = f" within -{limit:g} to {limit:g}" if (limit := ELEMENT_TYPES[conv.out_dtype].largest) else ""
            formula = sums if conv.activation == "none" else f"{conv.activation}({sums})"
            steps = "sums and what follows in float32, each operation rounded by itself"
            return f"{formula}, {steps}, then {conv.out_dtype}, to nearest even{ends}"
        zero = f" {'-' if conv.zero_point > 0 else '+'} {abs(conv.zero_point)}" if conv.zero_point else ""
        sums = " + ".join([f"conv(x{zero}, w)", *(["bias"] if conv.bias else [])])
        if conv.requantised:
            sums = f"{f'({sums})' if conv.bias else sums} * scale"
        if conv.own_steps:
            sums = f"limit(round({sums})) * a + (residual * b + c)"
        elif conv.residual:
            sums += " + residual"
        formula = sums if conv.activation == "none" else f"{conv.activation}({sums})"
        if not conv.requantised:
            return formula
        limits = ELEMENT_TYPES[conv.out_dtype].limits
        zero = f", plus {conv.out_zero_point}" if conv.out_zero_point else ""
        steps = ", the last five scales are the limits low and high, a, b and c" if conv.own_steps else ""
        ends = "" if limits is None else f", to nearest even{zero} and within {limits[0]} to {limits[1]}"
        return f"{formula}, sums in int32, what follows in float32, each operation rounded by itself, then {conv.out_dtype}{ends}{steps}"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(f"/* {text} */", 110, subsequent_indent="   ", break_on_hyphens=False)
