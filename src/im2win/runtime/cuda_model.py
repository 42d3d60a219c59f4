"""Runs compiled models on a GPU, on PyTorch's current stream."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from im2win.runtime.cuda import keep_device
from im2win.runtime.libraries import cuda_runtime_library
from im2win.runtime.model import ALIGNMENT, Bound, Model, Pieces
from im2win.runtime.model_manifest import Bucket, ModelManifest
from im2win.runtime.tensors import ArgumentError, is_torch


class CudaModel(Model):
    """A `Model` for CUDA tensors of PyTorch. A call does not wait for its kernels. The first call on a device copies the weights to it."""

    def __init__(self, manifest: ModelManifest, library: Path, weights: Path) -> None:
        cuda_runtime_library()
        super().__init__(manifest, library, weights)
        self._resident: dict[int, Any] = {}

    def _held(self, path: Path) -> Any:
        """None: the weights are read when a device first needs them."""
        return None

    def _on(self, device: int) -> Any:
        """The weights on a device, copied there by the first call."""
        import torch

        if device not in self._resident:
            content = np.fromfile(self._weights_file, np.uint8) if self.manifest.weights_bytes else np.zeros(1, np.uint8)
            self._resident[device] = torch.from_numpy(content).to(f"cuda:{device}")
        return self._resident[device]

    def __call__(self, *inputs: Any, out: Any = None) -> Any:
        """The model's outputs for inputs in the model's order. All tensors are CUDA tensors of PyTorch on one device; see `Model`."""
        return self.bind(*inputs, out=out)()

    def bind(self, *inputs: Any, out: Any = None) -> Bound:
        """The model with its inputs and outputs fixed, for any number of images; see `Model.bind`."""
        import torch

        self._counted(inputs)
        given = self._given(out)
        for port, value in zip(self.inputs, inputs, strict=True):
            _check(port.name, value)
        shapes = {port.name: tuple(value.shape) for port, value in zip(self.inputs, inputs, strict=True)}
        images = self._images(shapes)
        pieces = self._pieces(images)
        device = int(inputs[0].device.index) if inputs else torch.cuda.current_device()
        results = list(given) or [
            torch.empty(port.at(images), dtype=getattr(torch, port.dtype), device=f"cuda:{device}") for port in self.outputs
        ]
        for port, value in zip((*self.inputs, *self.outputs), (*inputs, *results), strict=True):
            _check(port.name, value, port.at(images), port.dtype, device)
        made = out if out is not None else results[0] if len(results) == 1 else tuple(results)
        return Bound(self._in_pieces, (pieces, list(inputs), results, device), None, made)

    def _in_pieces(self, pieces: Pieces, inputs: Sequence[Any], results: Sequence[Any], device: int) -> None:
        """Runs the images in pieces, each by the function of a compiled batch."""
        import torch

        begin = 0
        for bucket, count in pieces:
            taken = [_part(value, port.batched, begin, count, bucket) for port, value in zip(self.inputs, inputs, strict=True)]
            wanted = [value[begin : begin + count] if port.batched else value for port, value in zip(self.outputs, results, strict=True)]
            made = [
                value if count == bucket.batch and value.data_ptr() % ALIGNMENT == 0 else value.new_empty(port.at(bucket.batch))
                for port, value in zip(self.outputs, wanted, strict=True)
            ]
            workspace = torch.empty(max(bucket.workspace, 1), dtype=torch.uint8, device=f"cuda:{device}")
            with keep_device(device):
                self._functions[bucket.batch](self._on(device), workspace, *taken, *made)
            for value, part in zip(wanted, made, strict=True):
                if value is not part:
                    value.copy_(part[:count] if part.shape != value.shape else part)
            begin += count


def _part(value: Any, batched: bool, begin: int, count: int, bucket: Bucket) -> Any:
    """Images `begin` to `begin + count` of an input, aligned, and padded with zeros to the batch of the function."""
    part = value[begin : begin + count] if batched else value
    if not batched or count == bucket.batch:
        return part if part.data_ptr() % ALIGNMENT == 0 else part.clone()
    padded = value.new_zeros((bucket.batch, *value.shape[1:]))
    padded[:count] = part
    return padded


def _check(name: str, value: Any, shape: tuple[int, ...] | None = None, dtype: str = "", device: int | None = None) -> None:
    if not is_torch(value) or not value.is_cuda:
        where = value.device if is_torch(value) else type(value).__name__
        raise ArgumentError(f"`{name}` ({where}) must be a CUDA tensor of PyTorch; this model was compiled for a GPU.")
    if value.requires_grad:
        raise ArgumentError(f"`{name}` requires grad and kernels record no gradients: pass {name}.detach().")
    if not value.is_contiguous():
        raise ArgumentError(f"`{name}` is not contiguous; pass a contiguous copy.")
    if shape is None:
        return
    found = str(value.dtype).removeprefix("torch."), tuple(value.shape), value.device.index
    for what, ours, wanted in zip(("dtype", "shape", "device"), found, (dtype, shape, device), strict=True):
        if ours != wanted:
            raise ArgumentError(f"`{name}` has {what} {ours}; it must be {wanted}.")
