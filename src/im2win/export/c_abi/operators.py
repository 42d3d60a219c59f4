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

DOMAIN, OPERATOR = "im2win", "Conv"  # inputs X, W, and B and Z (the residual) where the kernel has them; attribute `kernel`
SYMBOL = "RegisterCustomOps"  # the symbol that ONNX Runtime loads


@dataclass(frozen=True)
class Operator:
    """A compiled kernel.

    It holds the problem, the filter packing, the symbol in an object file, and the bytes of workspace for a whole call and for each task.
    """

    conv: Conv2d
    pack: Any
    symbol: str
    path: Path
    workspace: tuple[int, int]

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
    rows = [f'  {{"{one.name}", &layer_{number}}},' for number, one in enumerate(operators)]
    return "\n".join(
        [
            '#include "operators.h"', "", instructions(machine), "", *layers,
            "const im2win_operator im2win_operators[] = {", *rows, "};",
            f"const size_t im2win_operator_count = {len(operators)};",
            f"const size_t im2win_operator_workspace = {workspace_of(operators, machine)};", "",
        ]
    )  # fmt: skip


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
