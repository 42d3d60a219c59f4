"""What is committed still applies: every tuning record to today's code, every tuned layer to its suite."""

from __future__ import annotations

import dataclasses
import math
import statistics

import pytest
from paths import ROOT

from im2win.bench.results import Result, geometric_mean
from im2win.builder.build import build_tile
from im2win.device.cpu import Machine
from im2win.device.gpu import H200, KNOWN
from im2win.numerics.reference import error, random_tensors, reference
from im2win.numerics.tolerance import tolerance
from im2win.records.log import Log
from im2win.records.lookup import PACKAGED, search, tile_violations
from im2win.records.proofs import current_proof, proven, verdict
from im2win.records.record import Record
from im2win.records.standings import device_of, of_layer
from im2win.registry.backends import backend_for
from im2win.registry.schedules import candidates, schedule_of
from im2win.schedules.cuda.model import multistage
from im2win.schedules.cuda.model import warp_specialized as model
from im2win.spec.conv2d import Conv2d
from im2win.spec.suites import suite

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
            assert tile_violations(conv, record.method, record.tile, machine, "winograd") == [], f"{conv}: {record.tile}"
            # the form of six outputs is refused where its errors are too large; nothing else may be wrong
            refused = record.tile.get("outputs", 0) > 4 and record.message.startswith("error ")
            assert record.outcome != "wrong" or refused, f"{conv}: {record.algorithm} {record.tile}: {record.message}"
            count += 1
    assert count and not LOG.problems


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_covers_a_whole_suite(device: str) -> None:
    """Records of a few layers would mislead the look-up of others, which takes the nearest layer's tile."""
    found = {conv.with_(batch=1) for conv in LOG.convs(device)}
    assert {layer.conv for layer in suite("papers12", 1)} <= found


@pytest.mark.parametrize("device", DEVICES)
def test_every_record_is_proven(device: str) -> None:
    """By a proof of today's source: nobody's look-up has to emit a shipped record's kernel. If not: `im2win logs restamp tuning_logs`."""
    proof = current_proof(PACKAGED / device)
    assert proof is not None, "the generator's source has changed since the proof was made; run: im2win logs restamp tuning_logs"
    assert all(proven(record, [LOG]) for conv in LOG.convs(device) for record in LOG.read(conv, device))


@pytest.mark.parametrize("device", DEVICES)
def test_look_ups_of_shipped_layers_rank_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof lists how every layer's records stand against today's default tile; those that earned their place are found."""
    proof = current_proof(PACKAGED / device)
    outdated = "the source that selects default tiles has changed; run: im2win logs restamp tuning_logs --choices"
    assert proof is not None and proof.choices is not None, outdated
    here = device_of(LOG, device)
    assert here is not None and here.name == device and proof.choices.about(here)
    monkeypatch.setattr("im2win.records.judge.default_of", None)
    for conv in LOG.convs(device):
        kind, found = proof.choices.layers.get((str(conv), "float32"), [None])[0], of_layer(LOG, here, conv, "float32")
        assert kind == (found.standing.kind if found is not None else None)
        if found is None:  # recorded for an accuracy that float32 does not include
            continue
        if found.standing.reason is None:  # else the look-up goes on, and another device's records are judged by this one's default tile
            assert search(conv, here, [row.key for row in candidates("auto", conv, proof.target)], None).tier == "exact", f"{conv}: {kind}"


@pytest.mark.parametrize("device", DEVICES)
def test_listed_standings_are_what_is_found_anew(device: str) -> None:
    """Of a few layers."""
    here, proof = device_of(LOG, device), current_proof(PACKAGED / device)
    assert here is not None and proof is not None and proof.choices is not None
    for conv in sorted(LOG.convs(device), key=lambda conv: conv.flops)[::40]:
        found = of_layer(LOG, here, conv, "float32", anew=True)
        assert found is not None
        kind, method, gain, records = proof.choices.layers[str(conv), "float32"]
        assert (found.standing.kind, found.standing.method, found.records) == (kind, method, records)
        assert gain == (None if found.standing.gain is None else pytest.approx(found.standing.gain, abs=1e-3))


@pytest.mark.parametrize("device", DEVICES)
def test_some_records_emit_the_kernel_that_was_timed(device: str) -> None:
    """Of every algorithm the first and the last record, whatever the proof says."""
    found: dict[str, list[Record]] = {}
    for conv in LOG.convs(device):
        for record in LOG.read(conv, device):
            found.setdefault(record.method, []).append(record)
    reasons = {str(one.record.tile): one.reason for records in found.values() for one in map(verdict, {records[0], records[-1]})}
    assert not any(reasons.values()), reasons


def test_sums_that_untuned_kernels_may_take_keep_the_tolerance() -> None:
    """float32 from TF32 products: of all candidates measured none was refused; what docs/cuda.md says."""
    worst: dict[tuple[int, bool], float] = {}
    for device in KNOWN.keys() & set(DEVICES):
        for conv in LOG.convs(device):
            for record in LOG.read(conv, device):
                if record.tile["product"].endswith("tf32x3") and not record.tile["outputs"] and record.error and record.tolerance:
                    key = math.prod(conv.filter_shape[1:]), "split" in record.tile
                    assert record.outcome == "ok", f"{conv}: {record.tile}"
                    worst[key] = max(worst.get(key, 0.0), record.error / record.tolerance)
    shares = {key: round(share, 1) for key, share in worst.items() if key[0] > 3000}
    assert shares == {(3136, False): 0.5, (3136, True): 0.2, (4608, False): 0.1, (4608, True): 0.3}


def best_streamed(key: str, **of_tile: str) -> dict[bool, float]:
    """The best time of a layer's records: of warp-specialized kernels, or of such a tile, and of all else, or of all other such tiles."""
    best = {True: math.inf, False: math.inf}
    last = {(one.method, str(one.tile)): one for one in LOG.read(Conv2d.parse(key), "nvidia-h200")}
    for record in last.values():
        streamed = record.method == "direct/warp_specialized"
        if streamed or not of_tile:
            own = streamed and all(record.tile.get(name) == value for name, value in of_tile.items())
            best[own] = min(best[own], record.seconds or math.inf)
    return best


def test_what_filters_in_steps_gained() -> None:
    """The best records over the best of others, as docs/cuda.md says."""
    text = " ".join((ROOT / "docs" / "cuda.md").read_text().split())
    gained: dict[int, list[float]] = {1: [], 32: [], 128: []}
    summed = []
    meant = {layer.conv for name in ("resnet50", "papers12") for layer in suite(name, 1)}
    for conv in LOG.convs("nvidia-h200"):
        if conv.with_(batch=1, dtype="float32", layout="NCHW") in meant and conv.layout == "NHWC" and conv.dtype == "float16":
            best, sums = best_streamed(str(conv)), best_streamed(str(conv), shared="accumulators")
            if math.isfinite(best[True]):
                gained[conv.batch].append(best[True] / best[False])
                summed += [sums[True] / sums[False]] if conv.batch == 1 and math.isfinite(sums[True]) else []
    one, some, many = (f"{geometric_mean(shares):.2f}" for shares in gained.values())
    assert f"its best takes {one} of the time with one image, {some} with 32 and {many} with 128" in text
    counts = [len(shares) for shares in gained.values()]
    assert f"(geometric means of {counts[0]}, {counts[1]} and {counts[2]} layers of ResNet-50 and papers12, float16)" in text
    share = f"{geometric_mean(summed):.2f}"
    assert f"tiles that share accumulators take {share} of the time of the best that do not ({len(summed)} layers)" in text
    taps = []
    for key in ("n128-c512x7x7-k512x3x3", "n128-c256x12x12-k512x3x3", "n128-c256x14x14-k256x3x3", "n32-c256x14x14-k256x3x3-p1"):
        best = best_streamed(f"{key}-float16-NHWC", tma_boxes="taps")
        taps.append(f"{best[True] / best[False]:.2f}")
    assert f"take {taps[0]} of the time of others on conv12" in text and f"; {taps[1]} and {taps[2]} on conv6 and conv11" in text
    assert f"but {taps[3]} on the 3x3 of 14x14 outputs with padding" in text


def streamed_records() -> dict[Conv2d, list[Record]]:
    """Right records of warp-specialized kernels, of every tile the last."""
    found: dict[Conv2d, list[Record]] = {}
    for conv in LOG.convs("nvidia-h200"):
        records = (one for one in LOG.read(conv, "nvidia-h200") if one.method == "direct/warp_specialized" and one.seconds)
        last = {str(one.tile): one for one in records}
        found |= {conv: list(last.values())} if last else {}
    return found


def test_what_shared_filters_gained() -> None:
    """Beside shared windows, or nothing shared, as docs/cuda.md says."""
    shares = []
    for records in streamed_records().values():
        filters, windows = ([one.cost for one in records if one.tile.get("shared", "windows") == name] for name in ("filters", "windows"))
        shares += [min(filters) / min(windows)] if filters and windows else []
    text = " ".join((ROOT / "docs" / "cuda.md").read_text().split())
    assert f"filters take {geometric_mean(shares):.2f} of the time" in text
    assert f"mean of {len(shares)} layers); on {sum(share < 1 for share in shares)} of these they are faster" in text


def test_how_well_the_model_of_filters_in_steps_fits() -> None:
    """As it says."""
    backend, row = backend_for(H200, "exact"), schedule_of("direct/warp_specialized")
    off = [
        [math.log(one.cost / backend.cost(conv, row, backend.tile(row, one.tile))) for one in records]
        for conv, records in streamed_records().items()
    ]
    count = sum(map(len, off))
    within = math.sqrt(sum(statistics.pvariance(one) * len(one) for one in off) / count)
    between = statistics.pstdev(map(statistics.mean, off))
    text = " ".join(str(model.__doc__).split())
    assert f"of {count} tiles of {len(off)} layers: how far estimates are off has a standard deviation of {100 * within:.0f} %" in text
    assert f"and its mean one of {100 * between:.0f} % between layers" in text


def test_how_well_the_models_choose_among_recorded_tiles() -> None:
    """As the model of multistage kernels says. Of layers with eight records of float32 accuracy; TF32's tiles are no rivals."""
    backend, lost = backend_for(H200), []
    for conv in LOG.convs("nvidia-h200"):
        last = {(one.method, str(one.tile)): one for one in LOG.read(conv, "nvidia-h200") if conv.dtype == "float32" and one.seconds}
        found = [(one, schedule_of(one.method), backend.tile(schedule_of(one.method), one.tile)) for one in last.values()]
        usable = [each for each in found if backend.proven(conv, each[2]) and not backend.violations(conv, *each[1:])]
        if len(usable) >= 8:
            first = min(usable, key=lambda each: backend.cost(conv, *each[1:]))[0]
            lost.append(first.cost / min(one.cost for one, *_ in usable))
    mean, most = f"{geometric_mean(lost):.2f}", f"{max(lost):.2f}"
    text = " ".join(str(multistage.__doc__).split())
    assert f"On {len(lost)} float32 layers" in text and f"costs {mean} times as much as the best, and {most} times at most" in text


def test_which_layers_of_resnet50_are_ours_in_float16() -> None:
    """Those of 3x3 and with a stride, all of them, as docs/cuda.md says."""
    rows = Result.load(ROOT / "benchmarks" / "results" / "nvidia-h200" / "resnet50-nhwc-float16-b32.json").layers
    convs = [(Conv2d.parse(row.conv), row.ratio or 0.0) for row in rows]
    assert all(ratio > 1 for conv, ratio in convs if conv.kernel != (1, 1) or conv.stride != (1, 1))
    assert sum(ratio > 1 for _, ratio in convs) > len(convs) / 2


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
        tile = schedule_of(best.method).scheduler.tile(best.tile)
        y = build_tile(conv, best.method, tile, machine)(tensors["data"], tensors["filter"])
        assert error(y, reference(conv, tensors["data"], tensors["filter"])) <= tolerance(conv)
