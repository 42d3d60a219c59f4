"""The Conv2d data sets that ship in the onnx wheel, through our operators: attributes, weights, inputs and outputs are the files'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ops import default, supported
from oracle import assert_close

from im2win.frontends.onnx.layers import layers_of
from im2win.numerics.tolerance import tolerance
from im2win.spec.conv2d import Conv2d

onnx = pytest.importorskip("onnx")

DATA = Path(onnx.__file__).parent / "backend/test/data/pytorch-converted"
SETS = sorted(path.name for path in DATA.glob("test_Conv2d*"))


def test_all_data_sets_are_there() -> None:
    assert len(SETS) == 11


def tensor(path: Path) -> np.ndarray:
    message = onnx.TensorProto()
    message.ParseFromString(path.read_bytes())
    return np.asarray(onnx.numpy_helper.to_array(message))


def problem(name: str) -> tuple[Conv2d, list[np.ndarray], np.ndarray]:
    """A data set's convolution, its tensors (input, filters and, if it has one, bias), and the output they give."""
    model = onnx.load(DATA / name / "model.onnx")
    [node] = model.graph.node
    attributes = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
    weights = {item.name: onnx.numpy_helper.to_array(item) for item in model.graph.initializer}
    x, expected = (tensor(DATA / name / "test_data_set_0" / file) for file in ("input_0.pb", "output_0.pb"))
    w, *bias = (weights[label] for label in node.input[1:])
    conv = Conv2d(
        *x.shape,
        w.shape[0],
        attributes["kernel_shape"],
        attributes["strides"],
        attributes["pads"],
        attributes["dilations"],
        attributes["group"],
        bias=bool(bias),
    )
    return conv, [x, w, *bias], expected


@pytest.mark.parametrize(("name", "algorithm"), [(name, algorithm) for name in SETS for algorithm in supported(problem(name)[0])])
def test_data_set(name: str, algorithm: str) -> None:
    conv, tensors, expected = problem(name)
    assert_close(conv, default(conv, algorithm)(*tensors), expected, tolerance(conv))
    # What reads whole models finds the same problem in the graph.
    [layer] = layers_of(DATA / name / "model.onnx", epilogues=True)
    assert layer.conv == conv
