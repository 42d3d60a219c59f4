"""What is committed still applies: every tuning record to today's code, every tuned layer to its suite."""

from __future__ import annotations

import dataclasses
import math

import pytest

from im2win.algorithms import ALGORITHMS
from im2win.builder import build_tile
from im2win.gpu import KNOWN
from im2win.logs import Log
from im2win.lookup import PACKAGED, stale, tile_problems
from im2win.machine import Machine
from im2win.reference import error, random_tensors, reference, tolerance
from im2win.schedules.cuda.tile import PROVEN_DEPTH
from im2win.suites import suite

LOG = Log(PACKAGED)
DEVICES = LOG.devices()


@pytest.mark.parametrize("device", DEVICES)
def test_every_record_applies(device: str) -> None:
    # Legality depends on the device: every CPU with committed records has AVX-512.
    cpu = dataclasses.replace(Machine.host(), lanes=16, registers=32, l1_bytes=48 << 10, l2_bytes=2 << 20)
    machine = KNOWN.get(device, cpu)
    count = 0
    for conv in LOG.convs(device):
        for record in LOG.read(conv, device):
            assert stale(record) is None, f"{conv}: {stale(record)}"
            assert tile_problems(conv, record.algorithm, record.tile, machine, "winograd") == [], f"{conv}: {record.tile}"
            # float32 from TF32 products is refused where a sum is too long for it; nothing else may be wrong
            refused = record.tile.get("product") == "tf32x3" and record.message.startswith("error ")
            assert record.outcome != "wrong" or refused, f"{conv}: {record.algorithm} {record.tile}: {record.message}"
            count += 1
    assert count and not LOG.problems


def test_sums_that_untuned_kernels_may_take_keep_the_tolerance() -> None:
    """float32 from TF32 products: of all candidates measured, none within the proven depth was refused; what docs/cuda.md says."""
    worst: dict[int, float] = {}
    for device in KNOWN.keys() & set(DEVICES):
        for conv in LOG.convs(device):
            for record in LOG.read(conv, device):
                if record.tile["product"] == "tf32x3" and record.error is not None and record.tolerance:
                    depth = math.prod(conv.filter_shape[1:])
                    assert record.outcome == "ok" or depth > PROVEN_DEPTH, f"{conv}: {record.tile}"
                    worst[depth] = max(worst.get(depth, 0.0), record.error / record.tolerance)
    assert round(worst[3136], 1) == 0.9 and round(worst[4608], 1) == 1.1


@pytest.mark.parametrize(("name", "batch"), [("papers12", 1), ("papers12", 8), ("resnet50", 1)])
def test_suites_are_tuned_on_a_committed_device(name: str, batch: int) -> None:
    wanted = {layer.conv for layer in suite(name, batch)}
    assert any(wanted <= set(LOG.convs(device)) for device in DEVICES)


def test_tuned_layers_are_right_on_this_machine() -> None:
    """The fastest records of some small layers, built and checked here; on a CPU without AVX-512 their vectors would be illegal."""
    machine = Machine.host()
    if machine.lanes < 16:
        pytest.skip(f"committed tiles have vectors of 16 lanes, this CPU has {machine.lanes}")
    layers = sorted({layer.conv for layer in suite("papers12", 1)}, key=lambda conv: conv.flops)[:4]
    for conv in layers:
        best = min((r for d in DEVICES for r in LOG.read(conv, d) if r.seconds and r.target == "cpu"), key=lambda record: record.cost)
        tensors = random_tensors(conv, 0)
        tile = ALGORITHMS[best.algorithm].scheduler.tile(best.tile)
        y = build_tile(conv, best.algorithm, tile, machine)(tensors["data"], tensors["filter"])
        assert error(y, reference(conv, tensors["data"], tensors["filter"])) <= tolerance(conv)
