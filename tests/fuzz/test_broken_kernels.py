"""Deliberately broken kernels: what the check before timing catches, and the emulator of broken CUDA kernels."""

from __future__ import annotations

import broken_cpu
import broken_cuda
import pytest
from broken_campaign import counts, judged
from broken_cpu import LAYERS, Broken, Mistake
from broken_cuda import BrokenCuda
from waiting_kernels import KERNELS

SAMPLE: list[Broken] = [
    Broken(0, Mistake("sum starts wrong", 0)), Broken(0, Mistake("epilogue lost", 0)), Broken(0, Mistake("activation lost", 0)),
    Broken(0, "filter transposed"), Broken(10, Mistake("condition shifted", 0)), Broken(10, Mistake("index off by one", 0)),
    Broken(10, "last weight lost"),
    Broken(1, Mistake("factor changed", 0)),  # leaves rows of a stored tensor as they were: right ones of the kernel before it
    Broken(8, Mistake("condition shifted", 0)),  # reads beside its input
    Broken(12, Mistake("sum starts wrong", 0)), Broken(12, Mistake("constant wrong", 1)),  # less than a step of most outputs
]  # fmt: skip


OFTEN = (0, 3, 8, 9, 10, 12)  # layers of which all mistakes are judged here; `python tests/fuzz/broken.py` judges those of every layer


def test_a_sample_is_caught() -> None:
    """And the kernels are right without the mistakes."""
    verdicts = dict(judged([0, 1, 8, 10, 12, *SAMPLE]))
    assert [verdicts.pop(layer).outcome for layer in (0, 1, 8, 10, 12)] == ["ok"] * 5
    assert not [f"{job}: {verdict}" for job, verdict in verdicts.items() if verdict.outcome != "caught"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layer", OFTEN, ids=[" ".join(LAYERS[layer]) for layer in OFTEN])
def test_every_broken_kernel_of_a_cpu_is_caught(layer: int) -> None:
    """What passes is equivalent: its program is the same, or its outputs are on inputs of single elements. Few are."""
    jobs = [one for one in broken_cpu.injected() if one.layer == layer]
    found = judged([layer, *jobs])
    assert found[0][1].outcome == "ok"
    assert not [f"{job}: {verdict}" for job, verdict in found[1:] if verdict.outcome == "missed"]
    counted = counts(found[1:])
    assert counted["injected"] == counted["caught"] >= 10 and counted["equivalent"] + counted["refused"] <= counted["caught"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [*list(KERNELS)[::3], *broken_cuda.REQUANTISED])
def test_every_broken_cuda_kernel_is_caught(name: str) -> None:
    jobs = [one for one in broken_cuda.injected() if one.kernel == name]
    found = judged([name, *jobs])
    assert found[0][1].outcome == "ok"
    assert not [f"{job}: {verdict}" for job, verdict in found[1:] if verdict.outcome != "caught"]


@pytest.mark.slow
def test_there_are_hundreds_and_all_differ() -> None:
    jobs: list[Broken | BrokenCuda] = [*broken_cpu.injected(), *broken_cuda.injected()]
    assert len(set(map(str, jobs))) == len(jobs) > 400
