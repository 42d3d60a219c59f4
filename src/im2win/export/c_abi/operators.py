"""Exports CPU kernels as a library of operators for ONNX Runtime, on whose threads they run. ONNX Runtime's headers are not needed."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from im2win import __version__
from im2win.device.cpu import Machine
from im2win.export.c_abi.checks import instructions
from im2win.export.c_abi.cpu import FLAGS, KERNEL_PREFIX, compiler_on_path, layer_source, placed, run, workspace_bytes
from im2win.export.c_abi.header import SOURCES
from im2win.packing import codec as packs
from im2win.spec.conv2d import Conv2d

DOMAIN = "im2win"
SYMBOL = "RegisterCustomOps"  # the symbol that ONNX Runtime loads


def operator_of(conv: Conv2d) -> str:
    """The operator's name: one for float32, and one for each pair of types of inputs and outputs of integer convolutions.

    Its inputs are X, W, and B, Z (the residual) and S (the scales) where the kernel has them; its attribute `kernel` selects that.
    """
    return "Conv" if conv.dtype == "float32" else f"Conv_{conv.dtype}_{conv.out_dtype}"


@dataclass(frozen=True)
class Operator:
    """A compiled kernel.

    It holds the problem, the filter packing, the symbol in an object file, the bytes of workspace for a whole call and for each task, and
    the features of the CPU that it needs beside its vector instructions.
    """

    conv: Conv2d
    pack: Any
    symbol: str
    path: Path
    workspace: tuple[int, int]
    features: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The attribute by which nodes select the kernel: the problem, and digits that differ for another filter packing."""
        layout = json.dumps([packs.as_dict(self.pack), __version__], sort_keys=True)
        return f"{self.conv} {hashlib.sha256(layout.encode()).hexdigest()[:12]}"

    def workspace_bytes(self, threads: int) -> int:
        """Bytes of a workspace at any address for so many concurrent tasks."""
        serial, task = self.workspace
        return workspace_bytes(self.conv, self.pack, serial + threads * task)


def workspace_of(operators: Sequence[Operator], machine: Machine) -> int:
    """Bytes of a workspace that is large enough for each of the kernels."""
    return max((one.workspace_bytes(machine.threads) for one in operators), default=0)


def source(operators: Sequence[Operator], machine: Machine) -> str:
    """The library's own C file: the layers' numbers and the table of kernels."""
    layers = [
        line
        for number, one in enumerate(operators)
        for line in (
            *layer_source(f"layer_{number}", one.conv, one.pack, one.workspace, machine.threads, f"{KERNEL_PREFIX}{one.symbol}"),
            "",
        )
    ]
    rows = [f'  {{"{one.name}", &layer_{number}, {_places(one.conv)}}},' for number, one in enumerate(operators)]
    needed = sorted({feature for one in operators for feature in one.features})
    return "\n".join(
        [
            '#include "operators.h"', "", instructions(machine, needed), "", *layers,
            "const im2win_operator im2win_operators[] = {", *rows, "};",
            f"const size_t im2win_operator_count = {len(operators)};",
            f"const size_t im2win_operator_workspace = {workspace_of(operators, machine)};", "",
        ]
    )  # fmt: skip


def _places(conv: Conv2d) -> str:
    """Indices of the scales and the residual among a kernel's tensors, -1 where it has none."""
    return ", ".join(str(conv.arguments.index(name) if name in conv.arguments else -1) for name in ("scale", "residual"))


def link(operators: Sequence[Operator], machine: Machine, library: Path) -> None:
    """Links kernels, all of different problems, into a library that ONNX Runtime can register.

    Raises:
        ToolchainError: there is no C compiler, or the system is not Linux.
    """
    compiler = compiler_on_path()
    with tempfile.TemporaryDirectory(prefix="im2win-operators-") as place:
        work = Path(place)
        (work / "own.c").write_text(source(operators, machine))
        (work / "symbols").write_text(f"{{ global: {SYMBOL}; local: *; }};\n")
        sources = ["own.c", *(str(SOURCES / f"{name}.c") for name in ("layer", "operators"))]
        objects = [str(one.path) for one in operators]
        flags = ("-shared", "-Wl,--version-script=symbols", "-Wl,-z,noexecstack", f"-Wl,-soname,{library.name}")
        run(work, compiler, *FLAGS, f"-I{SOURCES}", *flags, "-o", "operators.so", *sources, *objects, "-lm")
        placed(work / "operators.so", library)
