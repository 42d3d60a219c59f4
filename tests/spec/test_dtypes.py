"""Every row of the table of element types against numpy, PyTorch, ONNX and DLPack, and what multiplies them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm_ffi

from im2win.export.c_abi.header import Interface
from im2win.schedules.cuda.arithmetic import KINDS, MULTIPLIERS, NATIVE, PRODUCTS, WARPGROUP_ONLY
from im2win.spec.conv2d import Conv2d
from im2win.spec.dtypes import DTYPES, ELEMENT_TYPES, EXCHANGED, ElementType

ROWS = pytest.mark.parametrize("row", ELEMENT_TYPES.values(), ids=lambda row: row.name)


@ROWS
def test_numpys_facts(row: ElementType) -> None:
    kind = np.dtype(row.name)
    assert row.itemsize == kind.itemsize and row.integer == (kind.kind in "iu")
    if row.integer:
        assert row.limits == (np.iinfo(kind).min, np.iinfo(kind).max) and row.epsilon == 0
    else:
        assert row.epsilon == ml_dtypes.finfo(kind).eps
    assert tvm_ffi.dtype(row.name).type_code == row.dlpack
    assert ELEMENT_TYPES[row.sums].integer == row.integer
    for value in row.poisons:
        assert np.isnan(value) or np.array(value).astype(kind) == value
    assert row.largest in (0, float(ml_dtypes.finfo(kind).max) if not row.integer else 0)
    assert not row.storage or np.dtype(row.storage).itemsize == row.itemsize
    twin = ELEMENT_TYPES.get(row.twin)
    assert not row.twin or (twin is not None and twin.itemsize == row.itemsize and row.name in MULTIPLIERS and row.twin in MULTIPLIERS)


@ROWS
def test_problems(row: ElementType) -> None:
    if not row.outputs:
        assert row.name not in DTYPES
        return
    conv = Conv2d(1, 4, 8, 8, 4, 3, dtype=row.name, bias=True)
    assert conv.itemsize == row.itemsize and conv.out_dtype == row.outputs[0] and conv.requantised == row.scaled
    assert conv.dtypes["bias"] == (row.sums if row.scaled else row.outputs[0])
    header = Interface(conv, "layer", "by hand", 1, 0).header()
    assert f"const {row.c} *" in header or f"const {row.c}*" in header


@pytest.mark.parametrize("name", EXCHANGED)
def test_frameworks(name: str) -> None:
    torch, onnx = pytest.importorskip("torch"), pytest.importorskip("onnx")
    row = ELEMENT_TYPES[name]
    assert getattr(torch, name).itemsize == row.itemsize
    kind = onnx.TensorProto.DataType.Value(row.onnx)
    assert onnx.helper.tensor_dtype_to_np_dtype(kind) == np.dtype(name)


def test_multipliers() -> None:
    on_gpus = {name for name in DTYPES if not ELEMENT_TYPES[name].filters}
    assert set(MULTIPLIERS) == on_gpus == {*NATIVE, *WARPGROUP_ONLY, "float32"}, "tensor cores multiply every type of problems but uint8"
    for kind, row in KINDS.items():
        assert PRODUCTS[f"wg_{kind}"].dtype == row.dtype and (kind in PRODUCTS) == row.warps
        assert not row.warps or PRODUCTS[kind].dtype == row.dtype
        assert row.sum_type == {"float32": "float", "int32": "int"}[ELEMENT_TYPES[row.dtype].sums]
        assert row.depth * ELEMENT_TYPES[row.dtype].itemsize == 32, "an instruction takes 32 bytes of each operand"
