"""Writes a rewritten model and its library of operators, with all layers or with those that a comparison finds faster."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from im2win.common.progress import Reporter
from im2win.device.cpu import Machine
from im2win.export.c_abi.cpu import features
from im2win.export.c_abi.operators import DOMAIN, Operator, link, operator_of
from im2win.frontends.models.kept_kernels import Built
from im2win.frontends.onnx.layers import import_onnx
from im2win.frontends.onnxruntime.guard import Layer, of_layers, of_models
from im2win.frontends.onnxruntime.rewriting import Replaceable, Replacement, rewrite
from im2win.frontends.onnxruntime.timing import INPUT, UNKNOWN_INPUT, Found
from im2win.registry.sources import code_digest
from im2win.spec.conv2d import Conv2d

if TYPE_CHECKING:
    from onnx import ModelProto

_MOST_WEIGHTS = 2**31 - 2**26  # bytes of weights up to which protobuf can write a model as one file
_SMALL = 1024  # bytes; smaller tensors always stay in the model's file


@dataclass(frozen=True)
class Made:
    """What was written: the replaced convolutions, those that stay after a comparison with the reason, and what comparisons found."""

    replacements: list[Replacement]
    left: tuple[str, ...] = ()
    times: dict[str, Found] = field(default_factory=dict)
    whole: Found | None = None
    note: str = ""


@dataclass(frozen=True)
class Work:
    """Writes the model and its library from built kernels.

    Attributes:
        model: the original, which stays as it is.
        folder: of temporary files.
    """

    model: ModelProto
    built: dict[Conv2d, Built]
    machine: Machine
    written: Path
    linked: Path
    folder: Path
    reporter: Reporter
    packed: dict[int, Any] = field(default_factory=dict)  # filters by `id` of the convolution, which several choices share

    def unguarded(self, kept: Sequence[Replaceable]) -> Made:
        """Replaces all of these convolutions."""
        replacements = self._linked(kept)
        self._write(replacements)
        return Made(replacements)

    def guarded(self, kept: Sequence[Replaceable], batch: int, inputs: Mapping[str, Any] | None = None) -> Made:
        """Replaces those that are faster than ONNX Runtime's; none if the whole model is slower with them, on `inputs` or random ones.

        ONNX Runtime computes quantised convolutions with channels last, and transposes tensors between them and im2win's, which comparisons
        of layers do not see. Where it would keep some of them, the model in which im2win computes all is compared too, and the faster one
        is written.
        """
        replacements = self._linked(kept)
        layers = [Layer(one, _kernel(self.built[one.replaced.convolution.conv])) for one in replacements]

        def step(done: int, of: int) -> None:
            self.reporter.step(done, "comparing with ONNX Runtime", total=of)

        found = of_layers(self.model, layers, self.linked, self.machine, step)
        names = [one.convolution.name for one in kept]
        left = {name: f"{name}: {_left(one)}" for name, one in zip(names, found, strict=True) if not one.faster}
        times, faster = dict(zip(names, found, strict=True)), [one for one, result in zip(kept, found, strict=True) if result.faster]
        if not faster:
            save(self.model, self.written)
            failed = next((one.failed for one in found), "") if all(one.failed for one in found) else ""
            why = f"nothing could be compared ({failed})" if failed else "no layer is faster than ONNX Runtime's"
            return Made([], tuple(left.values()), times, None, f"{why}: the model is the original")
        self.reporter.step(note="comparing the whole")
        more = [one for one, result in zip(kept, found, strict=True) if result.faster or (_quantised(one) and not result.failed)]
        chosen, made, whole = self._fastest([faster] if len(more) == len(faster) else [more, faster], batch, inputs)
        ours = {one.convolution.name for one in chosen}
        reasons = tuple(reason for name, reason in left.items() if name not in ours)
        if note := _given_back(whole):
            save(self.model, self.written)
            return Made([], reasons, times, whole, note)
        return Made(made, reasons, times, whole, _uncompared(whole))

    def _fastest(
        self, choices: Sequence[list[Replaceable]], batch: int, inputs: Mapping[str, Any] | None
    ) -> tuple[list[Replaceable], list[Replacement], Found]:
        """Writes the fastest of models with some convolutions replaced. Returns these, what replaces them, and its comparison's result."""
        original, given = self.folder / "original.onnx", ""
        save(self.model, original)
        if inputs:
            given = str(self.folder / "inputs.npz")
            np.savez(given, **{f"{INPUT}{name}": value for name, value in inputs.items()})
        results: list[Found] = []
        for chosen in choices:
            made = self.unguarded(chosen).replacements
            quantised = any(map(_quantised, chosen))
            results.append(of_models(original, self.written, self.linked, self.machine, batch, given, quantised=quantised))
        best = max(range(len(choices)), key=lambda place: (not results[place].failed, _gain(results[place]), place))
        if best < len(choices) - 1:
            made = self.unguarded(choices[best]).replacements
        return choices[best], made, results[best]

    def _linked(self, kept: Sequence[Replaceable]) -> list[Replacement]:
        """Links the library of these convolutions' kernels. Returns what replaces each of them."""
        operators = operators_of(kept, self.built, self.machine)
        link(list(operators.values()), self.machine, self.linked)
        made = []
        for one in kept:
            conv, key = one.convolution.conv, id(one)
            operator = operators[conv]
            if key not in self.packed:
                self.packed[key] = operator.pack.filter(conv, one.convolution.filter)
            made.append(Replacement(one, operator_of(conv), {"kernel": operator.name}, self.packed[key]))
        return made

    def _write(self, replacements: Sequence[Replacement]) -> None:
        model = type(self.model)()
        model.CopyFrom(self.model)
        rewrite(model, replacements, DOMAIN)
        save(model, self.written)


def operators_of(kept: Sequence[Replaceable], built: dict[Conv2d, Built], machine: Machine) -> dict[Conv2d, Operator]:
    """The operators of all distinct problems."""
    distinct = {one.convolution.conv: built[one.convolution.conv] for one in kept}
    return {
        conv: Operator(conv, made.tile.pack, made.symbol, made.path, made.workspace, tuple(features(made.tile, machine)))
        for conv, made in distinct.items()
    }


def _kernel(built: Built) -> str:
    """What tells a kernel apart from others for its problem."""
    return f"{built.algorithm} {sorted(built.tile.as_dict().items())} {code_digest('cpu', built.algorithm)}"


def _quantised(one: Replaceable) -> bool:
    return one.convolution.conv.dtype != "float32"


def _gain(found: Found) -> float:
    return found.theirs_s / found.ours_s if found.ours_s else 0.0


def _left(found: Found) -> str:
    """Why a layer that was compared stays with ONNX Runtime."""
    return found.failed or f"ONNX Runtime is as fast or faster ({found.theirs_s * 1e3:.3f} ms, im2win {found.ours_s * 1e3:.3f} ms)"


def _given_back(whole: Found) -> str:
    """Why the original is written in place of the new model; "" if it is not."""
    if whole.slower:
        return f"slower as a whole ({whole.ours_s * 1e3:.3f} ms, ONNX Runtime {whole.theirs_s * 1e3:.3f} ms): the model is the original"
    if whole.failed and not whole.failed.startswith(UNKNOWN_INPUT):
        return f"as a whole it fails ({whole.failed}): the model is the original"
    return ""


def _uncompared(whole: Found) -> str:
    """Why the comparison of the whole has no result; "" if it has one."""
    return f"not compared as a whole: {whole.failed}" if whole.failed else ""


def save(model: ModelProto, path: Path) -> None:
    """Writes the whole model; its weights go into a file beside it where protobuf cannot write them."""
    onnx = import_onnx()
    partial = path.with_name(path.name + ".partial")
    if sum(len(tensor.raw_data) for tensor in model.graph.initializer) < _MOST_WEIGHTS:
        onnx.save_model(model, partial)
    else:
        place = path.with_name(path.name + ".data")
        place.unlink(missing_ok=True)  # onnx would append to an existing file
        onnx.save_model(model, partial, save_as_external_data=True, location=place.name, size_threshold=_SMALL)
    os.replace(partial, path)
