"""The search over barriers with its validators, and what trial and error alone would have done."""

from __future__ import annotations

import logging
import subprocess
from dataclasses import replace
from pathlib import Path

import fusable
import numpy as np
import pytest
import winograd_pair
from winograd_pair import Pair

from im2win.device.gpu import H200
from im2win.emulator import Launch
from im2win.reconstruct import ReconstructError
from im2win.reconstruct.fusion import llc
from im2win.reconstruct.parse.unit import Unit
from im2win.reconstruct.rulesets import RULE_SETS, Settings, rewrite, rule_sets
from im2win.reconstruct.trace.events import NotShown
from im2win.reconstruct.validate.search import search, trial
from im2win.reconstruct.validate.validators import EmulatorValidator, RacecheckValidator, harness, tensor_sizes, tensor_types, tensors_for

T = "((int)threadIdx.x)"

# The second barrier keeps slow readers from the next write, which happens to write the same again: no test can miss it.
SAME_AGAIN = Unit(
    f"""extern "C" __global__ void __launch_bounds__(64) turn(float* __restrict__ x, float* __restrict__ y) {{
  __shared__ alignas(64) float s[64];
  alignas(64) float sum[1];
  sum[0] = 0.0f;
  for (int i = 0; i < 3; ++i) {{
    s[{T}] = x[{T}];
    __syncthreads();
    sum[0] = (sum[0] + s[(63 - {T})]);
    __syncthreads();
  }}
  y[{T}] = sum[0];
  __syncthreads();
}}
""",
    (Launch("turn", ("x", "y"), (1, 1, 1), (64, 1, 1)),),
)


@pytest.fixture(scope="module")
def same_again() -> EmulatorValidator:
    """A validator of that kernel."""
    return EmulatorValidator(SAME_AGAIN)


class Objects:
    """A validator that objects to every change."""

    name = "nobody"

    def objection(self, unit: Unit) -> str | None:
        return "no"


def test_a_barrier_goes_if_indices_show_it_and_all_agree(same_again: EmulatorValidator, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "im2win.reconstruct"):
        result, matches, story = search(SAME_AGAIN, [same_again])
    assert [(tried.verdict.outcome, tried.changed) for tried in story] == [("needed", False), ("needed", False), ("none", True)]
    assert result.source.count("__syncthreads") == 2 and [match.after for match in matches] == [""]
    assert "barrier 2 in line 12: none, no thread touches what another writes; deleted" in caplog.text


def test_a_barrier_stays_if_a_validator_objects(caplog: pytest.LogCaptureFixture) -> None:
    result, matches, story = search(SAME_AGAIN, [Objects()])
    assert result == SAME_AGAIN and not matches and [tried.objection for tried in story] == [None, None, "nobody: no"]
    assert any(record.levelno == logging.ERROR and "although: nobody: no" in record.message for record in caplog.records)


def test_trial_and_error_alone_is_unsound(same_again: EmulatorValidator) -> None:
    """It deletes the barrier that keeps readers from the next write, because no order it tries shows the race."""
    story = trial(SAME_AGAIN, [same_again])
    assert [tried.deleted for tried in story] == [False, True, True]
    assert [tried.unsound for tried in story] == [False, True, False]
    assert "would be deleted by trial and error, although thread" in str(story[1])


def test_the_emulator_confirms_what_becomes_of_tvms_barriers() -> None:
    unit = winograd_pair.unit(Pair(private=True))
    validator = EmulatorValidator(unit, seeds=range(4))
    _, matches, story = search(unit, [validator])
    assert [tried.changed for tried in story] == [True] * 2 and len(matches) == 2
    nothing = replace(unit, source=unit.source.replace("__syncthreads();", ""))
    assert "output comes out differently" in (validator.objection(nothing) or "")


def test_tensors_come_from_the_addresses_that_kernels_reach() -> None:
    unit = fusable.unit("fewer threads")
    assert tensor_types(unit) == {"V": "float", "data": "float", "output": "float"}
    assert tensor_sizes(unit) == {"V": 6 * 64, "data": 6 * 64, "output": 8 * 64}
    made = tensors_for(unit)
    assert np.isnan(made["V"]).all() and made["data"].shape == (6 * 64,) and set(np.unique(made["data"])) <= set(range(-4, 5))
    hidden = replace(unit, source=unit.source.replace("data_ptr[", "data_ptr[((int)data_ptr[0]) + "))
    with pytest.raises(NotShown, match="depends on data"):
        tensor_sizes(hidden)


def test_numbers_are_those_that_launches_give() -> None:
    source = (
        'extern "C" __global__ void __launch_bounds__(32) k(float* __restrict__ x, int part) {\n'
        "  x[((part * 32) + ((int)threadIdx.x))] = ((float)part);\n}\n"
    )
    unit = Unit(source, tuple(Launch("k", ("x", part), (1, 1, 1), (32, 1, 1)) for part in (0, 2)))
    assert tensor_sizes(unit) == {"x": 96} and unit.kernel("k").numbers == [{"part": 0}, {"part": 2}]
    assert "k<<<dim3(1, 1, 1), dim3(32, 1, 1), 0>>>(t_x, 2)" in harness(unit, {"x": 96})


# --- rule sets


def test_rules_apply_in_order_and_say_so() -> None:
    unit = winograd_pair.unit(Pair(private=True))
    applied = rewrite(unit, ["pkf-shmem", "barriers"], Settings(H200.block_shared))
    assert [match.rule for match in applied.matches] == ["pkf-shmem", "barriers", "barriers"]
    assert len(applied.unit.kernels) == 1 and applied.notes[0].startswith("pkf-shmem: every block of winograd_kernel_1 reads of V")
    [kept] = [note for note in applied.notes if "stays" in note]
    assert "barrier 0" in kept and "fused_shared" in kept, "all warps make what each of them reads"
    body = applied.unit.source
    assert body.count("__syncthreads();") == 1 and body.count("__syncwarp();") == 2


def test_a_rule_that_does_not_fit_leaves_the_source_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    unit = winograd_pair.unit(Pair())
    applied = rewrite(unit, ["pkf-shmem", "barriers"], Settings(shared=1024))
    assert applied.unit == unit and not applied.matches
    assert "pkf-shmem does not apply, the source stays as it is: V takes 8192 bytes of a block's shared memory" in caplog.text
    assert rewrite(unit, ["pkf-llc"], Settings(validators=(Objects(),))).unit == unit
    assert "nobody objects to the changed kernel: no" in caplog.text


def test_unknown_rules() -> None:
    assert list(RULE_SETS) == ["barriers", "pipelines", "copies", "wide", "bounds", "unroll", "pkf-shmem", "pkf-llc", "hip"]
    known = "barriers, pipelines, copies, wide, bounds, unroll, pkf-shmem, pkf-llc, hip"
    with pytest.raises(ReconstructError, match=rf"`rules` \(='fuse'\) must be among {known}"):
        rule_sets(["barriers", "fuse"])


# --- racecheck


def test_the_program_for_racecheck_compiles(tmp_path: Path) -> None:
    """Which needs no GPU, as far as there is nvcc."""
    unit = llc.fuse(fusable.unit("two barriers"), H200.block_shared)[0]
    program = harness(unit, tensor_sizes(fusable.unit("two barriers")) | {"V_flags": 5})
    assert "consume_pkf_llc<<<dim3(12, 1, 1), dim3(96, 1, 1), 0>>>(t_V, t_output, t_data, t_V_flags)" in program
    validator = RacecheckValidator(H200.arch, tensor_sizes(fusable.unit("two barriers")) | {"V_flags": 5})
    if validator.missing() == "nvcc is not on PATH":
        pytest.skip("nvcc is not on PATH")
    assert validator.build(unit, tmp_path).stat().st_mode & 0o100


def test_racecheck_says_what_it_lacks() -> None:
    missing = RacecheckValidator.missing()
    if missing is None:
        pytest.skip("this machine has all that racecheck needs; test_reconstruct_device runs it")
    with pytest.raises(ReconstructError, match=f"racecheck cannot run: {missing}"):
        RacecheckValidator(H200.arch).objection(SAME_AGAIN)


def test_racecheck_reads_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    validator, runs = RacecheckValidator(H200.arch, {"x": 64, "y": 64}), list[list[str]]()

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        runs.append(command)
        said = "========= Error: Race reported between Write access at turn+0x90 and Read access at turn+0xd0 [64 hazards]\n"
        return subprocess.CompletedProcess(command, 9 if command[0] == "compute-sanitizer" else 0, said, "")

    monkeypatch.setattr(RacecheckValidator, "missing", staticmethod(lambda: None))
    monkeypatch.setattr(subprocess, "run", run)
    found = validator.objection(SAME_AGAIN)
    assert found == "Error: Race reported between Write access at turn+0x90 and Read access at turn+0xd0 [64 hazards]"
    assert [command[0] for command in runs] == ["nvcc", "compute-sanitizer"] and "racecheck" in runs[1]
