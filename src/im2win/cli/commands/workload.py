"""Workloads of the command line as layers: a suite, an ONNX file, captured layers or the key of one convolution."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from im2win.spec.captured_layers import read_layers
from im2win.spec.conv2d import Conv2d

if TYPE_CHECKING:
    from im2win.spec.suites import Layer


class WorkloadError(ValueError):
    """A name that is no suite, no model and no key, or a layer that a workload does not contain."""


def read(
    what: str,
    batch: int | None = None,
    names: str | None = None,
    dtype: str | None = None,
    layout: str | None = None,
    *,
    out_dtype: str | None = None,
    deployed: bool = False,
) -> tuple[list[Layer], list[str]]:
    """The layers that `what` names, and a line for each convolution of a model, or line of a file, that cannot be used.

    Args:
        what: a suite ("resnet50"), a path that ends in .onnx or in .jsonl (`spec.captured_layers`), or a key ("n8-c64x56x56-k64x3x3-p1").
        batch, dtype, layout, out_dtype: replace those of every layer.
        names: comma-separated layer names; all layers if None.
        deployed: for a model, the layers that `im2win compile` looks up: convolutions with everything that is fused, and products.

    Raises:
        WorkloadError: `what` or one of `names` is unknown.
        ValueError, OSError: an error of the reader of the suite, key or model.
    """
    from im2win.spec import suites

    skipped: list[str] = []
    if what.endswith(".onnx"):
        from im2win.frontends.onnx.layers import layers_of

        model = layers_of(what, batch=batch, epilogues=deployed, products=deployed)
        layers, skipped = list(model.layers), [f"{one.name}: {one.reason}" for one in model.skipped]
    elif what.endswith(".jsonl"):
        layers, skipped = read_layers(what, batch)
    elif what in suites.suite_names():
        layers = list(suites.suite(what, batch=batch))
    elif re.match(r"n\d+-c\d", what):
        conv = Conv2d.parse(what)
        layers = [suites.Layer(what, conv if batch is None else conv.with_(batch=batch), 1)]
    else:
        known = ", ".join(suites.suite_names())
        files = "a file ending in .onnx or .jsonl"
        raise WorkloadError(f"{what!r} must be a suite ({known}), {files} or a key like n8-c64x56x56-k64x3x3-p1.")
    changes = {name: value for name, value in (("dtype", dtype), ("out_dtype", out_dtype), ("layout", layout)) if value is not None}
    layers = [suites.Layer(layer.name, layer.conv.with_(**changes), layer.count) for layer in layers] if changes else layers
    return only(layers, names), skipped


def only(layers: list[Layer], names: str | None) -> list[Layer]:
    """The layers with these comma-separated names; all if None.

    Raises:
        WorkloadError: there is no layer with such a name, or `names` is empty.
    """
    if names is None:
        return layers
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in {layer.name for layer in layers}]
    if unknown or not wanted:
        known = ", ".join(layer.name for layer in layers)
        raise WorkloadError(f"`--layers` (={names!r}) must name layers of the workload: {known}.")
    return [layer for layer in layers if layer.name in wanted]
