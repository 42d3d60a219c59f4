"""The summary of a layer against numbers worked out by hand."""

from __future__ import annotations

import json

import pytest

from im2win.registry.schedules import SCHEDULES, schedule_of
from im2win.reports.summary import summary_rows
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import Layer, suite


def test_row_by_hand() -> None:
    """The thesis' worked example (fig. 2-5): 3x3x3 input, 2x2 filter: im2col holds 48 elements, im2win 36."""
    [row] = summary_rows([Layer("example", Conv2d(1, 3, 3, 3, 2, 2), 5)])
    sizes = row.pop("algorithms")
    assert (sizes["direct/tiled"], sizes["im2col/tiled"], sizes["im2win/stored"]) == (0, 4 * 48, 4 * 36)
    assert row == {
        "name": "example",
        "key": "n1-c3x3x3-k2x2x2",
        "count": 5,
        "flops": 2 * (2 * 2 * 2) * 12,  # of 8 outputs, 12 products each; once, whatever the count
        "bytes_moved": 4 * (27 + 24 + 8),
        "flops_per_byte": pytest.approx(192 / 236),
    }


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_every_algorithm_has_its_bytes_or_its_reason(dtype: str) -> None:
    conv = suite("mobilenet_v2")[1].conv.with_(dtype=dtype)
    [row] = summary_rows([Layer("depthwise", conv)])
    assert list(row["algorithms"]) == list(SCHEDULES)
    for name, value in row["algorithms"].items():
        reason = schedule_of(name).supports(conv)
        assert value == (schedule_of(name).transform_bytes(conv) if reason is None else reason)
        assert type(value) is (int if reason is None else str)


def test_rows_are_plain_values_in_the_layers_order() -> None:
    layers = suite("papers12")
    rows = summary_rows(layers)
    assert [row["name"] for row in rows] == [layer.name for layer in layers]
    assert json.loads(json.dumps(rows)) == rows
