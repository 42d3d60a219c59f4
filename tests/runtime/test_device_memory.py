"""Memory that TVM's runtime allocates: on the CPU, which to it is a device like the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tvm_ffi

from im2win.device.gpu import H200
from im2win.registry.backends import backend_for
from im2win.registry.schedules import schedule_of
from im2win.runtime import cuda
from im2win.runtime.device_memory import allocate, overwrite, upload
from im2win.spec.conv2d import Conv2d

CPU = tvm_ffi.device("cpu", 0)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int32"])
def test_values_arrive(dtype: str) -> None:
    values = np.arange(24).reshape(2, 3, 4).astype(dtype)
    made = upload(values, CPU)
    np.testing.assert_array_equal(np.from_dlpack(made), values)
    overwrite(made, values[::-1].copy())
    np.testing.assert_array_equal(np.from_dlpack(made), values[::-1])
    empty = allocate((5, 7), dtype, CPU)
    assert tuple(empty.shape) == (5, 7) and str(empty.dtype) == dtype


def test_a_gpus_layer_without_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters bound anew lie where the old ones were, and the workspace is made once."""
    conv = Conv2d.parse("n1-c32x14x14-k64x3x3-bias-float16")
    row = schedule_of("im2win/stored")
    _, tile = backend_for(H200).ranked(conv, row)[0]
    count = row.on_gpu.workspace_bytes(conv, tile) // conv.itemsize
    manifest = SimpleNamespace(pack=row.on_gpu.pack(conv, tile), made=count)
    op: Any = SimpleNamespace(conv=conv, manifest=manifest, kernels=None)
    monkeypatch.setattr(cuda, "upload", lambda array, _: upload(array, CPU))
    monkeypatch.setattr(cuda, "allocate", lambda shape, dtype, _: allocate(shape, dtype, CPU))
    w = np.random.default_rng(0).integers(-3, 4, conv.filter_shape).astype(np.float16)
    bias = np.arange(64, dtype=np.float16)
    layer, other = cuda.CudaLayer(op, w, bias), cuda.CudaLayer(op, -w, -bias)
    first, second = layer._new_scratch("x"), layer._new_scratch("x")
    assert first is second and tuple(first.shape) == (count,) and str(first.dtype) == "float16"
    filters, biases = map(np.from_dlpack, layer._packed)
    layer.rebind(-w, -bias)
    np.testing.assert_array_equal(filters, np.from_dlpack(other._packed[0]))
    np.testing.assert_array_equal(biases, -bias)
