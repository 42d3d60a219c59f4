"""Quantises a float32 ONNX model with onnxruntime.quantization on calibration data, and measures what it loses on them."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from im2win.common.exact_sums import exact_sums
from im2win.common.messages import brief
from im2win.frontends.onnx.layers import ModelError, load

Array = npt.NDArray[Any]
ACTIVATIONS = ("uint8", "int8")
_LEAST_OPSET = 13  # of DequantizeLinear with a scale for every channel
_LEAST_IR = 7  # of files of that operator set; before 4, constants had to be inputs, too, which those of folded normalisations are not
_QUANTISED = ("QuantizeLinear", "DequantizeLinear", "QLinearConv", "ConvInteger")


class CalibrationError(ValueError):
    """Calibration data that a model cannot be run on. The message names the argument, its value and the rule."""


@dataclass(frozen=True)
class Loss:
    """How an output of a quantised model differs from the float32 model's on the calibration data.

    Attributes:
        output: its name.
        relative: root of the sum of squared differences over that of the squared float32 values.
        same_top: share of the images whose largest value has the same place, for outputs of [images, classes]; else None.
    """

    output: str
    relative: float
    same_top: float | None


def quantise(
    source: str | os.PathLike[str], out: str | os.PathLike[str], data: Mapping[str, Array], *, per_channel: bool = True,
    activations: str = "uint8",
) -> tuple[tuple[Loss, ...], int]:  # fmt: skip
    """Writes a model with QuantizeLinear and DequantizeLinear nodes. Filters are int8.

    Args:
        source: path of a float32 model.
        out: path of the quantised model.
        data: images by input, along the first axis; for a fixed batch a multiple of it. The model's inputs are all there.
        per_channel: one scale of filters for every output channel; else one for all.
        activations: type of all other tensors, uint8 or int8.

    Returns:
        The loss of every floating-point output, and the number of images.

    Raises:
        ModelError: the model cannot be read, or is quantised already.
        CalibrationError: `data` has other names, types or shapes than the model's inputs, or no images.
        ImportError: onnxruntime or onnx is not installed.
        ValueError: an unknown type.
    """
    if activations not in ACTIVATIONS:
        raise ValueError(f"`activations` (={activations!r}) must be {' or '.join(ACTIVATIONS)}.")
    label, model = load(source)
    if any(node.op_type in _QUANTISED for node in model.graph.node):
        raise ModelError(f"`source` (={label}) must be a float32 model; it has quantised operators already.")
    try:
        import onnxruntime as ort
        from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
        from onnxruntime.quantization.shape_inference import quant_pre_process
    except ImportError as error:
        raise ImportError("im2win quantize needs the package `onnxruntime`; install it beside the extra im2win[onnx].") from error
    session = _session(ort, os.fspath(source), label)
    batches = _batches(session.get_inputs(), data)

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._left = iter(batches)

        def get_next(self) -> dict[str, Array] | None:
            return next(self._left, None)

    kind = {"uint8": QuantType.QUInt8, "int8": QuantType.QInt8}[activations]
    with tempfile.TemporaryDirectory(prefix="im2win-quantize-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ready = Path(folder) / "ready.onnx"
        with contextlib.redirect_stdout(io.StringIO()):
            quant_pre_process(os.fspath(source), str(ready), skip_symbolic_shape=True)  # folds batch normalisation into filters
            _raise_opset(ready, label)
            quantize_static(
                str(ready), os.fspath(out), Reader(), quant_format=QuantFormat.QDQ, per_channel=per_channel, activation_type=kind,
                weight_type=QuantType.QInt8,
            )  # fmt: skip
    return _losses(session, _session(ort, os.fspath(out), label), batches), sum(len(next(iter(one.values()))) for one in batches)


def _raise_opset(path: Path, label: str) -> None:
    """Converts a file of an older operator set to the least one that quantised operators need."""
    from onnx import load_model, save_model, version_converter

    model = load_model(path)
    opset = next((one.version for one in model.opset_import if not one.domain), _LEAST_OPSET)
    if opset >= _LEAST_OPSET:
        return
    model.ir_version = max(model.ir_version, _LEAST_IR)
    try:
        save_model(version_converter.convert_version(model, _LEAST_OPSET), path)
    except Exception as error:  # onnx raises what its C++ code does
        rule = f"must be of operator set {_LEAST_OPSET} or newer, or convertible to it; it is of {opset}"
        raise ModelError(f"`source` (={label}) {rule}: {brief(error)}") from error


def _session(ort: Any, path: str, label: str) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    exact_sums(options)
    try:
        return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises its own classes
        raise ModelError(f"`source` (={label}) must be a model that ONNX Runtime loads; it says: {error}") from error


_TYPES = {"tensor(float)": "float32", "tensor(double)": "float64", "tensor(int64)": "int64", "tensor(int32)": "int32"}


def _batches(inputs: Any, data: Mapping[str, Array]) -> list[dict[str, Array]]:
    """The calibration data as inputs of single runs."""
    wanted = {one.name: one for one in inputs}
    if set(data) != set(wanted):
        given = ", ".join(data) or "none"
        raise CalibrationError(f"`data` (={given}) must have an array for each input of the model: {', '.join(wanted)}.")
    counts = set()
    sizes = {one.shape[0] for one in inputs if one.shape and isinstance(one.shape[0], int)}
    batch = sizes.pop() if sizes else 1
    for name, one in wanted.items():
        array, dtype = data[name], _TYPES.get(one.type, one.type)
        shape = "[" + ", ".join(["images", *(str(size) if isinstance(size, int) else "any" for size in one.shape[1:])]) + "]"
        fits = array.ndim == len(one.shape) and array.ndim > 0
        fits = fits and all(not isinstance(size, int) or size == given for size, given in zip(one.shape[1:], array.shape[1:], strict=True))
        if not fits or str(array.dtype) != dtype:
            raise CalibrationError(f"`data`: {name!r} is {array.dtype} {list(array.shape)}; it must be {dtype} {shape}.")
        counts.add(len(array))
    count = counts.pop() if len(counts) == 1 else -1
    if count < 1 or count % batch:
        found = ", ".join(f"{name} {len(data[name])}" for name in wanted)
        raise CalibrationError(f"`data` has images: {found}; it must have as many of each input, at least 1, and a multiple of {batch}.")
    return [{name: data[name][place : place + batch] for name in wanted} for place in range(0, count, batch)]


def _losses(floats: Any, quantised: Any, batches: list[dict[str, Array]]) -> tuple[Loss, ...]:
    names = [one.name for one in floats.get_outputs()]
    pairs = [(floats.run(None, one), quantised.run(names, one)) for one in batches]
    losses = []
    for place, name in enumerate(names):
        expected = [np.asarray(one[place]) for one, _ in pairs]
        if expected[0].dtype.kind != "f":
            continue
        found = [np.asarray(other[place]) for _, other in pairs]
        wrong = sum(float(np.square(a.astype(np.float64) - b).sum()) for a, b in zip(expected, found, strict=True))
        whole = sum(float(np.square(a.astype(np.float64)).sum()) for a in expected)
        top = None
        if expected[0].ndim == 2 and expected[0].shape[1] > 1:
            same = [a.argmax(axis=1) == b.argmax(axis=1) for a, b in zip(expected, found, strict=True)]
            top = float(np.concatenate(same).mean())
        losses.append(Loss(name, float(np.sqrt(wrong / whole)) if whole else float(np.sqrt(wrong)), top))
    return tuple(losses)
