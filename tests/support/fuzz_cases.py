"""Random kernels: a valid problem, a schedule that computes it, a legal tile, tensors. Each follows from a seed and an index alone.

A `fuzz_jobs.Case` is plain values, so that a failure can be written down and replayed on another day, whatever is drawn then.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from fuzz_jobs import Case, Target
from oracle import Array, Tensors, exact_tensors, normal_tensors, oracle
from schedules_dot import dot_tensors

from im2win.builder.build import build_tile
from im2win.device.cpu import Machine
from im2win.device.gpu import H200
from im2win.numerics.reference import typed_tensors
from im2win.numerics.tolerance import tolerance
from im2win.numerics.winograd_matrices import transform
from im2win.registry.backends import backend_for
from im2win.registry.schedules import SCHEDULES, Schedule, schedule_of
from im2win.spec.accuracy import Accuracy, allows
from im2win.spec.activations import ACTIVATIONS, activation_of
from im2win.spec.conv2d import LAYOUTS, Conv2d, ConvError
from im2win.spec.dtypes import DTYPES, ELEMENT_TYPES

ACCURACIES: tuple[Accuracy, ...] = ("float32", "float32", "tf32", "winograd")  # of CUDA kernels, as often as they are drawn
GUARD = 512  # elements on either side of an output
OLDER = Machine("Some CPU", "haswell", "avx2", 1, 8, 16, 32 << 10, 256 << 10, 8 << 20)  # runs on every x86-64 with AVX-512


class WrongOutput(AssertionError):
    """A kernel's output, or what it did beside it, is not what the float64 oracle and the tolerance allow."""


# --- problems


@functools.cache
def element_types(target: Target) -> dict[str, float]:
    """The element types that some schedule of a target computes, as the registry says; each with the root of the schedules' number.

    With these weights no type is rare, and neither are the schedules of a type that has many.
    """
    plain = Conv2d.parse("n1-c16x8x8-k16x3x3-p1")
    counts = {dtype: sum(row.supports(plain.with_(dtype=dtype), target) is None for row in SCHEDULES.values()) for dtype in DTYPES}
    return {dtype: math.sqrt(count) for dtype, count in counts.items() if count}


def problem(draw: random.Random, dtype: str, target: Target) -> Conv2d:
    """A valid problem of at most some ten thousand elements; every option of `Conv2d` varies."""
    while True:
        try:
            return _problem(draw, dtype, 13 if target == "cpu" else 9)
        except ConvError:  # an epilogue that the type does not have
            continue


def _problem(draw: random.Random, dtype: str, most: int) -> Conv2d:
    """A problem of at most `most` by `most` outputs. Sizes are drawn as those of outputs, so that none is refused."""

    def pair(largest: int) -> tuple[int, int]:
        return draw.randint(1, largest), draw.randint(1, largest)

    kernel, stride, dilation = pair(5), pair(3), pair(3)
    regime = draw.choice(("any", "any", "any", "square", "square", "pointwise", "large"))
    if regime == "square":  # what Winograd's form computes
        kernel, stride, dilation = (draw.choice((3, 3, 5)),) * 2, (1, 1), (1, 1)
    elif regime == "pointwise":
        kernel, stride, dilation = (1, 1), draw.choice(((1, 1), (2, 2))), (1, 1)
    elif regime == "large":
        kernel, dilation = pair(11), (1, 1)
    padding = [0] * 4 if draw.random() < 0.4 else [draw.randint(0, 4) for _ in range(4)]
    size = []
    for axis in (0, 1):
        window = (kernel[axis] - 1) * dilation[axis] + 1
        outputs, unread = draw.randint(1, most), draw.randint(0, stride[axis] - 1)
        size.append(max((outputs - 1) * stride[axis] + window + unread - padding[axis] - padding[axis + 2], 1))
    groups = draw.choice((1, 1, 1, 2, 3, 5))
    wide = draw.random() < 0.15 and regime != "large"
    channels = (draw.choice((16, 31, 33, 64)) if wide else draw.randint(1, 9 if groups == 1 else 3)) * groups
    filters = draw.randint(1, 70 if wide else 40 if groups == 1 else 9) * groups
    if draw.random() < 0.15:  # depthwise
        groups = channels = draw.choice((2, 3, 8, 16, 17, 24, 33, 40))
        filters = channels * draw.choice((1, 1, 2, 3))
    integer = ELEMENT_TYPES[dtype].integer
    out = draw.choice(ELEMENT_TYPES[dtype].outputs)
    return Conv2d(
        draw.choice((1, 1, 2, 3)), channels, *size, filters, kernel, stride, padding, dilation, groups, dtype, draw.choice(LAYOUTS),
        bias=draw.random() < 0.5, residual=draw.random() < 0.4, activation=_activation(draw), out_dtype=out,
        zero_point=_zero_point(draw, dtype) if integer else 0, out_zero_point=_zero_point(draw, out) if out in ("int8", "uint8") else 0,
    )  # fmt: skip


def _activation(draw: random.Random) -> str:
    """Every activation; half of them leave sums of integers exact, so that outputs are compared to the last bit."""
    exact = [name for name, row in ACTIVATIONS.items() if not row.rounds]
    name = draw.choice(exact if draw.random() < 0.5 else tuple(ACTIVATIONS))
    return f"{name}{draw.choice(('0.1', '0.25', ''))}" if ACTIVATIONS[name].parameter is not None else name


def _zero_point(draw: random.Random, dtype: str) -> int:
    limits = ELEMENT_TYPES[dtype].limits
    assert limits is not None
    return draw.randint(*limits) if draw.random() < 0.5 else 0


# --- kernels


@functools.cache
def machines(threads: int) -> list[Machine]:
    """This machine with one thread and with `threads`, and what it can run of an older one."""
    host = Machine.host()
    found = [dataclasses.replace(host, threads=count) for count in sorted({1, threads})]
    return [*found, dataclasses.replace(OLDER, threads=threads)] if host.isa in ("avx512f", "avx2") else found


def drawn(target: Target, seed: int, index: int, threads: int = 2) -> Case:
    """The case of an index: the same one every time on the same machine with the same source."""
    draw = random.Random(f"{seed} {index} {target}")
    types = element_types(target)
    [dtype] = draw.choices(list(types), list(types.values()))
    conv = problem(draw, dtype, target)
    accuracy: Accuracy = "float32" if target == "cpu" else draw.choice(ACCURACIES)
    machine = draw.choice(machines(threads)) if target == "cpu" else None
    facts: dict[str, Any] = {"target": target, "conv": str(conv), "accuracy": accuracy, "seed": draw.randrange(1 << 30)}
    facts |= {"machine": {**dataclasses.asdict(machine), "features": list(machine.features)}} if machine else {}
    backend = backend_for(machine or H200, accuracy)
    names = [name for name, row in SCHEDULES.items() if row.supports(conv, target, accuracy) is None]
    for name in draw.sample(names, len(names)):
        row = SCHEDULES[name]
        space = row.scheduler.space(conv, machine) if machine else row.on_gpu.space(conv, H200, accuracy)
        space = [tile for tile in space if allows(accuracy, backend.accuracy(tile))]
        if not space:
            continue
        tile = draw.choice(space)
        if draw.random() < 0.4:
            tile = changed(draw, row, conv, tile, backend)
        kind = "normal" if draw.random() < 0.25 else draw.choice(("integers", "whole range"))
        case = Case(**facts, algorithm=name, tile=tile.as_dict(), listed=tile in space, tensors=kind)
        # Forms that round transformed tiles have tolerances for normally distributed tensors.
        return case if row.algorithm.exact or equal(conv, case) else dataclasses.replace(case, tensors="normal")
    return Case(**facts)


def changed(draw: random.Random, row: Schedule, conv: Conv2d, tile: Any, backend: Any) -> Any:
    """Another legal tile: some numbers of one changed; the tile itself where no change is found that breaks no rule."""
    for _ in range(60):
        values = dict(tile.as_dict())
        numbers = [name for name, value in values.items() if isinstance(value, int) and not isinstance(value, bool) and name != "outputs"]
        for name in draw.sample(numbers, min(len(numbers), draw.randint(1, 3))):
            old = values[name]
            values[name] = draw.choice((1, 2, 3, 4, 5, 6, 7, max(old - 1, 0), old + 1, 2 * old, max(old // 2, 1), conv.output_size[0]))
        try:
            one = backend.tile(row, values)
            if one != tile and not backend.violations(conv, row, one):
                return one
        except ValueError:  # values of no tile
            continue
    return tile


# --- what must come out


def made(conv: Conv2d, case: Case) -> Tensors:
    """Tensors of the problem's types.

    Kinds: "integers" (-4 to 4, exact in every type), "whole range" (of integer types; the same as integers for others), and "normal".
    Tensors of uint8 are magnitudes.
    """
    if case.tensors == "whole range":
        tensors = dot_tensors(conv, case.seed)
    elif case.tensors == "integers":
        tensors = exact_tensors(conv, case.seed)
        if conv.requantised:  # halves make ties, others round; some outputs are beyond the output's range
            tensors["scale"] = np.resize(np.array((0.5, -0.5, 3.0, 0.25, -0.1, 0.1, -1.5), np.float32), conv.out_channels)
    elif ELEMENT_TYPES[conv.dtype].integer:
        tensors = dict(typed_tensors(conv, case.seed))
    else:
        tensors = normal_tensors(conv, case.seed)
    unsigned = {name for name, dtype in conv.dtypes.items() if dtype == "uint8"}
    return {name: (np.abs(one) if name in unsigned else one).astype(conv.dtypes[name]) for name, one in tensors.items()}


def equal(conv: Conv2d, case: Case) -> bool:
    """Whether a kernel's outputs must be the exact ones rounded once, to the last bit."""
    row, rounds = schedule_of(case.algorithm), activation_of(conv.activation).rounds
    if rounds or (case.tensors == "normal" and not ELEMENT_TYPES[conv.dtype].integer):
        return False
    if case.target == "cpu":
        outputs = case.tile.get("outputs", 0)
        return row.scheduler.exact or (row.scheduler.family == "winograd" and all(transform(outputs, r).dyadic for r in conv.kernel))
    return row.algorithm.exact and "x3" not in str(case.tile.get("product", ""))  # three products restore what truncation takes


def accuracy_of(case: Case) -> Accuracy:
    """The arithmetic of a case's kernel."""
    row = schedule_of(case.algorithm)
    backend = backend_for(Machine(**case.machine) if case.machine else H200, case.accuracy)
    return backend.accuracy(backend.tile(row, case.tile))


def compare(conv: Conv2d, case: Case, y: Array, tensors: Tensors) -> None:
    """Compares a kernel's output with the oracle.

    Raises:
        WrongOutput: which output differs, and by how much.
    """
    expected = oracle(conv, **tensors)
    if y.shape != expected.shape or y.dtype != np.dtype(conv.out_dtype):
        raise WrongOutput(f"{y.dtype} {y.shape}, not {conv.out_dtype} {expected.shape}")
    found = y.astype(np.float64)
    if equal(conv, case):
        right = expected.astype(np.float32).astype(conv.out_dtype).astype(np.float64) if conv.out_dtype != "int32" else expected
        wrong = ~(found == right)  # NaN is unequal to everything
        if wrong.any():
            first = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise WrongOutput(f"{wrong.sum()} of {y.size} outputs differ, the first at {first}: {found[first]}, not {right[first]}")
        return
    if not np.isfinite(found).all():
        raise WrongOutput(f"{(~np.isfinite(found)).sum()} of {y.size} outputs are no numbers")
    allowed = tolerance(conv, accuracy_of(case))
    error = float(np.max(np.abs(found - expected))) / max(float(np.max(np.abs(expected))), 1.0)
    if not error <= allowed:
        raise WrongOutput(f"relative error {error:.3g} is above {allowed:.3g}")


# --- runs


def run(case: Case) -> str:
    """Builds a case's kernel and checks its output. Returns how it was compared: "equal", "close", or "refused" without an algorithm.

    Raises:
        WrongOutput: the output is wrong.
        Exception: whatever the build raises; no legal tile may fail to build.
    """
    conv = Conv2d.parse(case.conv)
    if str(conv) != case.conv:
        raise WrongOutput(f"the key {case.conv} is printed as {conv}")
    if not case.algorithm:
        return "refused"
    tensors = made(conv, case)
    y = _on_cpu(conv, case, tensors) if case.target == "cpu" else _emulated(conv, case, tensors)
    compare(conv, case, y, tensors)
    return "equal" if equal(conv, case) else "close"


def refusal(case: Case) -> str:
    """Why no schedule computes a case's problem: the reason that most of them give."""
    conv = Conv2d.parse(case.conv)
    reasons = Counter(row.supports(conv, case.target, case.accuracy) or "no legal tile" for row in SCHEDULES.values())
    return reasons.most_common(1)[0][0]


def _on_cpu(conv: Conv2d, case: Case, tensors: Tensors) -> Array:
    """The output of a CPU's kernel, which starts as poison between guards, at an address that is a multiple of an element only."""
    machine = Machine(**case.machine)
    tile = backend_for(machine).tile(schedule_of(case.algorithm), case.tile)
    op = build_tile(conv, case.algorithm, tile, machine)
    element = ELEMENT_TYPES[conv.out_dtype]
    guard = np.array(-7.25e33 if element.guard is None else element.guard)
    guard = np.array(-(2**31) + 777) if conv.out_dtype == "int32" else guard
    with np.errstate(over="ignore"):  # float16 has no such number
        guarded = np.full(2 * GUARD + 1 + int(np.prod(conv.output_shape)), guard, np.float64).astype(conv.out_dtype)
    before = guarded[0]
    y = guarded[GUARD + 1 : -GUARD].reshape(conv.output_shape)
    y[...] = element.poisons[0]
    given = {name: one.copy() for name, one in tensors.items()}
    op(given["data"], given["filter"], *map(given.get, ("bias", "residual")), y, given.get("scale"))
    if not (np.all(guarded[: GUARD + 1] == before) and np.all(guarded[-GUARD:] == before)):
        raise WrongOutput("wrote outside its output")
    for name, one in tensors.items():
        if given[name].tobytes() != one.tobytes():
            raise WrongOutput(f"wrote into its input {name}")
    return y


def _emulated(conv: Conv2d, case: Case, tensors: Tensors) -> Array:
    """The output of a CUDA kernel in the emulator, which checks guards and races."""
    from emulated import Emulated

    tile = schedule_of(case.algorithm).on_gpu.tile(case.tile)
    [y] = Emulated(conv, [(case.algorithm, tile)])(tensors, case.seed)
    return y


def words(case: Case) -> Sequence[str]:
    """What a run counts of a case: its schedule, types, layout, activation, and where the tile comes from."""
    conv = Conv2d.parse(case.conv)
    layer = [f"type {conv.types}", f"layout {conv.layout}", f"activation {activation_of(conv.activation).name}"]
    options = [("bias", conv.bias), ("residual", conv.residual)]
    options += [("zero point", conv.zero_point != 0), ("output zero point", conv.out_zero_point != 0)]
    machine = [f"machine {case.machine['mcpu']} {case.machine['threads']}t"] if case.machine else []
    if not case.algorithm:
        return [*layer, "schedule none"]
    made_of = [f"schedule {case.algorithm}", f"tensors {case.tensors}", "tile of the space" if case.listed else "tile beyond the space"]
    return [*layer, *(name for name, on in options if on), *machine, *made_of]
