"""A record is used where today's default tile had its chance against it: in every tier of the look-up. Others are hints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tvm
from recorded import TODAY, bad, beside_default, fill, ok

from im2win.device.cpu import Machine
from im2win.device.gpu import H200, KNOWN
from im2win.records import judge, lookup
from im2win.records.judge import rivals_now, unsuited
from im2win.records.log import Log
from im2win.records.lookup import Found, search
from im2win.records.merit import LEAST_RIVALS
from im2win.records.proofs import FILE, Proof, current_proof, identity, restamp
from im2win.records.record import Record
from im2win.records.standings import device_of, of_layer, stamp, unmet
from im2win.records.tiers import tier_for
from im2win.registry import sources
from im2win.registry.cpu_backend import CpuBackend
from im2win.registry.ranking import default_of, ranked_tiles
from im2win.registry.schedules import candidates, schedule_of
from im2win.registry.sources import choice_digest, code_digest, target_digest
from im2win.spec.conv2d import Conv2d
from im2win.tuner.layers import tuned_before

CONV = Conv2d.parse("n1-c8x12x12-k16x1x1")
HERE = Machine("intel-xeon", "rocketlake", "avx512f", 2, 16, 32, 48 << 10, 2 << 20, 32 << 20)
THERE = replace(HERE, mcpu="icelake", l2_bytes=1 << 20)
FACTS: dict[str, Any] = {"tvm": tvm.__version__, "generator": TODAY}


@pytest.fixture(autouse=True)
def nothing_is_shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lookup, "PACKAGED", tmp_path / "packaged")


def tiles(method: str, conv: Conv2d = CONV, machine: Machine = HERE) -> list[dict[str, Any]]:
    """The tiles of an algorithm, worst estimate first: the default tile comes last."""
    return [tile.as_dict() for _, tile in reversed(ranked_tiles(conv, schedule_of(method), machine))]


def made(seconds: float, method: str = "mec/tiled", place: int = 0, conv: Conv2d = CONV, machine: Machine = HERE, **more: Any) -> Record:
    fields = {"tile": tiles(method, conv)[place], "algorithm": method, "device": machine.name, **FACTS, **more}
    return ok(seconds, conv, **fields)


def standard(conv: Conv2d = CONV, machine: Machine = HERE) -> str:
    """The algorithm and schedule of today's default tile."""
    found = default_of(conv, [row.key for row in candidates("auto", conv)], machine)
    assert found is not None
    return found[0]


def rivals(count: int, seconds: float = 2e-3, **where: Any) -> list[Record]:
    return [made(seconds, standard(), place, **where) for place in range(count)]


def look(log: Log, conv: Conv2d = CONV, names: Sequence[str] | None = None, device: Machine = HERE, **more: Any) -> Found:
    able = [row.key for row in candidates("auto", conv, "cpu", more.get("accuracy", "float32"))]
    return search(conv, device, names or able, log.folder, **more)


def tier(found: Found, record: Record) -> str:
    """The tier of a look-up that found this record; "hint" where it refused it."""
    if found.record is None:
        assert [one for one, _ in found.skipped] == [record]
        return "hint"
    assert found.record == record
    return found.tier


def reason(found: Found) -> str:
    (_, why), = found.skipped
    return why


# --- exact -----------------------------------------------------------------------------------------------------------


def test_a_record_that_met_the_default_is_used(log: Log) -> None:
    record = made(1e-3)
    assert tier(look(fill(log, *beside_default(record, HERE))), record) == "exact"


def test_a_record_that_the_default_failed_beside_is_used(log: Log) -> None:
    record = made(1e-3)
    slower = beside_default(record, HERE)[1]
    failed = replace(slower, outcome="crashed", samples_s=(), message="signal 11")
    assert tier(look(fill(log, record, failed)), record) == "exact"


def test_where_the_default_is_the_best_it_is_the_record(log: Log) -> None:
    record, default = beside_default(made(1e-3), HERE, slower=0.5)
    assert look(fill(log, record, default)).record == default


@pytest.mark.parametrize("seconds, slower, default_is_used", [
    (5e-6, 1.0, True), (5e-6, 1.04, True), (5e-6, 1.06, False), (2e-5, 1.03, False), (1e-3, 1.0, True), (1e-3, 1.01, False),
])  # fmt: skip
@pytest.mark.parametrize("listed", [True, False])
def test_a_record_that_saves_next_to_nothing_gives_way_to_the_default(
    seconds: float, slower: float, default_is_used: bool, listed: bool, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a proof lists what it gains, or the default tile's record says that it is that."""
    record, default = beside_default(made(seconds), HERE, slower=slower)
    if listed:
        prove(fill(log, record, default), monkeypatch, HERE)
        stamp(log, HERE.name)
    else:
        default = replace(default, rivals=rivals_now("cpu", "float32", default=True))
        fill(log, replace(record, rivals=rivals_now("cpu", "float32")), default)
    monkeypatch.setattr("im2win.records.judge.default_of", None)
    found = look(log)
    assert found.tier == "exact" and found.record is not None
    assert (found.record.method == default.method) == default_is_used


def test_a_record_that_had_rivals_of_the_default_s_schedule_is_used(log: Log) -> None:
    record = made(1e-3)
    fill(log, record, *rivals(LEAST_RIVALS - 1))
    assert tier(look(log), record) == "hint"
    fill(log, made(5e-3, standard(), LEAST_RIVALS))
    assert tier(look(log), record) == "exact"


def test_tiles_of_before_the_default_s_fields_are_no_rivals(log: Log) -> None:
    """What is new in the default tile had no chance against the record, however many tiles without it were timed."""
    new, record = set(tiles(standard())[-1]), made(1e-3)
    without = [replace(one, tile={name: value for name, value in one.tile.items() if name != "order"}) for one in rivals(2 * LEAST_RIVALS)]
    assert "order" in new and all(new - set(one.tile) == {"order"} for one in without)
    found = look(fill(log, record, *without))
    assert tier(found, record) == "hint" and "too few of this algorithm with its fields were" in reason(found)
    fill(log, *rivals(LEAST_RIVALS))
    assert tier(look(log), record) == "exact"


def test_failures_and_stale_records_are_no_rivals(log: Log) -> None:
    record, others = made(1e-3), rivals(LEAST_RIVALS)
    old = [replace(one, tvm="0.1") for one in others]
    failing = [bad(tile=one.tile, algorithm=standard(), device=HERE.name, conv=CONV, **FACTS) for one in others]
    found = look(fill(log, record, *old, *failing))
    assert found.record is None and "was not tried" in found.skipped[-1][1]


def test_a_record_of_before_an_algorithm_existed_is_a_hint(log: Log) -> None:
    """The tuner takes it up, the look-up does not."""
    record = made(1e-3)
    found = look(fill(log, record))
    assert tier(found, record) == "hint" and reason(found).endswith("the algorithm of today's default tile, was not tried")


def test_where_an_algorithm_is_named_its_default_counts(log: Log) -> None:
    record = made(1e-3)
    assert look(fill(log, record), names=["mec/tiled"]).record is None
    assert tier(look(fill(log, *beside_default(record, HERE, ["mec/tiled"])), names=["mec/tiled"]), record) == "exact"


# --- other tiers -----------------------------------------------------------------------------------------------------


@pytest.fixture
def modelled(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The modelled cost of tiles by method, as a test sets it; 1 of others."""
    costs: dict[str, float] = {}
    monkeypatch.setattr(CpuBackend, "cost", lambda self, conv, row, tile: costs.get(row.key, 1.0))
    return costs


@pytest.mark.usefixtures("modelled")
def test_another_device_s_record_must_have_beaten_this_one_s_default_there(log: Log) -> None:
    record = made(1e-3, machine=THERE)
    assert tier(look(fill(log, record)), record) == "hint"
    assert tier(look(fill(log, *beside_default(record, HERE))), record) == "compatible device"


def test_another_device_s_record_that_lost_to_this_one_s_default_there_is_a_hint(log: Log) -> None:
    found = look(fill(log, *beside_default(made(1e-3, machine=THERE), HERE, slower=0.5)))
    assert found.record is None and reason(found).startswith("it is hardly better there than today's default tile")


@pytest.mark.parametrize(("slower", "expected", "why"), [
    (1.2, 1.0, None), (1.2, 1.05, None),
    (1.05, 1.0, "it is hardly better there"), (1.2, 1.2, "it is expected to take 1.20 times as long here"),
])  # fmt: skip
@pytest.mark.parametrize("borrower", [CONV, CONV.with_(batch=2)], ids=["of another device", "of another layer"])
@pytest.mark.parametrize("listed", [False, True], ids=["ranked", "listed"])
def test_what_is_borrowed_must_be_better_by_a_margin(
    log: Log, modelled: dict[str, float], slower: float, expected: float, why: str | None, borrower: Conv2d, listed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    machine = THERE if borrower == CONV else HERE
    record = made(1e-3, machine=machine)
    fill(log, *beside_default(record, HERE, slower=slower))
    if listed:
        prove(log, monkeypatch, machine)
        stamp(log, machine.name, accuracies=["float32"])
    modelled[record.method] = expected
    found = look(log, borrower)
    assert (found.record is None) == (why is not None) and (why is None or reason(found).startswith(why))


def test_the_listed_gain_is_of_the_best_record(log: Log, modelled: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the best one's tile is not legal here, the next one is borrowed only for its own gain."""
    conv, (record, default) = CONV.with_(batch=2), beside_default(made(1e-3), HERE, slower=1.2)
    second = made(1.15e-3, place=1)
    prove(fill(log, record, second, default), monkeypatch, HERE)
    stamp(log, HERE.name, accuracies=["float32"])
    legal = lookup.tile_violations
    monkeypatch.setattr(lookup, "tile_violations", lambda *what: ["no"] if what[2] == record.tile else legal(*what))
    assert "hardly better" in look(log, conv).skipped[-1][1]


def test_what_a_session_vouches_for_on_another_device_does_not_count_here(log: Log) -> None:
    record = made(1e-3, machine=THERE, rivals=rivals_now("cpu", "float32"))
    assert tier(look(fill(log, record)), record) == "hint"


def test_arithmetic_must_suit_both_devices(log: Log) -> None:
    narrow = replace(HERE, mcpu="haswell", isa="avx2", lanes=8, registers=16)
    record = made(1e-3)
    found = look(fill(log, *beside_default(record, HERE)), device=narrow)
    assert found.record is None and {why for _, why in found.skipped} == {"its vectors have 16 lanes, this CPU's 8"}
    hopper = next(gpu for gpu in KNOWN.values() if gpu != H200)
    of_gpu = replace(record, device=hopper.name, target="cuda")
    assert unsuited(of_gpu, H200) is None
    assert unsuited(of_gpu, replace(H200, arch="sm_80")) == f"{hopper.name} has compute capability 9.0, this device 8.0"
    assert unsuited(replace(of_gpu, device="nvidia-x"), H200) == "nvidia-x has an unknown compute capability, this device 9.0"


@pytest.mark.usefixtures("modelled")
def test_the_nearest_layer_s_record_must_have_earned_its_place_there(log: Log) -> None:
    record, conv = made(1e-3), CONV.with_(batch=2)
    assert tier(look(fill(log, record), conv), record) == "hint"
    found = look(fill(log, *beside_default(record, HERE)), conv)
    assert found.record == record and tier_for(conv, found.tier, CONV) == "nearest layer"


def test_a_tile_that_may_be_inaccurate_serves_its_own_layer_alone(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """A legal tile whose errors nobody has bounded was measured for its own layer, and for no other."""
    record = made(1e-3)
    fill(log, *beside_default(record, HERE))
    monkeypatch.setattr(CpuBackend, "proven", lambda self, conv, tile: False)
    assert look(log).record == record
    found = look(log, CONV.with_(batch=2))
    assert found.record is None and any("only tuning, which measures them, takes it" in reason for _, reason in found.skipped)


def test_another_epilogue_asks_for_no_margin(log: Log, modelled: dict[str, float]) -> None:
    record, conv = made(1e-3), CONV.with_(bias=True)
    assert tier(look(fill(log, record), conv), record) == "hint"
    modelled[record.method] = 2.0
    found = look(fill(log, *beside_default(record, HERE, slower=1.01)), conv)
    assert found.record == record and tier_for(conv, found.tier, CONV) == "other epilogue"


# --- without ranking -------------------------------------------------------------------------------------------------


@pytest.fixture
def unranked(monkeypatch: pytest.MonkeyPatch) -> None:
    def ranked(*what: Any, **how: Any) -> None:
        raise AssertionError("a space was ranked")

    monkeypatch.setattr(judge, "default_of", ranked)


def test_a_session_vouches_for_its_accuracy(log: Log, unranked: None) -> None:
    record = made(1e-3, rivals=rivals_now("cpu", "float32"))
    assert tier(look(fill(log, record)), record) == "exact"
    with pytest.raises(AssertionError, match="ranked"):
        look(log, accuracy="exact")


def test_what_other_source_vouched_for_is_ranked(log: Log, unranked: None) -> None:
    with pytest.raises(AssertionError, match="ranked"):
        look(fill(log, made(1e-3, rivals="float32:0123456789abcdef")))


def test_a_caller_that_keeps_defaults_is_asked(log: Log, unranked: None) -> None:
    record, default = beside_default(made(1e-3), HERE)
    kept = default.method, schedule_of(default.method).scheduler.tile(default.tile)
    assert tier(look(fill(log, record, default), default=lambda *_: kept), record) == "exact"


def prove(log: Log, monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    """Gives the records of a machine a proof of their kernels, and the machine's folder its numbers."""
    records, digests = frozenset(map(identity, log)), {record.method: code_digest("cpu", record.method) for record in log}
    (log.folder / machine.name / FILE).write_text(Proof(tvm.__version__, "cpu", digests, records).to_text())
    monkeypatch.setattr("im2win.records.standings.device_of", lambda *_: machine)


@pytest.fixture
def proven(log: Log, monkeypatch: pytest.MonkeyPatch) -> Log:
    """A log of one layer that has met its default and one that has not, with a proof."""
    prove(fill(log, *beside_default(made(1e-3), HERE), made(1e-3, conv=CONV.with_(in_channels=4, kernel=3))), monkeypatch, HERE)
    return log


def test_a_proof_lists_standings_so_that_nothing_is_ranked(proven: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    found = stamp(proven, HERE.name, accuracies=["float32"])
    assert {str(one.conv): one.standing.kind for one in found} == {str(CONV): "met", "n1-c4x12x12-k16x3x3": "new-algorithm"}
    text = (proven.folder / HERE.name / FILE).read_text()
    proof = Proof.from_text(text)
    assert proof is not None and proof.to_text() == text and proof.choices is not None and len(proof.choices.layers) == 2
    ranked = judge.default_of
    monkeypatch.setattr(judge, "default_of", None)
    assert look(proven).tier == "exact"
    monkeypatch.setattr(judge, "default_of", ranked)  # a hint leads to the default tile, which is ranked then
    other = look(proven, CONV.with_(in_channels=4, kernel=3))
    assert other.record is None and other.skipped[0][1].endswith("was not tried")
    assert [(str(one.conv), one.standing.kind) for one in unmet(proven, HERE.name)] == [("n1-c4x12x12-k16x3x3", "new-algorithm")]


def test_rivals_are_no_reason_not_to_tune_again(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their record is used, but the default tile itself was never measured: a session does that."""
    other = CONV.with_(in_channels=4)
    prove(fill(log, *beside_default(made(1e-3), HERE), made(1e-3, conv=other), *rivals(LEAST_RIVALS, conv=other)), monkeypatch, HERE)
    assert {str(one.conv): one.standing.kind for one in stamp(log, HERE.name)} == {str(CONV): "met", str(other): "rivals"}
    assert look(log, other).tier == "exact"
    assert tuned_before(CONV, HERE, 2, log.folder, "float32") is not None
    assert tuned_before(other, HERE, 2, log.folder, "float32") is None


@pytest.mark.parametrize("change", ["source", "device", "layers", "none"])
def test_a_list_that_is_out_of_date_is_ranked(proven: Log, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    stamp(proven, HERE.name, accuracies=["float32"])
    path = proven.folder / HERE.name / FILE
    values = json.loads(path.read_text())
    if change == "none":
        del values["choices"]
    else:
        values["choices"][change] = {"source": "0" * 16, "device": {"lanes": 16}, "layers": "?"}[change]
    path.write_text(json.dumps(values))
    assert current_proof(path.parent) is not None, "kernels are as proven as before"
    asked: list[Conv2d] = []
    monkeypatch.setattr(judge, "default_of", lambda conv, *_, **how: asked.append(conv))
    look(proven)
    assert asked == [CONV]


def test_records_after_a_hint_was_listed_are_evaluated(proven: Log) -> None:
    stamp(proven, HERE.name, accuracies=["float32"])
    other = CONV.with_(in_channels=4, kernel=3)
    record, default = beside_default(made(1e-3, conv=other), HERE)
    assert tier(look(fill(proven, default), other), record) == "exact"


def test_emitting_again_keeps_the_list_and_another_accuracy_joins_it(proven: Log) -> None:
    stamp(proven, HERE.name, accuracies=["float32"])
    stamp(proven, HERE.name, accuracies=["exact"])
    restamp(proven, HERE.name)
    proof = current_proof(proven.folder / HERE.name)
    assert proof is not None and proof.choices is not None
    assert {accuracy for _, accuracy in proof.choices.layers} == {"float32", "exact"}


def test_only_layers_with_new_records_are_ranked_again(proven: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    first = stamp(proven, HERE.name, accuracies=["float32"])
    fill(proven, made(2e-3, place=1))
    asked: list[Conv2d] = []
    default = judge.default_of
    monkeypatch.setattr(judge, "default_of", lambda conv, *what, **how: (asked.append(conv), default(conv, *what, **how))[1])
    second = {one.conv: one for one in stamp(proven, HERE.name, accuracies=["float32"], anew=False)}
    assert asked == [CONV] and second[CONV].records == 3
    assert {one.conv: one.standing.kind for one in first} == {conv: one.standing.kind for conv, one in second.items()}


def test_without_a_proof_of_kernels_nothing_is_listed(log: Log) -> None:
    fill(log, made(1e-3))
    with pytest.raises(ValueError, match=f"`device` \\(={HERE.name}\\) cannot be listed: its kernels have no current proof"):
        stamp(log, HERE.name)


def test_devices_by_their_folders(log: Log) -> None:
    """Of a CPU that is not this machine's: what its proof says, or else an estimate."""
    fill(log, made(1e-3))
    assert device_of(log, H200.name) == H200 and device_of(log, "nvidia-x") is None
    estimated = device_of(log, HERE.name)
    assert isinstance(estimated, Machine) and (estimated.name, estimated.lanes, estimated.threads) == (HERE.name, 16, 2)
    assert of_layer(log, HERE, CONV.with_(batch=2), "float32") is None


def test_the_source_that_selects_defaults() -> None:
    """Models, spaces, rules and what ranks them, which the digest of kernels leaves out."""
    for target in sources.TARGETS:
        chosen = {path.relative_to(sources.ROOT) for path in sources.choice_files(target)}
        generators = {path.relative_to(sources.ROOT) for path in sources.files(target)}
        names = {str(path) for path in chosen - generators}
        assert generators < chosen and {"registry/ranking.py", f"registry/{target}_backend.py", "records/merit.py"} < names
        assert not {f"registry/{other}_backend.py" for other in sources.TARGETS if other != target} & names
        assert any(sources.chooses(Path(name)) for name in names) and choice_digest(target) != target_digest(target)


def test_only_the_default_tile_s_own_record_says_so() -> None:
    assert rivals_now("cpu", "float32", default=True) == f"{rivals_now('cpu', 'float32')}:default"
