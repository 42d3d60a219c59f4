"""Records: every field is held to its rule, a line gives its record back, and a record that no longer applies says why."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from im2win.records.checksum import checksum
from im2win.records.record import OUTCOMES, Record, RecordError, utc_now
from im2win.spec.conv2d import Conv2d

GOOD: dict[str, Any] = {
    "schema": 5,
    "conv": "n1-c64x56x56-k64x3x3-p1",
    "algorithm": "im2win",
    "schedule": "stored",
    "tile": {"rows": 4, "lanes": 16, "order": "nhw", "unroll": True},
    "outcome": "ok",
    "message": "",
    "samples_s": [0.002, 0.001, 0.004],
    "error": 1e-7,
    "tolerance": 1e-5,
    "extra_bytes": 4096,
    "device": "intel-xeon-rocketlake-2t",
    "threads": 2,
    "target": "cpu",
    "tvm": "0.27.0",
    "im2win": "0.1.0",
    "fingerprint": "3fa9c1",
    "generator": "77aa01",
    "rivals": "float32:88bb02",
    "seed": 0,
    "trial": 7,
    "date": "2026-01-31T12:00:00+00:00",
}


def good(**changes: Any) -> Record:
    return Record(**{**GOOD, **changes})


def failed(**changes: Any) -> Record:
    return good(**{"outcome": "wrong", "samples_s": [], "message": "off by 3", **changes})


def line(**changes: Any) -> str:
    values = {**GOOD, **changes}
    return json.dumps({**values, "checksum": checksum(values)})


def test_a_line_is_one_readable_line_with_the_fields_in_order() -> None:
    text = good(message="two\nlines, \u2028 and ü").to_line()
    assert text.isascii() and len(text.splitlines()) == 1
    assert list(json.loads(text)) == [*GOOD, "checksum"] == [*(field.name for field in dataclasses.fields(Record)), "checksum"]
    assert text.startswith('{"schema": 5, "conv": "n1-c64x56x56-k64x3x3-p1", "algorithm": "im2win", "schedule": "stored", "tile": {')


UNKNOWN = {"error": None, "tolerance": None, "extra_bytes": None}


@pytest.mark.parametrize("record", [good(), good(tile={}, **UNKNOWN), failed(), failed(outcome="timeout", **UNKNOWN)])
def test_round_trip(record: Record) -> None:
    assert Record.from_line(record.to_line()) == Record.from_line(record.to_line() + "\n") == record
    assert pickle.loads(pickle.dumps(record)) == record
    assert hash(Record.from_line(record.to_line())) == hash(record)


def test_median_speed_and_layer() -> None:
    record = good()
    assert record.seconds == 0.002
    assert record.conv2d == Conv2d(1, 64, 56, 56, 64, 3, padding=1)
    assert record.gflops == pytest.approx(2 * 64 * 56 * 56 * 64 * 9 / 0.002 / 1e9)
    assert good(samples_s=[1.0, 2.0]).seconds == 1.5
    assert failed().seconds is None and failed().gflops is None


def test_memory_has_a_price() -> None:
    """Another twentieth of the layer's tensors must bring 1.5 %, and no workspace costs more than 3 % (im2win.spec.objective)."""
    tensors = good().conv2d.bytes_moved
    assert good(extra_bytes=0).cost == good(extra_bytes=None).cost == 0.002
    assert good(extra_bytes=tensors // 20).cost == pytest.approx(0.00203, rel=1e-4)
    assert good(extra_bytes=tensors // 10).cost == pytest.approx(good(extra_bytes=5 * tensors).cost, rel=1e-4) == pytest.approx(0.00206)
    lean, large = good(samples_s=[1.02], extra_bytes=0), good(samples_s=[1.0], extra_bytes=tensors // 10)
    assert lean.cost < large.cost < good(samples_s=[1.04], extra_bytes=0).cost
    assert failed().cost == math.inf


def test_defaults_are_those_of_a_candidate_that_was_not_timed() -> None:
    needed = ("conv", "algorithm", "schedule", "tile", "device", "threads", "target", "tvm", "im2win", "fingerprint", "seed", "trial")
    record = Record(outcome="illegal", **{name: GOOD[name] for name in needed})
    assert (record.schema, record.message, record.samples_s) == (5, "", ())
    assert record.error is record.tolerance is record.extra_bytes is None
    assert record.date <= utc_now()


def test_numbers_of_numpy_become_plain() -> None:
    np = pytest.importorskip("numpy")
    record = good(samples_s=np.array([1, 2], "float32"), trial=np.int64(3), error=np.float32(0), tile={"rows": np.int32(4)})
    assert record == good(samples_s=[1.0, 2.0], trial=3, error=0.0, tile={"rows": 4})
    assert [type(value) for value in (record.trial, record.error, record.tile["rows"], record.samples_s[0])] == [int, float, int, float]


def test_the_tile_is_a_copy() -> None:
    tile = {"rows": 4}
    record = good(tile=tile)
    tile["rows"] = 5
    assert record.tile == {"rows": 4}


@pytest.mark.parametrize("error", [float("nan"), float("inf")])
def test_an_error_that_is_no_number_never_passes_for_ok(error: float) -> None:
    assert failed(error=error).error is None
    with pytest.raises(RecordError, match=re.escape(f"`error` (={error}) must be a finite number of at least 0, or null.")):
        good(error=error)


RULES = {
    "schema": ([6, 0, "5", True, None, 5.5], "5, the only schema this version reads"),
    "conv": ([3, None], "a string, the key of a Conv2d"),
    "algorithm": (["", 1, None], "a string that is not empty"),
    "schedule": (["", 1, None], "a string that is not empty"),
    "tile": ([[], None, "rows", {"rows": 1.5}, {"rows": None}, {"rows": [1]}, {"": 1}, {"rows": 2**64}], "an object whose values are"),
    "outcome": (["fine", "OK", None, 1, []], "one of ok, wrong, build_error, crashed, timeout, illegal"),
    "message": ([None, 1], "a string"),
    "samples_s": (
        [
            [float("nan")], [float("inf")], [-1e-3], [0.0], [1e-12], [1e-3, 9e-10], [1e-3, "x"], [True], [None], None, "0.1", 0.1,
            {"0.1": 1}, [10**400],
        ],
        "a list of finite seconds of at least 1e-09",
    ),
    "error": ([float("nan"), float("inf"), -1e-9, "0", True, 10**400], "a finite number of at least 0, or null"),
    "tolerance": ([float("nan"), -1.0, "0"], "a finite number of at least 0, or null"),
    "extra_bytes": ([-1, 1.5, "0", True], "an integer of at least 0, or null"),
    "device": (["", "../up", ".hidden", "a/b", "a b", "-x", None], "a device's slug"),
    "threads": ([0, -1, 2.0, "2", True, None], "an integer of at least 1"),
    "target": (["", None], "a string that is not empty"),
    "tvm": (["", 0.27], "a string that is not empty"),
    "im2win": (["", None], "a string that is not empty"),
    "fingerprint": (["", 7], "a string that is not empty"),
    "generator": ([7, None], "a string"),
    "rivals": ([7, None], "a string"),
    "seed": ([None, "0", 0.5, True, 2**63], "an integer"),
    "trial": ([-1, None, True], "an integer of at least 0"),
    "date": (
        ["", "yesterday", "2026-01-31", "2026-13-01T00:00:00Z", "2026-01-31T12:00:00", "2026-01-31T12:00:00+02:00", 5],
        "a date and time in UTC",
    ),
}


def test_every_field_has_its_rule_tested() -> None:
    assert list(RULES) == list(GOOD)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, (values, _) in RULES.items() for value in values])
def test_each_field_is_held_to_its_rule_in_a_line_and_in_the_constructor(name: str, value: object) -> None:
    message = re.compile(rf"^`{name}` \(=.*\) must be {re.escape(RULES[name][1])}", re.DOTALL)
    with pytest.raises(RecordError, match=message):
        Record.from_line(line(**{name: value}))
    with pytest.raises(RecordError, match=message):
        good(**{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples_s": []}, '`samples_s` (=()) must be a list of at least one time, as `outcome` (="ok") says.'),
        ({"outcome": "wrong"}, "`samples_s` (=(0.002, 0.001, 0.004)) must be empty, as `outcome` (='wrong') is not ok."),
        ({"error": 1.1e-5}, "`error` (=1.1e-05) must be at most `tolerance` (=1e-05)"),
        ({"error": 1e-3}, '`error` (=0.001) must be at most `tolerance` (=1e-05), as `outcome` (="ok") says.'),
        ({"conv": "resnet"}, "`conv` (='resnet') must be the key of a valid Conv2d: Conv2d.parse: key 'resnet' must look like n8-"),
        ({"conv": "n1-c1x2x2-k1x3x3"}, "must be the key of a valid Conv2d: Conv2d: the window of `kernel` (=3)"),
        ({"conv": "n1-c3x8x8-k4x3x3-g2"}, "must be the key of a valid Conv2d: Conv2d: `groups` (=2) must divide `in_channels` (=3)."),
        ({"conv": "n1-c1x2x2-k1x1x1-s1"}, "the key of a valid Conv2d: key 'n1-c1x2x2-k1x1x1-s1' must be written 'n1-c1x2x2-k1x1x1'."),
        ({"conv": "n1-c1x2x2-k1x1x1-relu-bias"}, "must be written 'n1-c1x2x2-k1x1x1-bias-relu'."),
        ({"conv": f"n{'9' * 5000}-c1x2x2-k1x1x1"}, "must be the key of a valid Conv2d"),
        ({"speed": 3}, "`speed` (=3) must be one of schema, conv, algorithm,"),
    ],
)
def test_rules_between_fields(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=re.escape(message)):
        Record.from_line(line(**changes))


@pytest.mark.parametrize("name", GOOD)
def test_a_missing_field_is_named(name: str) -> None:
    fields = {key: value for key, value in GOOD.items() if key != name}
    with pytest.raises(RecordError, match=f"^`{name}` is missing; a line must hold all of schema, conv"):
        Record.from_line(json.dumps(fields))


def test_another_schema_is_named_before_its_other_fields() -> None:
    with pytest.raises(RecordError, match=r"`schema` \(=6\) must be 5, the only schema this version reads"):
        Record.from_line('{"schema": 6, "layer": "conv1"}')


@pytest.mark.parametrize("text", ["", "{", line()[:-9], line() + line(), "nonsense", "[" * 100_000, "1" * 5000, "\x00"])
def test_a_line_that_is_not_json(text: str) -> None:
    with pytest.raises(RecordError, match=r"^the line \(=.*\) must be JSON: ") as caught:
        Record.from_line(text)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("text", ["3", "null", '"ok"', "[1, 2]", "NaN"])
def test_a_line_that_is_not_an_object(text: str) -> None:
    with pytest.raises(RecordError, match=r"^the line \(=.*\) must be a JSON object\.$"):
        Record.from_line(text)


def test_a_record_of_the_first_schema_is_read() -> None:
    """It comes as a record whose kernel nothing is known of."""
    old = {name: value for name, value in GOOD.items() if name not in ("generator", "rivals", "schedule")} | {"schema": 1}
    for name, algorithm, schedule in (("im2win", "im2win", "stored"), ("direct_streamed", "direct", "warp_specialized")):
        read = Record.from_line(json.dumps({**old, "algorithm": name}))
        assert read == good(algorithm=algorithm, schedule=schedule, generator="", rivals="") and read.method == f"{algorithm}/{schedule}"
    with pytest.raises(RecordError, match="`tile` is missing"):
        Record.from_line(json.dumps({name: value for name, value in old.items() if name != "tile"}))


def test_a_record_of_the_second_schema_is_read() -> None:
    """Its tile under the names of before."""
    old = {"strip": 2, "turns": 2, "shared": "sums", "boxes": "patches", "rows": 7}
    new = {"row_block": 2, "pingpong": 2, "shared": "accumulators", "tma_boxes": "halo", "rows": 7}
    for schema, generator in ((1, ""), (2, GOOD["generator"])):
        values = {**GOOD, "schema": schema, "tile": old, **({"algorithm": "im2win"} if schema == 1 else {})}
        assert Record.from_line(json.dumps(values)) == good(tile=new, generator=generator, rivals="")
    with pytest.raises(RecordError, match="`tile` "):
        Record.from_line(json.dumps({**GOOD, "schema": 2, "tile": [1]}))


def test_a_record_of_the_third_schema_is_read() -> None:
    """Nothing is known of the default tile that it was measured beside."""
    old = {name: value for name, value in GOOD.items() if name != "rivals"} | {"schema": 3}
    assert Record.from_line(json.dumps(old)) == good(rivals="")
    with pytest.raises(RecordError, match="`rivals` is missing"):
        Record.from_line(json.dumps({**old, "schema": 4}))
    with pytest.raises(RecordError, match=r"`rivals` \(=3\) must be a string"):
        good(rivals=3)


def test_a_record_of_the_fourth_schema_is_read_without_a_checksum() -> None:
    assert Record.from_line(json.dumps({**GOOD, "schema": 4})) == good()
    with pytest.raises(RecordError, match=r"`checksum` \(='0'\) must be one of schema"):
        Record.from_line(json.dumps({**GOOD, "schema": 4, "checksum": "0"}))


# --- checksums -----------------------------------------------------------------------------------------------------


EDITS: dict[str, Any] = {
    "conv": "n2-c64x56x56-k64x3x3-p1", "algorithm": "mec", "schedule": "tiled", "tile": {"rows": 8}, "samples_s": [1e-6], "error": 0.0,
    "tolerance": 1.0, "extra_bytes": 0, "device": "elsewhere", "threads": 3, "target": "cuda", "tvm": "0.28.0", "im2win": "0.2.0",
    "fingerprint": "0", "generator": "", "rivals": "float32:88bb02:default", "seed": 1, "trial": 8, "date": "2026-02-01T12:00:00+00:00",
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_a_line_whose_field_was_edited_is_refused(name: str) -> None:
    text = json.dumps({**json.loads(good().to_line()), name: EDITS[name]})
    with pytest.raises(RecordError, match=r"^`checksum` \(='[0-9a-f]{16}'\) must be '[0-9a-f]{16}', the checksum of the line: something"):
        Record.from_line(text)


def test_a_line_without_its_checksum_is_refused() -> None:
    with pytest.raises(RecordError, match=r"^`checksum` is missing; it must be '[0-9a-f]{16}', the checksum of the line: something"):
        Record.from_line(json.dumps(GOOD))
    for wrong in (None, 3, "", [], {"a": 1}, "0" * 16):
        with pytest.raises(RecordError, match="`checksum` "):
            Record.from_line(json.dumps({**GOOD, "checksum": wrong}))


def test_order_and_spaces_do_not_count() -> None:
    values = json.loads(good().to_line())
    assert Record.from_line(json.dumps(dict(reversed(values.items())), indent=2)) == good()
    assert len(checksum(GOOD)) == 16 == len(values["checksum"]) and checksum(values) == checksum(GOOD)


def test_a_rule_is_named_before_the_checksum() -> None:
    with pytest.raises(RecordError, match=r"`samples_s` \(=\(1e-12,\)\) must be a list of finite seconds of at least 1e-09"):
        Record.from_line(good().to_line().replace("[0.002, 0.001, 0.004]", "[1e-12]"))


@pytest.mark.fault("records", "a record is nested too deeply")
@pytest.mark.parametrize("depth", [100, 900, 2000])
def test_deep_values_are_refused(depth: int) -> None:
    nested = "[" * depth + "]" * depth
    with pytest.raises(RecordError):
        Record.from_line(good().to_line().replace('"rows": 4', f'"rows": {nested}'))


WORDS = st.text(min_size=1, max_size=20)
INTEGERS = st.integers(-(2**63) + 1, 2**63 - 1)
MEASURES = st.none() | st.floats(0, allow_nan=False, allow_infinity=False)
SIZES = st.integers(1, 64)
LAYERS = st.builds(
    lambda n, c, h, w, k, r, s, padding, groups, **options: Conv2d(
        n, c * groups, h + r, w + s, k * groups, (r, s), padding=padding, groups=groups, **options
    ),
    SIZES, SIZES, SIZES, SIZES, SIZES, st.integers(1, 5), st.integers(1, 5),
    padding=st.tuples(*[st.integers(0, 3)] * 4),
    groups=st.integers(1, 4),
    dtype=st.sampled_from(["float32", "float16", "int8"]),
    layout=st.sampled_from(["NCHW", "NHWC"]),
    bias=st.booleans(),
    activation=st.sampled_from([None, "relu", "silu"]),
)  # fmt: skip


@st.composite
def records(draw: st.DrawFn) -> Record:
    outcome = draw(st.sampled_from(OUTCOMES))
    error, tolerance = draw(MEASURES), draw(MEASURES)
    if outcome == "ok" and error is not None and tolerance is not None:
        error, tolerance = sorted((error, tolerance))
    seconds = st.floats(1e-9, allow_nan=False, allow_infinity=False)
    return Record(
        conv=str(draw(LAYERS)),
        algorithm=draw(WORDS),
        schedule=draw(WORDS),
        tile=draw(st.dictionaries(WORDS, INTEGERS | st.text(max_size=9) | st.booleans(), max_size=5)),
        outcome=outcome,
        message=draw(st.text()),
        samples_s=draw(st.lists(seconds, min_size=1, max_size=5)) if outcome == "ok" else [],
        error=error,
        tolerance=tolerance,
        extra_bytes=draw(st.none() | st.integers(0, 2**40)),
        device=draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)),
        threads=draw(st.integers(1, 256)),
        target=draw(WORDS),
        tvm=draw(WORDS),
        im2win=draw(WORDS),
        fingerprint=draw(WORDS),
        seed=draw(INTEGERS),
        trial=draw(st.integers(0, 2**31)),
        date=draw(st.datetimes()).isoformat() + "+00:00",
    )


@given(records())
def test_any_record_comes_back_from_its_line(record: Record) -> None:
    text = record.to_line()
    assert len(text.splitlines()) == 1
    back = Record.from_line(text)
    assert back == record
    assert repr(back) == repr(record)  # types too: True is not 1


@given(st.text() | st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists).map(json.dumps))
def test_any_other_text_is_refused_by_record_error_alone(text: str) -> None:
    with pytest.raises(RecordError):
        Record.from_line(text)


@given(st.sampled_from(list(GOOD)), st.none() | st.booleans() | INTEGERS | st.floats() | st.text() | st.lists(st.text()) | st.just({}))
def test_any_value_in_a_field_gives_a_record_or_record_error(name: str, value: object) -> None:
    try:
        record = Record.from_line(line(**{name: value}))
    except RecordError as error:
        assert f"`{name}`" in str(error) or "`samples_s`" in str(error)
    else:
        assert Record.from_line(record.to_line()) == record
