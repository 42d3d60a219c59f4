"""The campaign of random kernels: a small one, what is found, what goes on. `make fuzz` runs the large one."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import worker_fuzz_faults
from fuzz_campaign import SUPPORT, Limits, State, StateError, checked, run
from fuzz_cases import drawn, element_types
from fuzz_jobs import Answer, Case, Job
from paths import ROOT

from im2win.device.cpu import Machine
from im2win.registry.schedules import SCHEDULES
from im2win.reports import tables
from im2win.spec.activations import ACTIVATIONS, activation_of
from im2win.spec.conv2d import Conv2d

QUICK = Limits(case_s=3, first_s=60)


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    return monkeypatch


@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda", marks=pytest.mark.slow)])
def test_a_small_campaign(tmp_path: Path, target: str) -> None:
    state = run(tmp_path / "state.json", target, 12, seed=5, size=12)
    assert not state.failures and state.count == state.next == 12 == sum(state.outcomes.values())
    assert set(state.outcomes) <= {"equal", "close", "refused"} and state.peak_bytes > 1 << 20
    assert sum(count for word, count in state.covered.items() if word.startswith("schedule ")) == 12
    held = json.loads((tmp_path / "state.json").read_text())
    assert held["study"] == "fuzz" and held["digests"]["target"] == target and held["covered"] == state.covered
    assert held["gpu"] == ("nvidia-h200" if target == "cuda" else "") and held["device"] == Machine.host().name and held["cpu_s"] > 1
    assert held["digests"]["campaign"] and "apache-tvm" in held["versions"]
    filled = tables.fill("<!-- table:fuzz -->\n<!-- /table -->", {}, [held])
    assert f"| `{held['device']}` | 12 |" in filled


def test_an_index_names_its_case() -> None:
    case = drawn("cpu", 0, 7)
    assert case == drawn("cpu", 0, 7) != drawn("cpu", 1, 7) and Case.from_json(case.to_json()) == case


@pytest.mark.slow
def test_what_is_drawn_varies() -> None:
    """Every schedule, type and activation of CPUs occurs among the first hundreds, and tiles that no space has."""
    cases = [drawn("cpu", 0, index) for index in range(500)]
    convs = [Conv2d.parse(case.conv) for case in cases]
    assert {case.algorithm for case in cases} - {""} == {name for name, row in SCHEDULES.items() if row.scheduler.family != "none"}
    assert {conv.dtype for conv in convs} == set(element_types("cpu"))
    assert {activation_of(conv.activation).name for conv in convs} == set(ACTIVATIONS)
    assert {conv.out_dtype for conv in convs} >= {"int8", "uint8", "int32", "float16", "bfloat16", "float32"}
    assert any(conv.zero_point and conv.out_zero_point for conv in convs) and any(conv.depthwise for conv in convs)
    assert 20 < Counter(case.listed for case in cases)[False] < 250
    assert sum(not case.algorithm for case in cases) < 50


def test_a_wrong_kernel_is_found(tmp_path: Path, faults: pytest.MonkeyPatch) -> None:
    """A kernel that forgets the last input channel."""
    index = next(index for index in range(20) if drawn("cpu", 0, index).algorithm)
    faults.setenv("FAULTS", json.dumps({index: "wrong"}))
    state = run(tmp_path / "state.json", "cpu", index + 2, size=index + 2, module="worker_fuzz_faults")
    [failure] = state.failures
    assert failure["index"] == index and failure["kind"] == "wrong" and failure["message"]
    case = Case(**failure["case"])
    assert case == drawn("cpu", 0, index) and failure["replay"] == f"python tests/fuzz/kernels.py --case '{case.to_json()}'"


@pytest.mark.slow
def test_a_case_is_replayed() -> None:
    case = next(case for case in map(functools.partial(drawn, "cpu", 0), range(20)) if case.algorithm)
    replayed = subprocess.run(
        [sys.executable, ROOT / "tests/fuzz/kernels.py", "--case", case.to_json()],
        capture_output=True, text=True, timeout=280, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert replayed.returncode == 0 and replayed.stdout.startswith(("equal", "close")), replayed.stdout + replayed.stderr


def test_crashes_and_hangs_are_blamed_on_their_case(tmp_path: Path, faults: pytest.MonkeyPatch) -> None:
    faults.setenv("FAULTS", json.dumps({"1": "crash", "3": "hang"}))
    state = run(tmp_path / "state.json", "cpu", 6, size=3, limits=Limits(3, 6), module="worker_fuzz_faults")
    assert [(one["index"], one["kind"]) for one in state.failures] == [(1, "crashed"), (3, "timeout")]
    assert "SIGSEGV" in state.failures[0]["message"] and "by itself: the same" in state.failures[0]["message"]
    assert all(Case(**one["case"]) == drawn("cpu", 0, one["index"]) for one in state.failures)
    assert sorted(worker_fuzz_faults.ran()) == [0, 1, 1, 2, 3, 3, 4, 5], "a failed case runs once more by itself"


def test_a_killed_campaign_goes_on(tmp_path: Path, faults: pytest.MonkeyPatch) -> None:
    """It is killed in its second batch or later; what the file holds does not run again."""
    faults.setenv("FAULTS", json.dumps({str(index): "slow" for index in range(4, 16)}))
    path, module = tmp_path / "state.json", "worker_fuzz_faults"
    code = f"from pathlib import Path; from fuzz_campaign import run; run(Path({str(path)!r}), 'cpu', 16, size=4, module={module!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), str(ROOT / "src")])}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as campaign:
        end = time.monotonic() + 120
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.05)
        campaign.kill()
    held = State.begun(path, "cpu", 0)
    assert 4 <= held.next < 16
    before = len(worker_fuzz_faults.ran())
    state = run(path, "cpu", 16, size=4, processes=2, limits=QUICK, module=module)
    assert state.next == state.count == 16 and state.outcomes == {"equal": 16} and not state.beyond
    assert sorted(worker_fuzz_faults.ran()[before:])[-1] == 15
    assert set(range(held.next, 16)) <= set(worker_fuzz_faults.ran()[before:]) and 0 not in worker_fuzz_faults.ran()[before:]
    assert run(path, "cpu", 16, size=4, module=module).outcomes == state.outcomes


def test_a_campaign_whose_time_is_over_goes_on(tmp_path: Path, faults: pytest.MonkeyPatch) -> None:
    """A batch keeps what it has done by then; a case that did not end has no answer."""
    faults.setenv("FAULTS", json.dumps({"3": "hang"}))
    path, module = tmp_path / "state.json", "worker_fuzz_faults"
    over = run(path, "cpu", 8, size=8, module=module, seconds=8)
    assert (over.next, over.count, over.beyond, over.outcomes, over.failures) == (3, 3, [], {"equal": 3}, [])
    assert run(path, "cpu", 8, size=8, module=module, seconds=1e-3) == over
    faults.setenv("FAULTS", "{}")
    state = run(path, "cpu", 8, size=8, module=module, seconds=600)
    assert state.next == state.count == 8 == state.outcomes["equal"] and worker_fuzz_faults.ran() == [0, 1, 2, 3, *range(3, 8)]


def test_ranges_that_are_done() -> None:
    state = State("cpu", 0)
    for first, end in ((10, 14), (20, 30), (14, 20), (0, 4)):
        state.note(range(first, end), [Answer("refused", message="no legal tile")] * (end - first))
    assert (state.next, state.beyond, state.count) == (4, [[10, 30]], 24) and state.refused == {"no legal tile": 24}
    assert state.missing(36, 4) == [range(4, 8), range(8, 10), range(30, 34), range(34, 36)] and state.missing(6, 4) == [range(4, 6)]
    state.note(range(4, 10), [Answer("equal")] * 6)
    assert (state.next, state.beyond, state.missing(30, 4)) == (30, [], [])


def test_the_result_depends_on_no_number_of_processes(tmp_path: Path, faults: pytest.MonkeyPatch) -> None:
    """Many more than there are batches at the end, too."""
    faults.setenv("FAULTS", json.dumps({"2": "crash"}))
    held = []
    for processes in (1, 30):
        state = run(tmp_path / f"{processes}.json", "cpu", 6, size=2, processes=processes, limits=QUICK, module="worker_fuzz_faults")
        held.append((state.outcomes, state.failures, state.next, state.beyond))
    assert held[0] == held[1]


def test_a_file_of_another_campaign_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    State.begun(path, "cpu", 0).save(path)
    with pytest.raises(StateError, match=r"`seed` \(=0\) must be 1 to go on"):
        State.begun(path, "cpu", 1)
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "digests": {}}))
    with pytest.raises(StateError, match="`digests`"):
        State.begun(path, "cpu", 0)
    path.write_text(json.dumps({**values, "digests": {**values["digests"], "campaign": "0"}}))
    with pytest.raises(StateError, match="`digests`"):
        State.begun(path, "cpu", 0)


@pytest.mark.slow
def test_a_case_alone() -> None:
    answer = checked(Job("cpu", 0, 0))
    assert answer.outcome in ("equal", "close") and answer.case == drawn("cpu", 0, 0)
