"""Which device a folder of records is of: a known GPU, this machine, or a CPU whose numbers are estimated from its records."""

from __future__ import annotations

from typing import Any

import pytest
from recorded import CONV, DEVICE, fill, ok

from im2win.device.cpu import Machine
from im2win.device.gpu import H200
from im2win.records.log import Log
from im2win.records.standings import device_of


@pytest.mark.parametrize(("lanes", "isa", "registers"), [(16, "avx512f", 32), (8, "avx2", 16), (4, "neon", 32), (2, "", 16)])
def test_the_numbers_of_an_unknown_cpu_follow_from_its_vectors(log: Log, lanes: int, isa: str, registers: int) -> None:
    """The widest that a record has; its caches are those of a common core."""
    fill(log, ok(tile={"rows": 4}), ok(2e-3, conv=CONV.with_(batch=2), tile={"lanes": lanes}))
    found = device_of(log, DEVICE)
    assert found == Machine("intel-xeon", "rocketlake", isa, 2, lanes, registers, 48 * 1024, 2 * 1024**2, 32 * 1024**2)
    assert found.name == DEVICE


def test_folders_of_no_cpu(log: Log) -> None:
    gpu: dict[str, Any] = {"target": "cuda", "device": "nvidia-unknown-2t"}
    fill(log, ok(**gpu), ok(device="intel-xeon"))
    assert device_of(log, H200.name) is H200
    assert device_of(log, "nvidia-unknown-2t") is device_of(log, "intel-xeon") is device_of(log, "amd-epyc-znver4-2t") is None


def test_this_machine_is_itself(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Machine("Intel(R) Xeon(R)", "rocketlake", "avx512f", 8, 16, 32, 1 << 15, 1 << 20, 1 << 23)
    monkeypatch.setattr(Machine, "host", classmethod(lambda cls: host))
    fill(log, ok(device=host.name.replace("8t", "2t")))
    found = device_of(log, host.name.replace("8t", "2t"))
    assert isinstance(found, Machine) and (found.l1_bytes, found.threads, found.brand) == (1 << 15, 2, host.brand)
