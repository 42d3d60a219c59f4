"""`im2win logs`: records that today's default tiles have not met, and the part of a proof that lists them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import tvm
from recorded import TODAY, beside_default, fill, ok

from im2win.device.cpu import Machine
from im2win.records.emission import emitted
from im2win.records.log import Log
from im2win.records.proofs import current_proof
from im2win.records.record import Record
from im2win.registry.ranking import default_tile
from im2win.spec.conv2d import Conv2d

CONV = Conv2d.parse("n1-c8x10x10-k16x1x1")
HOST = Machine.host()


def unmet(**changes: Any) -> Record:
    """A record of a schedule that is not the default's."""
    name = "mec/tiled" if default_tile(CONV, machine=HOST)[0] != "mec/tiled" else "direct/tiled"
    tile = default_tile(CONV, name, HOST)[1].as_dict()
    facts = {"device": HOST.name, "threads": HOST.threads, "tvm": tvm.__version__, "generator": TODAY}
    return ok(1e-3, CONV, algorithm=name, tile=tile, **{**facts, **changes})


def test_show_stale_names_what_mends_it(command: Callable[..., Any], tmp_path: Path) -> None:
    record = unmet()
    log = fill(Log(tmp_path), record, replace(record, device="nvidia-x", target="cuda", threads=1))
    shown = command("logs", "show", tmp_path, "--stale").out
    assert f"{HOST.name} {CONV}: " in shown and "the algorithm of today's default tile, was not tried" in shown
    assert f"im2win tune {CONV} --target cpu --logs {tmp_path}" in shown
    assert f"{HOST.name}: the records of 1 of 1 layer are only hints." in shown
    assert "nvidia-x: its default tiles are unknown on this machine." in shown
    (mine, other) = json.loads(command("logs", "show", tmp_path, "--stale", "--json").out)["devices"]
    assert [row["conv"] for row in mine["stale"]] == [str(CONV)] and mine["layers"] == 1 and not other["known"]
    fill(log, *beside_default(record, HOST))
    assert f"{HOST.name}: the records of 0 of 1 layer are" in command("logs", "show", tmp_path, "--stale", "--device", HOST.name).out


def test_restamp_emits_kernels_and_then_lists_standings(command: Callable[..., Any], tmp_path: Path) -> None:
    """With --choices it emits nothing; it needs the kernels' proof for that."""
    record = unmet()
    record = replace(record, fingerprint=emitted(CONV, record.method, record.tile, "cpu"))
    log, folder = fill(Log(tmp_path), record), tmp_path / HOST.name
    assert "its kernels have no current proof" in command("logs", "restamp", tmp_path, "--choices").out and current_proof(folder) is None
    done = command("logs", "restamp", tmp_path, "--processes", 1)
    assert f"{HOST.name}: the kernel that was timed is emitted for 1 of 1 record." in done.out
    assert f"{HOST.name}, accuracy float32: 1 layer new-algorithm" in done.out
    fill(log, *beside_default(record, HOST))
    done = command("logs", "restamp", tmp_path, "--choices", "--processes", 1)
    assert "is emitted for" not in done.out and f"{HOST.name}, accuracy float32: 1 layer met" in done.out
    proof = current_proof(folder)
    assert proof is not None and proof.choices is not None and proof.choices.layers[str(CONV), "float32"][0] == "met"
