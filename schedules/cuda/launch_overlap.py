"""Launch overlap (programmatic dependent launch): a kernel begins while the kernel before it in the stream still runs.

A kernel that is launched with this attribute may begin as soon as every thread block of the kernel before it has executed
`griddepcontrol.launch_dependents` or has ended. It prepares what needs no global memory, such as barriers, and executes
`griddepcontrol.wait`, which returns when that kernel has completed and its writes are visible. The gap between two kernels then costs
neither the launch nor the begin of the second one.

Any kernel of the project can be given this, whatever its schedule; its instructions stay the same otherwise. Results do not change:

- Every thread executes `wait` before it reads or writes global memory. `with_waits` puts it at the outermost level of the kernel, before
  the first statement that names a pointer or a TMA descriptor among the kernel's parameters. There is no other way to global memory, no
  statement before it can leave the kernel, and both copies and products, in whichever warps, are behind it. That holds for filters,
  too, since a kernel before may have written them.
- Read after write and write after read: when `wait` returns, the kernel before has completed, whatever kernel it is. It has read all that
  it reads and written all that it writes.
- Kernels further ahead: A, then B and C with the attribute. C waits for B to complete, and B completes only after each of its threads has
  waited for A. So A has completed, too, when C continues.
- A kernel without the attribute waits for all kernels before it to complete, as always. One of somebody else's with the attribute begins
  when all of B's blocks have executed `launch_dependents`. That stands behind `wait`, so that all kernels before B have completed by
  then: only B itself may still run, as such a kernel has to expect.
- An event, a copy or another node of a graph between two kernels orders them completely.

`launch_dependents` follows `wait` at once. Blocks of the next kernel begin only when all blocks of this one have begun, so that they never
take the place of one; they take shared memory and registers that are free, or else those of the first blocks that end. While they wait
they issue no instructions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx

ATTRIBUTE = "im2win.launch_overlap"  # of a function: its kernels are launched so
CALL = "im2win::after_predecessors"
PREFETCH = "im2win::prefetch_map"
LAUNCH = "tirx.use_programtic_dependent_launch"  # TVM's name, spelled so, of the launch attribute
_PARAMETERS = "tirx.kernel_launch_params"
_SHARED = "tirx.use_dyn_shared_memory"  # must be the last parameter

_STATEMENT = re.compile(rf"[ \t]*(?:{CALL}\(\)|{PREFETCH}\(&\w+\));\n")
_KERNEL = re.compile(r'extern "C" __global__ [^;{]*?\b(?P<name>\w+)\((?P<parameters>[^()]*)\)\s*\{\n?')
_HANDLE = re.compile(r"(?:\*|\bCUtensorMap\b)[\w\s]*?\b(\w+)\s*$")
_MAP = re.compile(r"\bCUtensorMap\b\s+(\w+)\s*$")


def overlapping(function: Any) -> Any:
    """A host function whose kernels are launched with overlap."""
    return function.with_attr(ATTRIBUTE, True)


def _marked(module: tvm.IRModule, context: Any) -> tvm.IRModule:
    """Gives the kernels of `overlapping` functions the launch attribute and the wait. It runs behind `SplitHostDevice`."""
    changed = {}
    for function in module.functions.values():
        if not (function.attrs or {}).get(ATTRIBUTE):
            continue
        for name in _launched(function.body):
            kernel = module[name]
            others = [str(one) for one in kernel.attrs[_PARAMETERS]]
            place = len(others) - (_SHARED in others)
            wait = tirx.Evaluate(tirx.call_extern("void", CALL))
            changed[name] = kernel.with_body(tirx.SeqStmt([wait, kernel.body])).with_attr(
                _PARAMETERS, [*others[:place], LAUNCH, *others[place:]]
            )
    if not changed:
        return module
    functions = {variable: changed.get(variable.name_hint, function) for variable, function in module.functions.items()}
    return tvm.IRModule(functions, attrs=module.attrs)


mark_launches = tvm.transform.module_pass(_marked, opt_level=0, name="im2win.LaunchOverlap")


def _launched(stmt: Any) -> Iterator[str]:
    """The kernels that host code launches."""
    if isinstance(stmt, tirx.Evaluate) and isinstance(stmt.value, tvm.ir.Call) and stmt.value.op.name == "tirx.call_ffi_kernel":
        yield str(stmt.value.args[0].value)
    for child in [*getattr(stmt, "seq", ()), *([stmt.body] if hasattr(stmt, "body") else [])]:
        yield from _launched(child)


def waiting(source: str) -> str:
    """A finished source with waits in all its kernels."""
    first, *parts = re.split(r'(?=extern "C" __global__)', source)
    kernels = "".join(_with_wait(part) if _KERNEL.match(part) else part for part in parts)
    return first + overlap_functions(kernels) + kernels


def overlap_functions(source: str) -> str:
    """Device functions, in namespace `im2win`, for sources that call them; "" for others."""
    return Path(__file__).with_suffix(".hpp").read_text() if CALL in source else ""


def with_waits(kernels: str) -> str:
    """The source with the wait of every kernel that has one moved to right before its first access of global memory."""
    if CALL not in kernels:
        return kernels
    parts = re.split(r'(?=extern "C" __global__)', kernels)
    return "".join(_with_wait(part) if CALL in part else part for part in parts)


def without_waits(source: str) -> str:
    """The source of the same kernels as they are without overlap."""
    return _STATEMENT.sub("", source)


def overlapped(source: str) -> set[str]:
    """The names of the kernels that wait, which are launched with the attribute."""
    parts = re.split(r'(?=extern "C" __global__)', source)
    return {match["name"] for part in parts if CALL in part and (match := _KERNEL.match(part))}


def _with_wait(kernel: str) -> str:
    """One kernel with its wait moved, and its TMA descriptors fetched from the begin on."""
    plain = without_waits(kernel)
    head = _KERNEL.match(plain)
    assert head is not None, f"a kernel that cannot be read: {plain[:200]}"
    handles = [match[1] for one in head["parameters"].split(",") if (match := _HANDLE.search(one))]
    mentions = re.compile(rf"\b(?:{'|'.join(handles)})\b")
    maps = "".join(f"  {PREFETCH}(&{match[1]});\n" for one in head["parameters"].split(",") if (match := _MAP.search(one)))
    for start, end in _statements(plain, head.end()):
        if mentions.search(plain, start, end):
            return f"{plain[: head.end()]}{maps}{plain[head.end() : start]}  {CALL}();\n{plain[start:]}"
    raise AssertionError(f"kernel {head['name']} has no access of global memory")


def _statements(text: str, start: int) -> Iterator[tuple[int, int]]:
    """(start, end) of each outermost statement of a function's body, in whole lines. A condition and its branches are one."""
    depth = brackets = 0
    begin = position = start
    while position < len(text):
        character = text[position]
        brackets += (character in "([") - (character in ")]")
        depth += (character == "{") - (character == "}")
        position += 1
        if depth < 0:
            return
        if depth or brackets or character not in ";}":
            continue
        if re.match(r"\s*else\b", text[position:]):
            continue
        newline = text.find("\n", position)
        position = len(text) if newline < 0 else newline + 1
        yield begin, position
        begin = position
