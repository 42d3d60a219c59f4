"""The suites against their sources: published totals, output sizes and the networks' own construction rules."""

from __future__ import annotations

import pytest

from im2win.spec.conv2d import Conv2d, ConvError
from im2win.spec.suites import SUITES, Layer, suite, suite_names


def total_flops(layers: list[Layer]) -> int:
    return sum(layer.count * layer.conv.flops for layer in layers)


@pytest.mark.parametrize("name", suite_names())
def test_names_and_problems_are_distinct_and_keys_round_trip(name: str) -> None:
    layers = suite(name)
    assert len({layer.name for layer in layers}) == len({layer.conv for layer in layers}) == len(layers)
    assert all(layer.count >= 1 and Conv2d.parse(str(layer.conv)) == layer.conv for layer in layers)
    # A row's text is the canonical key, so that a reader finds it in logs and tables.
    assert [(layer.name, str(layer.conv.with_(batch=1)).removeprefix("n1-")) for layer in layers] == [
        (row[0], row[1].replace("-s1-", "-")) for row in SUITES[name].rows
    ]


def test_default_batch_is_one_except_for_the_papers() -> None:
    defaults = {name: {layer.conv.batch for layer in suite(name)} for name in suite_names()}
    assert defaults.pop("papers12") == {8}
    assert set(map(frozenset, defaults.values())) == {frozenset({1})}


@pytest.mark.parametrize("name", suite_names())
def test_batch_replaces_the_default(name: str) -> None:
    assert [layer.conv for layer in suite(name, batch=2)] == [layer.conv.with_(batch=2) for layer in suite(name)]


def test_papers12_has_the_printed_output_sizes_at_the_papers_batch() -> None:
    printed = [  # thesis table 3-3, column "out"
        *((96, 55, 55), (96, 56, 56), (64, 111, 111), (64, 109, 109), (256, 20, 20), (512, 10, 10)),
        *((64, 222, 222), (128, 110, 110), (64, 54, 54), (128, 26, 26), (256, 12, 12), (512, 5, 5)),
    ]
    layers = suite("papers12", batch=128)
    assert [layer.conv.output_shape for layer in layers] == [(128, *shape) for shape in printed]
    assert [layer.name for layer in layers] == [f"conv{i}" for i in range(1, 13)]


# Multiply-adds of the convolutions alone; the papers' and model cards' figures, which add the classifier, are a little higher.
@pytest.mark.parametrize(
    ("name", "convolutions", "multiply_adds"),
    [("resnet50", 53, 4.087e9), ("vgg16", 13, 15.347e9), ("mobilenet_v2", 52, 0.2995e9)],
)
def test_network_totals(name: str, convolutions: int, multiply_adds: float) -> None:
    layers = suite(name)
    assert sum(layer.count for layer in layers) == convolutions
    assert total_flops(layers) / 2 == pytest.approx(multiply_adds, rel=1e-3)


def test_mobilenet_v2_follows_from_the_bottleneck_table() -> None:
    """arXiv 1801.04381, table 2: expansion t, channels c, repeats n, stride s of the first repeat."""
    table = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
    act = {"bias": True, "activation": "relu6"}
    convs = [Conv2d(1, 3, 224, 224, 32, 3, stride=2, padding=1, **act)]
    channels, size = 32, 112
    for expansion, out, repeats, first_stride in table:
        for stride in (first_stride, *[1] * (repeats - 1)):
            wide = channels * expansion
            convs += [Conv2d(1, channels, size, size, wide, 1, **act)] if expansion > 1 else []
            convs.append(Conv2d(1, wide, size, size, wide, 3, stride=stride, padding=1, groups=wide, **act))
            size //= stride
            convs.append(Conv2d(1, wide, size, size, out, 1, bias=True))
            channels = out
    convs.append(Conv2d(1, channels, size, size, 1280, 1, **act))
    assert [(layer.conv, layer.count) for layer in suite("mobilenet_v2")] == [(c, convs.count(c)) for c in dict.fromkeys(convs)]


def test_winograd64_sweeps_the_map_at_64_channels() -> None:
    convs = [layer.conv for layer in suite("winograd64")]
    assert [conv.height for conv in convs] == [224, 256, 320, 384, 448, 512, 640, 768, 896, 960]
    assert convs == [Conv2d(1, 64, c.height, c.height, 64, 3, padding=1) for c in convs]
    assert convs[0].output_size == (224, 224)


def test_sliding_crosses_seven_sizes_with_three_strides() -> None:
    expected = [Conv2d(1, 3, 2**e, 2**e, 3, 3, stride=s, padding=1) for e in range(7, 14) for s in (1, 2, 3)]
    assert [layer.conv for layer in suite("sliding")] == expected


def test_unknown_name_lists_the_known_ones() -> None:
    known = "papers12, resnet50, vgg16, mobilenet_v2, winograd64, sliding"
    with pytest.raises(ValueError, match=rf"`name` \(='resnet'\) must be one of {known}\."):
        suite("resnet")


@pytest.mark.parametrize(("batch", "rule"), [(0, "at least 1"), (1.5, "an integer"), (True, "an integer")])
def test_bad_batch_is_named(batch: object, rule: str) -> None:
    with pytest.raises(ConvError, match=rf"`batch` \(={batch!r}\) must be {rule}"):
        suite("vgg16", batch=batch)  # type: ignore[arg-type]
