"""Proofs that records still apply: what they cover is not emitted again, and nothing forged passes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tvm
from ops import host
from recorded import fill, ok

from im2win.records import proofs
from im2win.records.emission import emitted
from im2win.records.log import Log
from im2win.records.lookup import stale
from im2win.records.proofs import FILE, Choices, Proof, current_proof, proven, restamp, verdict
from im2win.records.record import Record
from im2win.registry.ranking import default_tile
from im2win.registry.sources import code_digest
from im2win.spec.conv2d import Conv2d

CONV = Conv2d.parse("n1-c8x14x14-k16x3x3-p1")


@pytest.fixture(scope="module")
def good() -> Record:
    """A record of another machine, made by code that is not today's, whose kernel is."""
    tile = default_tile(CONV, "direct/tiled", host())[1].as_dict()
    return ok(1e-3, CONV, algorithm="direct/tiled", tile=tile, tvm=tvm.__version__, fingerprint=emitted(CONV, "direct/tiled", tile, "cpu"))


@pytest.fixture
def log(tmp_path: Path, good: Record) -> Log:
    return fill(Log(tmp_path / "log"), good)


def nothing_is_emitted(record: Record) -> str:
    raise AssertionError("emitted, though a proof covers it")


def test_a_record_without_a_proof_is_emitted_anew(log: Log, good: Record) -> None:
    assert stale(good, [log]) is None and current_proof(log.folder / good.device) is None
    forged = replace(good, fingerprint="0" * 16)
    assert stale(forged) == f"its kernel has changed since ({'0' * 16}, now {good.fingerprint})"
    assert stale(replace(good, tile={"rows": 3})) is not None
    assert stale(replace(good, tvm="0.1")) == f"recorded with TVM 0.1, this is {tvm.__version__}"


def test_what_a_proof_covers_is_not_emitted_again(log: Log, good: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [one.reason for one in restamp(log, good.device)] == [None]
    monkeypatch.setattr(proofs, "emitted_now", nothing_is_emitted)
    assert proven(good, [log]) and stale(good, [log]) is None
    assert not proven(good, []) and not proven(replace(good, tile={**good.tile, "rows": 99}), [log])


def test_what_today_s_source_made_is_not_emitted_again(good: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "emitted_now", nothing_is_emitted)
    assert stale(replace(good, generator=code_digest("cpu", good.method))) is None


def test_a_proof_of_other_source_or_of_another_tvm_covers_nothing(log: Log, good: Record) -> None:
    restamp(log, good.device)
    path = log.folder / good.device / FILE
    for name, value in (("sources", {good.method: "0" * 16}), ("sources", []), ("tvm", "0.1"), ("target", "tpu"), ("records", 3)):
        path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
        assert not proven(good, [log])
        restamp(log, good.device)
        assert proven(good, [log])
    for text in ("", "[]", "{", "[" * 100_000):
        path.write_text(text)
        assert not proven(good, [log])


def test_choices_that_are_out_of_date_still_state_the_device(log: Log, good: Record) -> None:
    restamp(log, good.device)
    path = log.folder / good.device / FILE
    numbers = {"threads": 2, "lanes": 8, "registers": 16, "l1_bytes": 1, "l2_bytes": 2, "l3_bytes": 3}
    choices = Choices("0" * 16, numbers, {}).to_json()
    path.write_text(json.dumps({**json.loads(path.read_text()), "sources": {good.method: "0" * 16}, "choices": choices}))
    restamp(log, good.device)
    stated, current = Proof.from_text(path.read_text()), current_proof(path.parent)
    assert stated is not None and stated.choices is not None and stated.choices.device == numbers
    assert current is not None and current.choices is None


def test_a_forged_stamp_is_found(log: Log, good: Record) -> None:
    """A proof that lists a record whose kernel is another covers it, until everything is emitted anew."""
    forged = replace(good, fingerprint="f" * 16, seed=1)
    log.append(forged)
    proof = Proof(tvm.__version__, "cpu", {good.method: code_digest("cpu", good.method)}, frozenset(map(proofs.identity, (good, forged))))
    (log.folder / good.device / FILE).write_text(proof.to_text())
    assert stale(forged, [log]) is None
    verdicts = {one.record: one.reason for one in restamp(log, good.device, write=False, anew=True)}
    assert verdicts[good] is None and "has changed" in str(verdicts[forged])
    restamp(log, good.device)
    assert proven(forged, [log])
    restamp(log, good.device, processes=2, anew=True)
    assert proven(good, [log]) and not proven(forged, [log]) and stale(forged, [log]) == verdict(forged).reason


def test_a_proof_comes_back(log: Log, good: Record) -> None:
    seen: list[tuple[int, int]] = []
    restamp(log, good.device, progress=lambda done, of: seen.append((done, of)))
    text = (log.folder / good.device / FILE).read_text()
    proof = Proof.from_text(text)
    assert proof is not None and proof.to_text() == text and proof.current() and seen == [(1, 1)]
    assert restamp(log, "nobody") == []
