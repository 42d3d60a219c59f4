"""The look-up climbs its tiers in order, and says what it refused on the way."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from recorded import CONV, DEVICE, bad, fill, ok, stale

from im2win.device.gpu import H200
from im2win.records.likeness import distance
from im2win.records.log import Log
from im2win.records.lookup import Found, find, superseded
from im2win.registry.backends import backend_for
from im2win.spec.conv2d import Conv2d


def look(*logs: Log, conv: Conv2d = CONV, device: str = DEVICE, illegal: tuple[int, ...] = (), **options: Any) -> Found:
    def legal(where: Conv2d, algorithm: str, tile: dict[str, Any]) -> list[str]:
        assert where == conv
        return [f"`rows` (={tile['rows']}) must fit"] if tile["rows"] in illegal else []

    return find(conv, device, logs=logs, accepts=stale, legal=legal, **options)


def test_of_two_about_as_fast_the_leaner_is_found_and_kept(log: Log) -> None:
    lean, large = ok(1.02e-3, extra_bytes=0), ok(1e-3, trial=1, tile={"rows": 8}, extra_bytes=CONV.bytes_moved // 5)
    assert look(fill(log, large, lean)).record == lean
    log.prune()
    assert log.read(CONV, DEVICE) == [lean]


def test_a_candidate_measured_again_counts_as_the_last_time() -> None:
    """Also where nothing lies between the two, and where the last one is the slower."""
    first, other, again = ok(1e-3), ok(1.5e-3, tile={"rows": 8}), ok(2e-3)
    for records in ([first, again], [first, other, again]):
        assert [superseded(record, records) for record in records] == [True, *[False] * (len(records) - 1)]
    assert not superseded(first, [first, ok(2e-3, fingerprint="other"), ok(2e-3, threads=4)])


def test_nothing_found(log: Log) -> None:
    assert look() == look(log) == Found(None, "none", [])
    fill(log, bad(), ok(target="cuda"))
    assert look(log) == Found(None, "none", [])


def test_exact_takes_the_fastest_and_skips_thestale_with_reasons(log: Log) -> None:
    fill(log, ok(3e-3), ok(1e-3, tvm="0.26.0"), bad(), ok(2e-3, trial=1), ok(1.5e-3, fingerprint="old"), ok(0.1e-3, target="cuda"))
    assert look(log) == Found(
        ok(2e-3, trial=1),
        "exact",
        [
            (ok(1e-3, tvm="0.26.0"), "recorded with TVM 0.26.0"),
            (ok(1.5e-3, fingerprint="old"), "other kernel: old"),
        ],
    )
    assert look(log, target="cuda").record == ok(0.1e-3, target="cuda")


def test_devices_are_alike_by_the_words_that_they_share_from_the_first(log: Log) -> None:
    """A name that ends before they differ shares no more words than it has."""
    fill(log, ok(device="intel-xeon"), ok(2e-3, device="intel-xeon-rocketlake-4t"))
    assert look(log).record == ok(2e-3, device="intel-xeon-rocketlake-4t")


def test_of_two_logs_with_the_same_other_device_the_first_counts(tmp_path: Path) -> None:
    mine, shipped = (fill(Log(tmp_path / name), ok(seconds, device="amd-zen5-2t")) for name, seconds in (("b", 2e-3), ("a", 1e-3)))
    assert look(mine, shipped).record == ok(2e-3, device="amd-zen5-2t")


def test_exact_needs_the_same_threads(log: Log) -> None:
    fill(log, ok(1e-3, threads=4))
    assert look(log).tier == "exact"
    assert look(log, threads=2) == Found(None, "none", [(ok(1e-3, threads=4), "recorded with 4 threads, here there are 2")])
    many = fill(log, ok(conv=CONV.with_(batch=8), threads=1024))
    assert look(many, conv=CONV.with_(batch=8), threads=int("1024")).tier == "exact"


def test_the_first_log_with_a_record_that_applies_wins(tmp_path: Path) -> None:
    mine, stale, packaged = (Log(tmp_path / name) for name in ("mine", "stale", "packaged"))
    fill(mine, ok(2e-3))
    fill(stale, ok(1e-3, tvm="0.26.0"))
    fill(packaged, ok(1e-3))
    assert look(mine, packaged).record == ok(2e-3)
    assert look(stale, packaged).record == ok(1e-3)


def test_a_compatible_device_comes_next_and_the_most_alike_first(log: Log) -> None:
    near = CONV.with_(bias=True)
    fill(log, ok(conv=near), ok(device="amd-zen5-2t"), ok(device="intel-xeon-icelake-2t"), ok(device="intel-xeon-skylake-2t", tvm="0.26.0"))
    assert look(log, threads=2).tier == "compatible device"
    assert look(log).record == ok(device="intel-xeon-icelake-2t")
    fill(log, ok(2e-3, device="intel-xeon-rocketlake-4t"))
    assert look(log).record == ok(2e-3, device="intel-xeon-rocketlake-4t")
    found = look(log, threads=3)
    assert found.tier == "none" and len(found.skipped) == 5


def test_a_compatible_device_s_tile_must_be_legal_here(log: Log) -> None:
    fill(log, ok(device="amd-zen5-2t", tile={"rows": 9}), ok(1.1e-3, device="amd-zen5-2t", tile={"rows": 8}))
    found = look(log, illegal=(9,))
    assert found.record == ok(1.1e-3, device="amd-zen5-2t", tile={"rows": 8})
    assert found.skipped == [(ok(device="amd-zen5-2t", tile={"rows": 9}), f"its tile is not legal for {CONV}: `rows` (=9) must fit")]


NEARER_FIRST = [
    CONV.with_(activation="relu"),
    CONV.with_(bias=True, activation="relu"),
    CONV.with_(batch=2, residual=True),
    CONV.with_(batch=256, bias=True),
    CONV.with_(height=60, width=60),
    CONV.with_(in_channels=128),
    CONV.with_(in_channels=128, height=28, width=28),
    CONV.with_(in_channels=512, out_channels=512, height=7, width=7),
]
STRANGERS = [
    CONV.with_(kernel=1, padding=0), CONV.with_(stride=2), CONV.with_(dilation=2, padding=2), CONV.with_(layout="NHWC"),
    CONV.with_(dtype="float16"), CONV.with_(groups=64),
]  # fmt: skip


def test_the_nearest_layer_and_then_the_next(log: Log) -> None:
    fill(log, *(ok(conv=conv) for conv in STRANGERS))
    assert look(log) == Found(None, "none", [])
    for conv in reversed(NEARER_FIRST):
        fill(log, ok(conv=conv))
        assert look(log) == Found(ok(conv=conv), "nearest layer", [])
    assert look(log, device="amd-zen5-2t", conv=CONV.with_(batch=3)).tier == "none"  # another device's other layer says nothing
    assert look(log, conv=CONV.with_(stride=2, bias=True)).record == ok(conv=CONV.with_(stride=2))
    assert look(log, conv=CONV.with_(groups=32)).record == ok(conv=CONV.with_(groups=64))


def test_the_nearest_layer_s_tile_must_be_legal(log: Log) -> None:
    near, far = CONV.with_(bias=True), CONV.with_(out_channels=32)
    fill(log, ok(conv=near, tile={"rows": 9}), ok(conv=far, tile={"rows": 2}))
    found = look(log, illegal=(9,))
    assert found.record == ok(conv=far, tile={"rows": 2})
    assert found.skipped == [(ok(conv=near, tile={"rows": 9}), f"its tile is not legal for {CONV}: `rows` (=9) must fit")]


def test_a_slow_tile_is_not_borrowed(log: Log) -> None:
    near, far = CONV.with_(bias=True), CONV.with_(out_channels=32)
    fill(log, ok(1e-3, near, tile={"rows": 9}), ok(5e-3, near, tile={"rows": 1}), ok(0.2e-3, near, tile={"rows": 1}, tvm="0.26.0"))
    assert look(log, illegal=(9,)).tier == "none"
    fill(log, ok(9e-3, far))
    assert look(log, illegal=(9,)).record == ok(9e-3, far)
    fill(log, ok(1.2e-3, near, tile={"rows": 2}))  # a quarter slower at most
    assert look(log, illegal=(9,)).record == ok(1.2e-3, near, tile={"rows": 2})


def test_hints_of_a_layer_in_two_logs_count_once(tmp_path: Path) -> None:
    mine, packaged = Log(tmp_path / "mine"), Log(tmp_path / "packaged")
    *near, far = (CONV.with_(out_channels=CONV.out_channels * factor) for factor in (2, 3, 4, 6))
    for one in (mine, packaged):
        fill(one, *(ok(conv=conv) for conv in near))
    fill(packaged, ok(conv=far))
    found = look(mine, packaged, unearned=lambda record, *_: None if record.conv == str(far) else "a hint")
    assert found.record == ok(conv=far) and [reason for _, reason in found.skipped] == ["a hint"] * 6


def _crowded_folder(log: Log, count: int) -> None:
    (log.folder / DEVICE).mkdir(parents=True)
    for channels in range(1, count + 1):
        conv = Conv2d(1, channels, 28, 28, 64, 3, padding=1)
        log.path(conv, DEVICE).write_text(ok(conv=conv).to_line() + "\n")


def test_an_exact_hit_reads_no_other_file(log: Log) -> None:
    _crowded_folder(log, 20)
    for path in (log.folder / DEVICE).iterdir():
        path.write_text("broken\n")
    fill(log, ok())
    assert look(log).tier == "exact"
    assert log.problems == []
    assert look(log, conv=CONV.with_(batch=2)).tier == "nearest layer"


def test_look_up_in_a_folder_of_2000_layers_is_quick(log: Log) -> None:
    _crowded_folder(log, 2000)
    wanted = Conv2d(1, 1000, 28, 28, 64, 3, padding=1)

    def best_of_5(**options: Any) -> tuple[float, Found]:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            found = find(**{"conv": wanted, "device": DEVICE, "logs": [log], "accepts": stale, "legal": lambda *_: [], **options})
            times.append(time.perf_counter() - start)
        return min(times), found

    nearest, found = best_of_5(conv=wanted.with_(bias=True))
    assert (found.tier, found.record) == ("nearest layer", ok(conv=wanted))
    assert nearest < 0.25  # a slow machine under load takes 0.07; reading every file would take seconds
    exact, found = best_of_5()
    assert found.tier == "exact"
    assert exact < 0.025
    hopeless, found = best_of_5(conv=wanted.with_(bias=True), accepts=lambda record: "stale")
    assert (found.tier, len(found.skipped)) == ("none", 2000)
    assert hopeless < 0.25


def test_on_a_gpu_a_layer_is_near_with_the_same_channels_and_about_as_many_windows(log: Log) -> None:
    """Or so many that every multiprocessor has enough of them: elsewhere the model's tile was the faster one."""
    backend = backend_for(H200)
    small, large = Conv2d(1, 512, 7, 7, 512, 3, padding=1), Conv2d(1, 64, 224, 224, 64, 3, padding=1)
    assert backend.alike(small, small.with_(bias=True)) and backend.alike(small, small.with_(batch=2))
    assert not backend.alike(small, small.with_(batch=32)) and not backend.alike(small.with_(batch=32), small)
    assert not backend.alike(small, small.with_(in_channels=256)) and not backend.alike(small, small.with_(out_channels=256))
    assert backend.alike(large, large.with_(height=960, width=960, batch=16))
    fill(log, ok(conv=CONV.with_(batch=2)))
    assert look(log).tier == "nearest layer" and look(log, alike=lambda conv, other: False).tier == "none"


def test_differences_of_epilogues_are_counted_each() -> None:
    """One way and the other alike; an equal layer is at no distance."""
    plain = Conv2d.parse("n1-c8x9x9-k16x3x3")
    assert distance(plain, plain) == (0, 0)
    for change in ({"bias": True}, {"residual": True}, {"activation": "relu"}, {"bias": True, "residual": True}):
        other = plain.with_(**change)
        assert distance(plain, other) == distance(other, plain) == (0, 0.25 * len(change))
        assert distance(other, other) == (0, 0)
