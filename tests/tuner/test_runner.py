"""The process that measures on a CPU: a kernel is checked before it is timed, and timed beside others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sessions import SMALL

from im2win.numerics.reference import error, reference
from im2win.numerics.tolerance import tolerance
from im2win.runtime.tensors import torch_tensor, torch_values
from im2win.spec.conv2d import Conv2d
from im2win.tuner.runners import check
from im2win.tuner.runners.cpu import FEWEST, Bench, Measurer, Outcome, RunJob
from im2win.tuner.runners.tensors import unit_tensors

REQUANTISED = Conv2d(2, 6, 7, 7, 8, 3, padding=1, dtype="uint8", out_dtype="uint8", zero_point=128, out_zero_point=4, bias=True)
"""Outputs are the same for some hundred sums in turn, where scales are those of `typed_tensors`."""


def bench_of(device: str, conv: Conv2d, **how: Any) -> Any:
    """A bench of a CPU's runner, or of a GPU's on PyTorch's CPU tensors."""
    if device == "cpu":
        return Bench(conv, 3, **how)
    pytest.importorskip("torch")
    from im2win.tuner.runners import cuda

    class Here(cuda.Bench):
        device = "cpu"

        def wait(self) -> None:
            """Nothing runs elsewhere."""

    return Here(conv, 3, **how)


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def bench(request: pytest.FixtureRequest) -> Any:
    return bench_of(request.param, SMALL.with_(residual=True))


def values(bench: Any, array: Any) -> Any:
    """What a kernel that computes `array` would store: values of the output's type, of the bench's kind of array."""
    return array.astype(bench.output.dtype) if isinstance(array, np.ndarray) else array.to(bench.output.dtype)


def verify(bench: Any, kernel: Any) -> tuple[str, float | None]:
    return check.verify(bench, kernel, tolerance(bench.conv))


def _writes(bench: Any, array: Any) -> Any:
    def kernel() -> None:
        bench.output[...] = values(bench, array)

    return kernel


def test_the_right_answer_passes(bench: Any) -> None:
    message, error = verify(bench, _writes(bench, bench.expected))
    assert message == "" and error is not None and error <= 1e-7


@pytest.mark.fault("candidates", "a candidate's outputs are wrong")
def test_a_wrong_answer_fails(bench: Any) -> None:
    wrong = check.copied(bench.expected)
    wrong[0, 0, 0, 0] += 10 * tolerance(bench.conv) * float(abs(bench.expected).max())
    assert "exceeds" in verify(bench, _writes(bench, wrong))[0]


@pytest.mark.fault("candidates", "a candidate leaves outputs unwritten")
def test_what_was_not_written_fails(bench: Any) -> None:
    def lazy() -> None:
        bench.output[0, 1:] = values(bench, bench.expected[0, 1:])

    assert "64 elements of 1024 are NaN" in verify(bench, lazy)[0]


@pytest.mark.fault("candidates", "a candidate writes out of bounds")
@pytest.mark.parametrize("name", ["output", "data", "filter", "residual"])
@pytest.mark.parametrize(("zone", "place"), [(0, -1), (1, 0), (0, 0), (1, -1)])
@pytest.mark.parametrize("value", [np.nan, 0.0])
def test_writing_outside_fails(bench: Any, name: str, zone: int, place: int, value: float) -> None:
    """Beside any tensor, and also what one of the zones holds already."""
    def careless() -> None:
        bench.output[...] = values(bench, bench.expected)
        bench.buffers[name].zones[zone][place] = value

    assert verify(bench, careless)[0] == f"wrote outside its {name}"
    assert verify(bench, _writes(bench, bench.expected))[0] == "", "the guard is whole again"


@pytest.mark.fault("candidates", "a candidate writes into its input")
@pytest.mark.parametrize("name", ["data", "filter", "residual"])
def test_writing_into_an_input_fails(bench: Any, name: str) -> None:
    def greedy() -> None:
        bench.output[...] = values(bench, bench.expected)
        bench.inputs[name][0, 0, 0, 0] += 1

    assert verify(bench, greedy)[0] == f"wrote into its input {name}"
    assert verify(bench, _writes(bench, bench.expected))[0] == ""


@pytest.mark.fault("candidates", "a candidate reads beside a tensor")
@pytest.mark.parametrize("name", ["data", "filter", "residual"])
@pytest.mark.parametrize(("zone", "place"), [(0, -1), (1, 0), (0, -40), (1, 40)])
@pytest.mark.parametrize("swallows", [None, np.fmax, np.fmin], ids=["sum", "fmax", "fmin"])
def test_reading_beside_a_tensor_fails(bench: Any, name: str, zone: int, place: int, swallows: Any) -> None:
    """Even if an activation hides NaN, or the large number, and if the read changes one output by less than the tolerance."""
    def curious() -> None:
        bench.output[...] = values(bench, bench.expected)
        read = float(bench.buffers[name].zones[zone][place])
        read = read if swallows is None else float(swallows(np.clip(read, -1, 1), 0.0))
        bench.output[0, 0, 0, 0] += read * 1e-6 * float(abs(bench.expected).max())

    assert verify(bench, curious)[0] != "" or swallows is np.fmin  # fmin hides both: neither shows in any output


@pytest.mark.fault("candidates", "a candidate leaves the right outputs of a run before")
def test_right_values_that_a_run_before_left_do_not_help(bench: Any) -> None:
    """A kernel that keeps some outputs of its first run and never computes them again."""
    kept: list[Any] = []

    def lazy() -> None:
        fresh = bench.buffers["data"].tensor[0, 0, 0, 0] == bench.buffers["data"].given[0, 0, 0, 0]
        made = values(bench, bench.expected) if fresh else bench.output * 0
        kept.append(made)
        bench.output[...] = kept[0]

    assert verify(bench, lazy)[0] != ""


@pytest.mark.fault("candidates", "a candidate's outputs differ from run to run")
def test_an_output_that_differs_from_run_to_run_fails(bench: Any) -> None:
    """By less than the tolerance."""
    runs: list[int] = []

    def fickle() -> None:
        runs.append(1)
        bench.output[...] = values(bench, bench.expected * (1 + 1e-7 * (len(runs) > 2)))

    assert "another one in a second run" in verify(bench, fickle)[0]


@pytest.mark.fault("candidates", "a candidate's sums are one off, which is less than a step of its outputs")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("out", ["uint8", "int8", "float16", "bfloat16", "float32"])
@pytest.mark.parametrize("depth", [1, 60])
def test_a_unit_of_a_sum_is_seen(device: str, out: str, depth: int) -> None:
    """A bias that is one higher in one channel is the same as a sum that begins one off."""
    conv = REQUANTISED.with_(out_dtype=out, out_zero_point=4 if out == "uint8" else 0, in_channels=depth)
    bench = bench_of(device, conv).special["scales near 1"]
    assert verify(bench, _writes(bench, bench.expected)) == ("", 0.0)
    given = {name: tensor if device == "cpu" else torch_values(tensor) for name, tensor in bench.inputs.items()}
    assert abs(given["scale"]).min() >= 1
    for channel in range(conv.out_channels):
        for name, more in (("bias", 1), ("scale", 0.1)):
            off = {key: array.copy() for key, array in given.items()}
            off[name][channel] += more
            wrong = reference(conv, off["data"], off["filter"], bias=off["bias"], scale=off["scale"])
            wrong = torch_tensor(wrong) if device == "cuda" else wrong
            assert verify(bench, _writes(bench, wrong))[0].startswith("error"), (channel, name)


def test_sums_of_a_requantised_problem_reach_beyond_the_range_of_its_outputs() -> None:
    """On both sides, so that a wrong end of the range shows; most of them are within it."""
    for conv in (REQUANTISED, REQUANTISED.with_(in_channels=512), Conv2d(2, 32, 9, 9, 32, 3, groups=32, dtype="int8", out_dtype="int8")):
        found = bench_of("cpu", conv, make=unit_tensors).expected
        low, high = (0, 255) if conv.out_dtype == "uint8" else (-128, 127)
        assert (found == low).any() and (found == high).any() and ((found > low) & (found < high)).mean() > 0.3


@pytest.mark.fault("candidates", "a candidate's sums have sixteen bits")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("out", ["int32", "int8"])
def test_sums_of_sixteen_bits_are_seen(device: str, out: str) -> None:
    """They are right for the sums of most random tensors, and wrong for those of tensors over the whole range."""
    conv = Conv2d(2, 6, 7, 7, 8, 3, dtype="int8", out_dtype=out)
    bench = bench_of(device, conv)
    assert set(bench.special) == {"values of the whole range", *(["scales near 1"] if out == "int8" else [])}
    whole = bench.special["values of the whole range"]
    given = {name: tensor if device == "cpu" else torch_values(tensor) for name, tensor in whole.inputs.items()}
    assert (given["data"].min(), given["data"].max()) == (given["filter"].min(), given["filter"].max()) == (-128, 127)
    sums = reference(conv.with_(out_dtype="int32"), given["data"], given["filter"])
    wrong = np.clip(sums, -(2**15), 2**15 - 1)
    wrong = wrong if out == "int32" else np.clip(np.rint(np.float32(wrong) * given["scale"][:, None, None]), -128, 127)
    wrong = torch_tensor(wrong) if device == "cuda" else wrong
    assert verify(whole, _writes(whole, whole.expected)) == ("", 0.0)
    assert verify(whole, _writes(whole, wrong))[0].startswith("error")
    assert bench_of(device, SMALL).special == {}, "products of floats have no range"


@pytest.mark.parametrize("size", [1, 4096, 4097, 1 << 20])
def test_zones_are_as_large_as_their_tensor_and_whole_pages(size: int) -> None:
    zone = check.zone_of(size)
    assert zone % check.PAGE == 0 and min(size, check.MOST) <= zone <= check.MOST


def test_tensors_start_at_a_cache_line() -> None:
    bench = Bench(REQUANTISED, 0)
    assert all(buffer.tensor.ctypes.data % 64 == 0 and buffer.tensor.flags.c_contiguous for buffer in bench.buffers.values())


@pytest.mark.fault("disks and folders", "the expected output cannot be kept")
def test_the_next_process_of_a_session_finds_the_expected_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same problem and seed alone; a folder that cannot be written to costs time only."""
    conv = Conv2d(1, 4, 9, 9, 8, 3, layout="NHWC")
    first = Bench(conv, 0, tmp_path)
    assert Bench(conv, 0, tmp_path / "missing").expected.tobytes() == first.expected.tobytes()
    monkeypatch.setattr("im2win.tuner.runners.cpu.reference", None)
    assert Bench(conv, 0, tmp_path).expected.tobytes() == first.expected.tobytes()
    for other in ((conv, 1), (conv.with_(batch=2), 0)):
        with pytest.raises(TypeError):
            Bench(*other, tmp_path)


def test_errors_are_found_wherever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("im2win.tuner.runners.cpu.BLOCK", 7)
    bench = Bench(Conv2d(1, 4, 9, 9, 8, 3), seed=0)
    for place in (0, 6, 7, bench.expected.size - 1):
        y = bench.expected.copy()
        y.reshape(-1)[place] += 0.5
        bench.output[...] = y
        assert bench.error() == pytest.approx(error(bench.output, bench.expected)) and bench.error() > 0.01
    bench.output.reshape(-1)[8] = np.nan
    assert np.isnan(bench.error())


def test_a_kernel_runs_before_its_sample_where_another_one_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be timed with the other one's tensors in the caches. The last one that is sampled is alone."""
    for name in ("COLD_S", "WARM_S", "SAMPLE_S", "SETTLE_S"):
        monkeypatch.setattr(f"im2win.tuner.runners.cpu.{name}", 0.0)
    ran: list[str] = []
    one, other = Outcome("ok"), Outcome("ok", samples_s=[0.0])
    job = RunJob(SMALL, (), 0, samples=2, seconds=0.0)
    Measurer()._time(job, [(lambda: ran.append("a"), one), (lambda: ran.append("b"), other)])  # type: ignore[list-item]
    assert "".join(ran) == "aabb" + "aabb" + "a" and len(one.samples_s) == len(other.samples_s) == 2


@pytest.mark.parametrize(("drop_above", "sampled"), [(1.5, FEWEST), (3.0, 6)])
def test_one_that_is_far_behind_is_dropped(drop_above: float, sampled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLD_S", "WARM_S", "SETTLE_S"):
        monkeypatch.setattr(f"im2win.tuner.runners.cpu.{name}", 0.0)
    monkeypatch.setattr("im2win.tuner.runners.cpu._sample", lambda kernel, calls: kernel())
    fast, slow = Outcome("ok"), Outcome("ok")
    job = RunJob(SMALL, (), 0, samples=6, seconds=0.0, drop_above=drop_above)
    Measurer()._time(job, [(lambda: 1e-3, fast), (lambda: 2e-3, slow)])  # type: ignore[list-item]
    assert fast.samples_s == [1e-3] * 6 and slow.samples_s == [2e-3] * sampled
