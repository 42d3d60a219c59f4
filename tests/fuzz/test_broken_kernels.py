"""Deliberately broken kernels: what the check before timing catches, the emulator of CUDA kernels, and the reconstructor of its own."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import broken_campaign
import broken_cpu
import broken_cuda
import broken_units
import pytest
from broken_campaign import KERNELS, StateError, jobs_of, judged, named, run
from broken_cpu import LAYERS, Broken, Mistake
from broken_units import SOURCES, BrokenUnit
from sampling import every_second_ordinary

from im2win.reports import tables

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
@pytest.mark.parametrize("layer", every_second_ordinary(OFTEN), ids=[" ".join(LAYERS[layer]) for layer in OFTEN])
def test_every_broken_kernel_of_a_cpu_is_caught(layer: int) -> None:
    """What passes is equivalent: its program is the same, or its outputs are on inputs of single elements. Few are."""
    jobs = [one for one in broken_cpu.injected() if one.layer == layer]
    found = judged([layer, *jobs])
    assert found[0][1].outcome == "ok"
    assert not [f"{job}: {verdict}" for job, verdict in found[1:] if verdict.outcome == "missed"]
    counted = Counter(verdict.outcome for _, verdict in found[1:])
    assert counted["caught"] >= 10 and counted["equivalent"] + counted["refused"] <= counted["caught"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", every_second_ordinary([*broken_cuda.REQUANTISED, *list(broken_cuda.KERNELS)[::3]]))
def test_every_broken_cuda_kernel_is_caught(name: str) -> None:
    jobs = [one for one in broken_cuda.injected() if one.kernel == name]
    found = judged([name, *jobs])
    assert found[0][1].outcome == "ok"
    assert not [f"{job}: {verdict}" for job, verdict in found[1:] if verdict.outcome != "caught"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", list(SOURCES)[1::4])
def test_every_broken_reconstruction_is_caught(name: str) -> None:
    found = judged([BrokenUnit(name), *(one for one in broken_units.injected() if one.kernel == name)], processes=2)
    assert found[0][1].outcome == "ok" and len(found) >= 10
    assert not [f"{job}: {verdict}" for job, verdict in found[1:] if verdict.outcome not in ("caught", "equivalent")]


def test_a_sample_of_broken_reconstructions_is_caught() -> None:
    """A barrier, a wait, a number of steps; through shared memory and through the cache."""
    names = ("a barrier of its own, in shared memory", "a barrier of its own, through the cache")
    broken = [BrokenUnit(names[0], "no barrier"), BrokenUnit(names[1], "no wait for a block"), BrokenUnit(names[1], "a step lost")]
    verdicts = dict(judged([*map(BrokenUnit, names), *broken]))
    assert [verdicts[BrokenUnit(name)].outcome for name in names] == ["ok", "ok"]
    assert not [f"{job}: {verdicts[job]}" for job in broken if verdicts[job].outcome != "caught"]


@pytest.mark.slow
def test_there_are_hundreds_and_all_differ() -> None:
    jobs = [tuple(named(job).values()) for kernels in KERNELS for job in jobs_of(kernels)]
    assert len(set(jobs)) == len(jobs) > 750
    assert sum(kind == "" for _, kind, _ in jobs) == len(LAYERS) + len(broken_cuda.ALL) + len(SOURCES)


def test_a_campaign_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is written after each verdict; what it holds is not judged again, and a file of other kernels is refused."""
    name = "a barrier of its own, in shared memory"
    jobs = [BrokenUnit(name), BrokenUnit(name, "no barrier"), BrokenUnit(name, "a step lost")]
    monkeypatch.setattr(broken_campaign, "jobs_of", lambda kernels: jobs)
    path, seen = tmp_path / "broken.json", list[str]()

    def note(job: object, verdict: object) -> None:
        seen.append(str(job))

    assert not run(path, "reconstructed", seconds=1e-3, note=note).verdicts
    assert [row.get("outcome") for row in json.loads(path.read_text())["rows"]] == [None] * 3
    state = run(path, "reconstructed", note=note)
    assert [verdict.outcome for verdict in state.verdicts.values()] == ["ok", "caught", "caught"] and not state.wrong and len(seen) == 3
    held = json.loads(path.read_text())
    assert run(path, "reconstructed", note=note).verdicts == state.verdicts and len(seen) == 3
    assert held["digests"]["target"] == "cuda" and held["device"] and "apache-tvm" in held["versions"]
    assert "without a mistake 1 of 1 pass" in tables.fill("<!-- table:broken-kernels -->\n<!-- /table -->", {}, [held])
    with pytest.raises(StateError, match="`kernels`"):
        run(path, "cuda")
    path.write_text(json.dumps({**held, "rows": [{**row, "outcome": "missed" if row["mistake"] else "caught"} for row in held["rows"]]}))
    assert len(run(path, "reconstructed").wrong) == 3
